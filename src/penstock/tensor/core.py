"""The tensor: a graph node on a device. Operators record; only a value that is asked for is computed."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.execution.realize import explain as explain_nodes
from penstock.execution.realize import precompile, realize, waits_for_a_compiler
from penstock.graph import elementwise, reducing, shaping
from penstock.graph.custom_vjp import refused, refusing
from penstock.graph.node import DType, Node, Shape, leaf
from penstock.registry import default_device, find
from penstock.runtime import Device
from penstock.stream.future import Future
from penstock.tensor import dtypes
from penstock.tensor.capture import Capture, capture
from penstock.tensor.dlpack import exported
from penstock.tensor.recording import computes, recording

if TYPE_CHECKING:
    from types import ModuleType

Scalar = bool | int | float | complex
Operand: TypeAlias = "Tensor | Scalar | npt.NDArray[Any] | np.generic"
# A chain of nodes that is longer, or whose results take more, is computed by itself: a loop stays bounded.
MAX_DEPTH = 500
MAX_PENDING_BYTES = 1 << 30


_captures = 0  # functions that are being captured now, in any thread; 0 makes tensors quick
_counting = threading.Lock()


@contextlib.contextmanager
def captured_by(capturing: Capture) -> Iterator[None]:
    """In this block, and this thread, tensors are seen as a function that is being captured sees them."""
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
    """In this block, tensors are what they are outside of the function that is being captured."""
    token = capture.set(None)
    try:
        yield
    finally:
        capture.reset(token)


class Tensor:
    """An n-dimensional array on a device, as the array API standard has it, with PyTorch's gradients."""

    # What it is outside of functions that are being captured, which see it through `_node`, `grad` and
    # `requires_grad`: a capture changes nothing that another thread could see.
    __slots__ = (
        "__weakref__", "_actual_grad", "_actual_node", "_actual_requires_grad", "_source", "device",
    )  # fmt: skip
    _source: weakref.ref[Tensor]  # of a gradient: what it is the gradient of
    __array_priority__ = 1000  # before NumPy's arrays, where a library asks

    def __init__(self, node: Node, device: Device, requires_grad: bool = False) -> None:
        capturing = capture.get()
        if capturing is not None:
            capturing.made(self)
        elif (
            node.value is None
            and (node.depth > MAX_DEPTH or node.pending_bytes > MAX_PENDING_BYTES)
            and computes()
        ):
            realize([node], device)
        self._actual_node = node
        self.device = device
        self._actual_requires_grad = requires_grad
        self._actual_grad: Tensor | None = None

    if TYPE_CHECKING:  # what the modules of functions install, for type checkers

        def __add__(self, other: Operand) -> Tensor: ...
        def __radd__(self, other: Operand) -> Tensor: ...
        def __iadd__(self, other: Operand) -> Tensor: ...
        def __sub__(self, other: Operand) -> Tensor: ...
        def __rsub__(self, other: Operand) -> Tensor: ...
        def __isub__(self, other: Operand) -> Tensor: ...
        def __mul__(self, other: Operand) -> Tensor: ...
        def __rmul__(self, other: Operand) -> Tensor: ...
        def __imul__(self, other: Operand) -> Tensor: ...
        def __truediv__(self, other: Operand) -> Tensor: ...
        def __rtruediv__(self, other: Operand) -> Tensor: ...
        def __itruediv__(self, other: Operand) -> Tensor: ...
        def __floordiv__(self, other: Operand) -> Tensor: ...
        def __rfloordiv__(self, other: Operand) -> Tensor: ...
        def __ifloordiv__(self, other: Operand) -> Tensor: ...
        def __mod__(self, other: Operand) -> Tensor: ...
        def __rmod__(self, other: Operand) -> Tensor: ...
        def __imod__(self, other: Operand) -> Tensor: ...
        def __pow__(self, other: Operand) -> Tensor: ...
        def __rpow__(self, other: Operand) -> Tensor: ...
        def __ipow__(self, other: Operand) -> Tensor: ...
        def __and__(self, other: Operand) -> Tensor: ...
        def __rand__(self, other: Operand) -> Tensor: ...
        def __iand__(self, other: Operand) -> Tensor: ...
        def __or__(self, other: Operand) -> Tensor: ...
        def __ror__(self, other: Operand) -> Tensor: ...
        def __ior__(self, other: Operand) -> Tensor: ...
        def __xor__(self, other: Operand) -> Tensor: ...
        def __rxor__(self, other: Operand) -> Tensor: ...
        def __ixor__(self, other: Operand) -> Tensor: ...
        def __lshift__(self, other: Operand) -> Tensor: ...
        def __rlshift__(self, other: Operand) -> Tensor: ...
        def __ilshift__(self, other: Operand) -> Tensor: ...
        def __rshift__(self, other: Operand) -> Tensor: ...
        def __rrshift__(self, other: Operand) -> Tensor: ...
        def __irshift__(self, other: Operand) -> Tensor: ...
        def __lt__(self, other: Operand) -> Tensor: ...
        def __le__(self, other: Operand) -> Tensor: ...
        def __gt__(self, other: Operand) -> Tensor: ...
        def __ge__(self, other: Operand) -> Tensor: ...
        def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __matmul__(self, other: Tensor | npt.NDArray[Any]) -> Tensor: ...
        def __rmatmul__(self, other: npt.NDArray[Any]) -> Tensor: ...
        def __imatmul__(self, other: Tensor | npt.NDArray[Any]) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __pos__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def reshape(self, shape: int | Sequence[int]) -> Tensor: ...  # noqa: D102
        def astype(self, dtype: DType) -> Tensor: ...  # noqa: D102
        def sum(self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor: ...  # noqa: D102
        def mean(self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor: ...  # noqa: D102
        def max(self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor: ...  # noqa: D102
        def min(self, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor: ...  # noqa: D102
        def backward(self, gradient: Tensor | None = None) -> None: ...  # noqa: D102

    # What it is

    def _here(self) -> Tensor:
        """Itself, or what stands for it in the function that is being captured in this thread."""
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
        """The type of its items."""
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
    def size(self) -> int:
        """The number of items."""
        return self._node.size

    @property
    def T(self) -> Tensor:  # noqa: N802 - the standard's name
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise ValueError(f"T is for matrices, and the shape is {self.shape}; use permute_dims or mT")
        return record(shaping.permute(self._node, (1, 0)), self)

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
            raise ValueError(f"version {api_version!r} of the array API standard is not there; 2024.12 is")
        import penstock

        return penstock

    # Its value

    def realize(self) -> Tensor:
        """Compute the value now, without reading it; the tensor itself."""
        self._realize()
        return self

    def numpy(self) -> npt.NDArray[Any]:
        """The values, as a NumPy array of their own. The device's copy stays valid."""
        values = self._download().wait()
        for recorder in self.device.stream.recorders:
            recorder.fetched(values)
        return values

    def numpy_async(self) -> Future[npt.NDArray[Any]]:
        """The values, as a future NumPy array. Where a kernel has to be compiled first, a thread does it."""
        node, device = self._node, self.device
        profiled = bool(device.stream.recorders)  # which are told of this line only here
        if capture.get() is not None or profiled or not waits_for_a_compiler(node, device):
            return self._download()

        def build() -> Future[npt.NDArray[Any]]:
            precompile(node, device)
            realize([node], device)
            return device.download(node.value, node.dtype, node.shape)

        return device.in_background(build)

    def _download(self) -> Future[npt.NDArray[Any]]:
        self._realize()
        return self.device.download(self._node.value, self.dtype, self.shape)

    def item(self) -> Any:
        """The only value, as a Python number."""
        if self.size != 1:
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

    def _realize(self) -> None:
        capturing = capture.get()
        if capturing is not None:
            capturing.used(self)
            capturing.refuse_value(self._node)
        realize([self._node], self.device)

    def _shared_memory(self) -> npt.NDArray[Any]:
        """The values where they are, for reading. They never change there."""
        self._realize()
        if self._node.value.memory.host is None and self.size:
            raise BufferError(f"{self.device.name} does not share its memory; the values can only be copied")
        self._node.value.shared = True
        with self.device.view(self._node.value, self.dtype, self.shape) as array:
            return array

    def _become(self, node: Node) -> None:
        """Take over a computed value that no other tensor has."""
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
        if self.ndim and self.size != 1:
            raise TypeError(f"only one value can become {what}, and the shape is {self.shape}")
        value = self.item()
        if isinstance(value, complex) and what in ("int", "float"):
            raise TypeError(f"a complex value cannot become {what}")
        return value

    def __repr__(self) -> str:
        shown = self.numpy()
        if self.dtype is dtypes.bfloat16:
            shown = shown.astype(np.float32)  # which NumPy prints as fractions
        body = np.array2string(shown, separator=", ", prefix="tensor(", threshold=1000)
        return f"tensor({body}, dtype={self.dtype}, device={self.device.name})"

    __hash__ = object.__hash__

    # Where it is

    def to_device(self, device: Device | str, /, *, stream: Any = None) -> Tensor:
        """The same values on another device. Gradients do not pass back from there: `backward` refuses."""
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
        """Whether gradients are computed with respect to it, or to what it was computed from."""
        return self._here()._actual_requires_grad if _captures else self._actual_requires_grad

    @requires_grad.setter
    def requires_grad(self, requires: bool) -> None:
        self.requires_grad_(requires)

    @property
    def grad(self) -> Tensor | None:
        """The sum of the gradients that `backward` found; None before."""
        capturing = capture.get()
        return self._actual_grad if capturing is None else capturing.grad_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        capturing = capture.get()
        if capturing is None:
            self._actual_grad = gradient
        else:
            capturing.set_grad(self, gradient)

    def requires_grad_(self, requires: bool = True) -> Tensor:
        """Compute gradients with respect to this tensor, or not; the tensor itself."""
        if requires and self.dtype.kind != "f":
            raise TypeError(f"gradients are for floating point, and the dtype is {self.dtype}")
        tensor = self._here()
        if requires and leaf_of(tensor._actual_node) is tensor:
            return self
        if requires or tensor._actual_requires_grad:
            # A node of its own: here gradients end, and jitted functions see that something is different.
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

    # Items

    def __getitem__(self, key: Any) -> Tensor:
        from penstock.tensor.indexing import get

        return get(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        from penstock.tensor.indexing import changed

        self._rebind(changed(self, key, value))

    def _rebind(self, other: Tensor) -> None:
        """Take over another tensor's value: what was computed from the old one keeps it."""
        if other.shape != self.shape or other.dtype != self.dtype:
            raise TypeError(
                f"in place, {self.dtype}{list(self.shape)} cannot become {other.dtype}{list(other.shape)}"
            )
        note_used(self)
        tensor = self._here()
        if leaf_of(tensor._actual_node) is tensor and recording():
            raise ValueError("a tensor that requires a gradient cannot change; use no_grad() or detach()")
        node, history = other._node, other.requires_grad
        if tensor._actual_requires_grad and not history:
            node = elementwise.stop(node)
            ends_at(node, tensor)
            if node.value is None and capture.get() is None:
                # Else the next step would be computed with all of this one, and the one after with both.
                if id(self) in self.device.updated:
                    realize((), self.device)  # the step before
                self.device.updated[id(self)] = weakref.ref(node)
        # Both at once: nothing sees the one without the other.
        tensor._actual_node, tensor._actual_requires_grad = node, tensor._actual_requires_grad or history


def ends_at(node: Node, tensor: Tensor) -> None:
    """Let gradients end at a node, in a tensor that has it."""
    node.tracked = True
    node.owner = weakref.ref(tensor)


def leaf_of(node: Node) -> Tensor | None:
    """The tensor that collects gradients at a node, if there is one."""
    tensor = _owner(node)
    if tensor is None or tensor._node is node:
        return tensor
    capturing = capture.get()
    return tensor if capturing is not None and capturing.still_at(tensor, node) else None


def changed_since(node: Node) -> bool:
    """Whether a gradient ended here in a tensor that requires one and has another value by now."""
    return _owner(node) is not None and leaf_of(node) is None


def _owner(node: Node) -> Tensor | None:
    """The tensor in which gradients ended at a node, if it still requires one."""
    if node.owner is None:
        return None
    tensor: Tensor | None = node.owner()
    return tensor if tensor is not None and tensor.requires_grad else None


def realize_together(tensors: Sequence[Tensor], repeated: bool = False) -> None:
    """Compute several tensors of one device as one expression; `repeated`: many times, as in a loop."""
    realize([tensor._node for tensor in tensors], tensors[0].device, repeated)


def source_of(gradient: Tensor) -> Tensor | None:
    """The value whose gradient this is the last part of, if it is still in use."""
    source: weakref.ref[Tensor] | None = getattr(gradient, "_source", None)
    return None if source is None else source()


def explain(*tensors: Tensor) -> str:
    """How these tensors would be computed, step by step, with the bytes that each step moves."""
    if not tensors:
        raise ValueError("explain needs a tensor")
    return explain_nodes([tensor._node for tensor in tensors], tensors[0].device)


def record(node: Node, *sources: Tensor) -> Tensor:
    """The tensor of a new node on the device of its sources."""
    first = sources[0].device
    gradient = False
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
    """A device by name or as it is; None is the default."""
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


def broadcast(x: Tensor, shape: Shape) -> Tensor:
    """`x` repeated over `shape`; a ValueError that names both shapes where it cannot be."""
    note_used(x)
    return record(broadcast_node(x._node, shape), x)


def broadcast_node(node: Node, shape: Shape) -> Node:
    """See `broadcast`."""
    if node.shape == shape:
        return node
    if not node.shape and node.primitive is elementwise.FULL and node.value is None:
        return elementwise.full(shape, node.dtype, node.attributes["number"])
    padded = (1,) * (len(shape) - node.ndim) + node.shape
    if len(padded) != len(shape) or any(a not in (1, b) for a, b in zip(padded, shape, strict=True)):
        raise ValueError(f"shape {node.shape} does not broadcast to {shape}")
    return reducing.expand(shaping.reshape(node, padded), shape)


def common_shape(*shapes: Shape) -> Shape:
    """The shape to which all of them broadcast, or a ValueError that names them."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"shapes {' and '.join(map(str, shapes))} do not broadcast together") from None


def axes_of(x: Tensor, axis: int | Sequence[int] | None, name: str) -> tuple[int, ...]:
    """Axes as sorted positive numbers; an error names one that is not there, or is there twice."""
    if axis is None:
        return tuple(range(x.ndim))
    if type(axis) is int:
        given: tuple[int, ...] = (axis,)
    else:
        from penstock.tensor.arguments import integers

        given = integers(axis, name, "an axis")
    for one in given:
        if not -x.ndim <= one < x.ndim:
            raise IndexError(f"{name}: axis {one} is not there in shape {x.shape}")
    found = tuple(sorted(one % x.ndim for one in given))
    if len(set(found)) != len(found):
        raise ValueError(f"{name}: axes {given} name one axis twice")
    return found


def install(name: str, function: Callable[..., Any]) -> None:
    """Give tensors a method; for the modules that hold the functions."""
    setattr(Tensor, name, function)
