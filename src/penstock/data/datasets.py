"""Datasets with items by index: rows of arrays, and folders of images."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.batches import Array, Ints
from penstock.data.errors import DataError

_SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"])


class Arrays:
    """The rows of arrays that have the same first axis, in memory or mapped from files by `np.load`.

    A sample is a row, or with several arrays a tuple of rows. A batch of them is taken at once.

    >>> rows, labels = ps.data.Arrays(np.zeros((6, 2)), np.arange(6)).rows(np.array([4, 1]))
    >>> rows.shape, labels.tolist()
    ((2, 2), [4, 1])
    """

    def __init__(self, *arrays: npt.ArrayLike) -> None:
        self._arrays = tuple(np.asarray(array) for array in arrays)
        self._files = [_mapped_file(array) for array in arrays if isinstance(array, np.memmap)]
        shapes = [array.shape for array in self._arrays]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise DataError(f"arrays need the same number of rows; their shapes are {shapes}")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Any:
        return self.rows(np.array(index))

    def rows(self, indices: Ints) -> Any:
        """The batch of some samples."""
        for path, nbytes in self._files:
            # To read behind the end of a mapped file would end the process.
            if (size := os.stat(path).st_size) < nbytes:
                raise DataError(f"{path} shrank from {nbytes} to {size} bytes while it was used")
        taken = tuple(array[indices] for array in self._arrays)
        return taken if len(taken) > 1 else taken[0]

    def key(self) -> str:
        """A checksum of a few rows, and of the arrays' shapes and dtypes."""
        few = sorted({0, len(self) // 2, len(self) - 1}) if len(self) else []
        kinds = [(array.shape, str(array.dtype)) for array in self._arrays]
        total = zlib.crc32(repr(kinds).encode())
        for array in self._arrays:
            total = zlib.crc32(np.ascontiguousarray(array[few]).tobytes(), total)
        return f"{total:08x}"


class ImageFolder:
    """Images in folders, each of which is a class: samples are pairs of an image and the class's number.

    Classes are in alphabetical order, and their names in `classes`. Images are float32 arrays from 0 to 1 of
    (channels, height, width), resized to `size`, (height, width), if it is given; or what `transform` makes
    of a Pillow image. Needs Pillow: pip install 'penstock[images]'.

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> (folder := pathlib.Path(tempfile.mkdtemp(), "cats")).mkdir()
    >>> Image.new("RGB", (4, 3)).save(folder / "a.png")
    >>> image, label = ps.data.ImageFolder(folder.parent)[0]
    >>> image.shape, label
    ((3, 3, 4), 0)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: tuple[int, int] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if size is not None and transform is not None:
            raise DataError("the size is up to `transform` where there is one; give only one of them")
        try:
            import PIL.Image  # noqa: F401 - found missing here, and not in a worker
        except ImportError:
            raise DataError("images need Pillow: pip install 'penstock[images]'") from None
        root = Path(folder)
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES and path.is_file()
        ]
        if not self.files:
            raise DataError(f"{root} has no images in folders of classes, such as {root / 'cats' / 'a.png'}")
        self._size, self._transform = size, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image, UnidentifiedImageError

        path, number = self.files[index]
        try:
            with Image.open(path) as image:
                if self._transform is not None:
                    return self._transform(image), number
                if image.mode in ("I", "F"):
                    raise DataError(
                        f"the pixels of {path} have no known range (mode {image.mode}); give a transform"
                    )
                if image.mode.startswith("I;16"):  # which Pillow would cut off at 255
                    rgb = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
                else:
                    rgb = image.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"the image {path} cannot be read: {error}") from error
        if self._size is not None:
            height, width = self._size
            rgb = rgb.resize((width, height))
        pixels: Array = np.asarray(rgb, np.float32) / np.float32(255)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), number


def _mapped_file(array: np.memmap[Any, Any]) -> tuple[str, int]:
    """The file of a mapped array, and how many bytes it has at least."""
    return str(array.filename), array.offset + array.nbytes
