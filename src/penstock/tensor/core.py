"""The tensor: a graph node on a device. Operators record nodes; values are computed when they are read."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from penstock.execution.realize import (
    Replaced,
    compute,
    needs_compiler,
    precompile,
    read,
    realize,
    value_of,
)
from penstock.graph import elementwise, shaping
from penstock.graph.custom_vjp import refused, refusing
from penstock.graph.node import DType, Node, Shape, leaf
from penstock.memory.buffer import Buffer
from penstock.registry import default_device, find
from penstock.runtime import Device
from penstock.stream.future import Future
from penstock.tensor import dtypes
from penstock.tensor.capture import Capture, capture
from penstock.tensor.dlpack import exported
from penstock.tensor.leaves import check_gradient, ends_at, leaf_of
from penstock.tensor.methods import Methods
from penstock.tensor.operators import Operators
from penstock.tensor.recording import computes, recording

if TYPE_CHECKING:
    from types import ModuleType

Scalar: TypeAlias = bool | int | float | complex
Operand: TypeAlias = "Tensor | Scalar | npt.NDArray[Any] | np.generic"
# A longer chain of pending nodes, or one whose results take more bytes, is computed before its value is read,
# so that the memory of a loop is bounded.
MAX_DEPTH = 500
MAX_PENDING_BYTES = 1 << 30

_captures = 0  # functions that are being captured, in any thread; 0 is the fast path
_counting = threading.Lock()


@contextlib.contextmanager
def captured_by(capturing: Capture) -> Iterator[None]:
    """In this block and this thread, tensors have the state that a captured function sees."""
    global _captures
    with _counting:
        _captures += 1
    token = capture.set(capturing)
    try:
        yield
    finally:
        capture.reset(token)
        with _counting:
            _captures -= 1


@contextlib.contextmanager
def outside_capture() -> Iterator[None]:
    """In this block, tensors have their state outside of the function that is being captured."""
    token = capture.set(None)
    try:
        yield
    finally:
        capture.reset(token)


def much_pending(node: Node) -> bool:
    """Whether a node has so much pending work that it is computed now, before its value is read."""
    deep = node.depth > MAX_DEPTH or node.pending_bytes > MAX_PENDING_BYTES
    return deep and node.value is None and computes()


class Size(int):
    """The number of items of a tensor, which also answers PyTorch's `x.size()` and `x.size(0)`."""

    shape: Shape

    @overload
    def __call__(self) -> Shape: ...
    @overload
    def __call__(self, dim: int) -> int: ...
    def __call__(self, dim: int | None = None) -> Shape | int:
        """The lengths of all axes, or of axis `dim`."""
        return self.shape if dim is None else self.shape[dim]


