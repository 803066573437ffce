"""What convolutions and pooling share: sizes, strides, and what is added around an image."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import penstock as ps
from penstock.onnx.registry import Call


@dataclass(frozen=True)
class Windows:
    """How a kernel moves over the axes of an image."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    lengths: tuple[int, ...]  # of the result

    @property
    def even(self) -> bool:
        """Whether as much is added before each axis as after it."""
        return self.before == self.after


def windows_of(call: Call, image: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows that a node's attributes describe, over an image of these lengths."""
    count = len(image)
    strides = tuple(call.get("strides", [1] * count))
    dilations = tuple(call.get("dilations", [1] * count))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = list(call.get("pads", [0] * 2 * count))
    automatic = call.get("auto_pad", "NOTSET")
    if automatic.startswith("SAME"):
        totals = [
            max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in zip(image, strides, spans, strict=True)
        ]
        small, large = [n // 2 for n in totals], [n - n // 2 for n in totals]
        pads = small + large if automatic == "SAME_UPPER" else large + small
    elif automatic == "VALID":
        pads = [0] * 2 * count
    before, after = tuple(pads[:count]), tuple(pads[count:])
    lengths = []
    for n, s, span, low, high in zip(image, strides, spans, before, after, strict=True):
        free = n + low + high - span
        length = (-(-free // s) if call.get("ceil_mode", 0) else free // s) + 1
        if call.get("ceil_mode", 0) and (length - 1) * s >= n + low:
            length -= 1  # no window begins after the image
        lengths.append(length)
    return Windows(tuple(kernel), strides, dilations, before, after, tuple(lengths))


def parts(x: ps.Tensor, windows: Windows) -> Iterator[ps.Tensor]:
    """For each item of the kernel, what it meets in all windows of a padded image."""
    return (x[key] for key in keys(windows))


def keys(windows: Windows) -> Iterator[tuple[slice, ...]]:
    """For each item of the kernel, where all windows have it in a padded image."""
    for offsets in itertools.product(*map(range, windows.kernel)):
        moves = zip(offsets, windows.dilations, windows.strides, windows.lengths, strict=True)
        image = (slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, s, n in moves)
        yield (slice(None), slice(None), *image)


def covering(x: ps.Tensor, windows: Windows, value: float | int) -> ps.Tensor:
    """The image with a value around it, as far as the windows reach."""
    pad: list[int] = []
    for axis in reversed(range(len(windows.kernel))):
        span = (windows.kernel[axis] - 1) * windows.dilations[axis] + 1
        reach = (windows.lengths[axis] - 1) * windows.strides[axis] + span
        pad += [windows.before[axis], max(reach - x.shape[2 + axis] - windows.before[axis], 0)]
    return ps.pad(x, pad, value=value) if any(pad) else x