class Tensor(Operators, Methods):
    """An n-dimensional array on a device, as in the array API standard, with gradients as in PyTorch.

    >>> (ps.asarray([[1.0, 2.0], [3.0, 4.0]]) @ ps.ones((2, 1))).tolist()
    [[3.0], [7.0]]
    """

    # The `_actual` attributes hold the state outside of captured functions. Inside, `_node`, `grad` and
    # `requires_grad` go through the capture, so that other threads see none of its changes.
    __slots__ = (
        "__weakref__", "_actual_grad", "_actual_node", "_actual_requires_grad", "_source", "device",
    )  # fmt: skip
    _source: list[weakref.ref[Tensor]]  # of a gradient: see `leaves.sources_of`
    __array_priority__ = 1000  # operators of tensors take precedence over those of NumPy's arrays

    def __init__(self, node: Node, device: Device, requires_grad: bool = False) -> None:
        capturing = capture.get() if _captures else None
        if capturing is not None:
            capturing.made(self)
        else:
            if (node.depth > MAX_DEPTH or node.pending_bytes > MAX_PENDING_BYTES) and much_pending(node):
                realize([node], device)
            if requires_grad and (node.holder is None or node.holder() is None):
                node.holder = weakref.ref(self)
        self._actual_node = node
        self.device = device
        self._actual_requires_grad = requires_grad
        self._actual_grad: Tensor | None = None

    # Properties

    def _here(self) -> Tensor:
        """The tensor itself, or its stand-in inside the function that this thread captures."""
        capturing = capture.get()
        return self if capturing is None else capturing.stand_in(self)

    @property
    def _node(self) -> Node:
        return self._here()._actual_node if _captures else self._actual_node

    @_node.setter
    def _node(self, node: Node) -> None:
        self._here()._actual_node = node

    @property
    def dtype(self) -> DType:
        """The dtype of its items."""
        return self._node.dtype

    @property
    def shape(self) -> Shape:
        """The length of each axis."""
        return self._node.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._node.ndim

    @property
    def size(self) -> Size:
        """The number of items; also PyTorch's `x.size()`, the shape, and `x.size(0)`, a length."""
        node = self._node
        size = Size(node.size)
        size.shape = node.shape
        return size

    @property
    def mT(self) -> Tensor:  # noqa: N802 - the standard's name
        """The transposes of the matrices in the last two axes."""
        if self.ndim < 2:
            raise ValueError(f"mT needs two axes, and the shape is {self.shape}")
        axes = (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        return record(shaping.permute(self._node, axes), self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ValueError(f"version {api_version!r} of the array API is not supported; use 2024.12")
        import penstock

        return penstock

    # Values

    def realize(self) -> Tensor:
        """Compute the value now, without reading it. Returns the tensor itself."""
        if _captures:
            self._realize()
        else:
            compute(self._actual_node, self.device)
        return self

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a new NumPy array."""
        if not _captures and (known := read(self._actual_node, self.device)) is not None:
            return known
        from penstock.tensor.keeping import realize_to_read

        realize_to_read(self)
        values = self._download().wait()
        for recorder in self.device.stream.recorders:
            recorder.fetched(values)
        return values

    def numpy_async(self) -> Future[npt.NDArray[Any]]:
        """The values as a future of a NumPy array. Missing kernels are compiled in another thread."""
        node, device = self._node, self.device
        profiled = bool(device.stream.recorders)  # they need this thread's call site
        if capture.get() is not None or profiled or not needs_compiler(node, device):
            return self._download()

        def build() -> Future[npt.NDArray[Any]]:
            precompile(node, device)
            return device.download(value_of(node, device), node.dtype, node.shape)

        return device.in_background(build)

    def _download(self) -> Future[npt.NDArray[Any]]:
        return self.device.download(self._realize(), self.dtype, self.shape)

    def item(self) -> Any:
        """The value of a tensor with a single item, as a Python number."""
        if self._node.size != 1:
            raise ValueError(f"item() is for one value, and the shape is {self.shape}")
        return self.numpy().item()

    def tolist(self) -> Any:
        """The values in nested lists."""
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the values of a tensor can only be copied to NumPy")
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Tensor:
        from penstock.tensor.ufuncs import applied

        return applied(ufunc, method, inputs, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the host's memory, into which values are exported

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != (1, 0):
            raise BufferError(f"values can be exported to the host's memory, not to device {dl_device}")
        array: Any = self._shared_memory() if copy is False else self.numpy()
        return exported(array, stream=stream, max_version=max_version)

    def _realize(self) -> Buffer:
        capturing = capture.get()
        if capturing is not None:
            capturing.used(self)
            capturing.refuse_value(self._node)
        return value_of(self._node, self.device)

    def _shared_memory(self) -> npt.NDArray[Any]:
        """The values in device memory that the host shares, read-only. They never change."""
        value = self._realize()
        if value.memory.host is None and self.size:
            raise BufferError(f"{self.device.name} does not share its memory; the values can only be copied")
        value.shared = True
        with self.device.view(value, self.dtype, self.shape) as array:
            return array

    def _become(self, node: Node) -> None:
        """Point to the node of a computed value that no other tensor has."""
        tensor = self._here()
        if tensor._actual_requires_grad:
            ends_at(node, tensor)
        tensor._actual_node = node

    def __bool__(self) -> bool:
        return bool(self._single("bool"))

    def __int__(self) -> int:
        return int(self._single("int"))

    def __float__(self) -> float:
        return float(self._single("float"))

    def __complex__(self) -> complex:
        return complex(self._single("complex"))

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"only integers can be an index, and the dtype is {self.dtype}")
        return int(self._single("an index"))

    def _single(self, what: str) -> Any:
        if self.ndim and self._node.size != 1:
            raise TypeError(f"only one value can become {what}, and the shape is {self.shape}")
        value = self.item()
        if isinstance(value, complex) and what in ("int", "float"):
            raise TypeError(f"a complex value cannot become {what}")
        return value

    def __repr__(self) -> str:
        shown = self.numpy()
        if self.dtype is dtypes.bfloat16:
            shown = shown.astype(np.float32)  # NumPy cannot format bfloat16
        body = np.array2string(shown, separator=", ", prefix="tensor(", threshold=1000)
        return f"tensor({body}, dtype={self.dtype}, device={self.device.name})"

    def __format__(self, spec: str) -> str:
        """A single value in Python's format of numbers, such as `f"{loss:.3f}"`."""
        if not spec:
            return str(self)
        if self.size != 1:
            raise TypeError(f"{spec!r} formats one value, and the shape is {self.shape}")
        return format(self.item(), spec)

    __hash__ = object.__hash__

    # Devices

    def to_device(self, device: Device | str, /, *, stream: Any = None) -> Tensor:
        """The same values on another device. Gradients do not pass between devices: `backward` raises."""
        if stream is not None:
            raise ValueError("a stream cannot be chosen")
        target = resolve(device)
        if target is self.device:
            return self
        moved = from_numpy(self.numpy(), target)
        if not (self.requires_grad and recording()):
            return moved
        why = (
            f"to_device: gradients do not pass from {target.name} back to {self.device.name}; move tensors "
            f"that require one before anything is computed from them, or move x.detach()"
        )
        return Tensor(refused(refusing(why), moved._node.value, moved.shape, moved.dtype), target, True)

    # Gradients

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed with respect to it, or to tensors that it was computed from."""
        return self._here()._actual_requires_grad if _captures else self._actual_requires_grad

    @requires_grad.setter
    def requires_grad(self, requires: bool) -> None:
        self.requires_grad_(requires)

    @property
    def grad(self) -> Tensor | None:
        """The sum of the gradients from all calls of `backward`; None before the first."""
        return self._actual_grad if (capturing := capture.get()) is None else capturing.grad_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        check_gradient(self, gradient)
        if (capturing := capture.get()) is None:
            self._actual_grad = gradient
        else:
            capturing.set_grad(self, gradient)

    def requires_grad_(self, requires: bool = True) -> Tensor:
        """Compute gradients with respect to this tensor, or stop doing so. Returns the tensor itself."""
        if requires and self.dtype.kind != "f":
            raise TypeError(f"gradients are for floating point, and the dtype is {self.dtype}")
        tensor = self._here()
        if requires and leaf_of(tensor._actual_node) is tensor:
            return self
        if requires or tensor._actual_requires_grad:
            # A new node: gradients end here, and jitted functions notice the change.
            node = elementwise.stop(tensor._actual_node)
            if requires:
                ends_at(node, tensor)
            tensor._actual_node, tensor._actual_requires_grad = node, requires
        return self

    def detach(self) -> Tensor:
        """The same values, through which no gradient passes."""
        detached = record(elementwise.stop(self._node), self)
        detached._actual_requires_grad = False
        return detached

    # Copies

    def __copy__(self) -> Tensor:
        from penstock.tensor.copying import copied

        return copied(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        from penstock.tensor.copying import copied

        return copied(self, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        from penstock.tensor.copying import reduced

        return reduced(self)

    # Changes in place

    def _rebind(self, other: Tensor) -> None:
        """Take another tensor's value; results that were computed from the old value keep it."""
        if other.shape != self.shape or other.dtype != self.dtype:
            raise TypeError(
                f"in place, {self.dtype}{list(self.shape)} cannot become {other.dtype}{list(other.shape)}"
            )
        note_used(self)
        tensor = self._here()
        if leaf_of(tensor._actual_node) is tensor and recording():
            raise ValueError("a tensor that requires a gradient cannot change; use no_grad() or detach()")
        node, history = other._node, other.requires_grad
        if tensor._actual_requires_grad and not history and not recording():
            node = elementwise.stop(node)
            ends_at(node, tensor)
            if node.value is None and capture.get() is None:
                # A second update before the first was computed: compute the first now, or each training
                # step would add to the pending graph.
                if id(self) in self.device.updated:
                    realize((), self.device)
                self.device.updated[id(self)] = weakref.ref(node)
        # Last, so that an error above changes neither.
        tensor._actual_node, tensor._actual_requires_grad = node, tensor._actual_requires_grad or history


def realize_together(
    tensors: Sequence[Tensor], repeated: bool = False, replaced: Replaced | None = None
) -> None:
    """Compute several tensors of one device in one run; `repeated`: the same run will come many times."""
    realize([tensor._node for tensor in tensors], tensors[0].device, repeated, replaced)


def record(node: Node, *sources: Tensor) -> Tensor:
    """The tensor of a new node on the device of its sources."""
    first = sources[0].device
    gradient = False
    if not _captures:
        for source in sources:
            if source.device is not first:
                break
            gradient = gradient or source._actual_requires_grad
        else:
            if not gradient or (node.dtype.kind == "f" and recording()):
                return Tensor(node, first, gradient)
    for source in sources:
        if source.device is not first:
            raise ValueError(f"tensors are on {first.name} and {source.device.name}; use to_device first")
        gradient = gradient or source.requires_grad
    note_used(*sources)
    if gradient and not (node.dtype.kind == "f" and recording()):
        if node.dtype.kind == "c" and recording():
            raise TypeError(
                "no gradient passes complex numbers; use no_grad(), or detach() what is before them"
            )
        gradient, node = False, elementwise.stop(node)
    return Tensor(node, first, gradient)


def note_used(*tensors: Tensor) -> None:
    """Tell a function that is being captured which tensors it reads."""
    capturing = capture.get()
    if capturing is not None:
        for tensor in tensors:
            capturing.used(tensor)


def resolve(device: Device | str | None) -> Device:
    """A device, a device by name, or the default device for None."""
    if isinstance(device, Device):
        return device
    return default_device() if device is None else find(device)


def from_numpy(array: npt.NDArray[Any], device: Device) -> Tensor:
    """A tensor with the values of a NumPy array."""
    dtype = dtypes.checked(array.dtype)
    recorders = device.stream.recorders
    start = perf_counter() if recorders else 0.0
    made = Tensor(leaf(device.upload(array.astype(dtype, copy=False)), array.shape, dtype), device)
    for recorder in recorders:
        recorder.sent(array, start, perf_counter())
    return made


def scalar(value: Scalar, dtype: DType, device: Device) -> Tensor:
    """A Python number as a tensor without axes."""
    return Tensor(elementwise.full((), dtype, value), device)


def install(name: str, function: Any) -> None:
    """Add a method, or another attribute, to `Tensor`."""
    setattr(Tensor, name, function)
