"""The base of all layers: a plain tree of tensors and modules."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.errors import CaptureError
from penstock.runtime import Device
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy, realize_together
from penstock.tensor.recording import no_grad

_evaluating: ContextVar[bool] = ContextVar("evaluating", default=False)


@contextmanager
def evaluating() -> Iterator[None]:
    """In this block modules behave as in use, whatever their mode. Other threads do not notice."""
    token = _evaluating.set(True)
    try:
        yield
    finally:
        _evaluating.reset(token)


class Module:
    """A layer or a network. Its parts are the tensors and modules among its attributes.

    They are found in lists, tuples and dicts too, at any depth. Tensors that require a gradient are its
    parameters.
    """

    _training = True
    _computed = False  # whether no tensor of its own waits for its first value

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A module, which a jitted function that makes it may go on to assign attributes of."""
        made = super().__new__(cls)
        capturing = capture.get()
        if capturing is not None:
            vars(made)["_made_in"] = weakref.ref(capturing)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        capturing = capture.get()
        if capturing is not None and getattr(self, name, self) is not value:
            made_in = vars(self).get("_made_in")
            if made_in is None or made_in() is not capturing:
                raise CaptureError(
                    f"{name!r} of {type(self).__name__} was assigned inside a jitted function, which would "
                    f"happen only when it is captured, and not at every call; return the value, or keep a "
                    f"tensor and change it in place"
                )
        object.__setattr__(self, name, value)
        if self._computed and not isinstance(value, (bool, int, float, str)):
            object.__setattr__(self, "_computed", False)

    @property
    def training(self) -> bool:
        """Whether it behaves as in training. A jitted function that asks is captured for each answer."""
        capturing = capture.get()
        if capturing is not None:
            capturing.assume(lambda: self._training and not _evaluating.get())
        return self._training and not _evaluating.get()

    @training.setter
    def training(self, mode: bool) -> None:
        self._training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes; subclasses say."""
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward` gives."""
        if not self._computed and capture.get() is None:
            self._compute()
        return self.forward(*args, **kwargs)

    def _compute(self) -> None:
        """Compute fresh parameters, together and once: else each forward pass would draw them again."""
        fresh: dict[Device, list[Tensor]] = {}
        for _, tensor in self.named_tensors():
            if tensor._node.value is None:
                fresh.setdefault(tensor.device, []).append(tensor)
        for tensors in fresh.values():
            realize_together(tensors)
        for module in self.modules():
            module._computed = True

    # Its parts

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the tree with its path, such as `layers.0.weight`; a shared one once."""
        named: set[str] = set()
        for name, part in _parts(self, prefix):
            if isinstance(part, Tensor):
                if name in named:
                    raise ValueError(f"two tensors of {type(self).__name__} have the name {name!r}")
                named.add(name)
                yield name, part

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is trained, with its path."""
        return ((name, tensor) for name, tensor in self.named_tensors() if tensor.requires_grad)

    def parameters(self) -> list[Tensor]:
        """Every tensor that is trained."""
        return [tensor for _, tensor in self.named_parameters()]

    def modules(self) -> Iterator[Module]:
        """This module and all inside it, each once."""
        return (part for _, part in _parts(self, "") if isinstance(part, Module))

    # Its state

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """All values by their paths, as NumPy arrays of their own."""
        futures = {name: tensor.numpy_async() for name, tensor in self.named_tensors()}
        return {name: future.wait() for name, future in futures.items()}

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Take over values; a KeyError or ValueError, before anything changes, names what does not fit."""
        tensors = dict(self.named_tensors())
        missing, unknown = sorted(set(tensors) - set(state)), sorted(set(state) - set(tensors))
        if missing or unknown:
            raise KeyError(f"the state lacks {missing or 'nothing'} and has {unknown or 'nothing'} beyond it")
        arrays = {name: np.asarray(state[name]) for name in tensors}
        for name, tensor in tensors.items():
            if arrays[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tensor.shape}, and {arrays[name].shape} was given")
        for name, tensor in tensors.items():
            _assign(tensor, from_numpy(arrays[name].astype(tensor._node.dtype.numpy), tensor.device))

    # Modes and moves

    def train(self, mode: bool = True) -> Module:
        """Behave as in training (dropout is on), or not; the module itself."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Behave as in use, without dropout; the module itself."""
        return self.train(False)

    def to(self, target: Device | str | Any) -> Module:
        """Move all tensors to a device, or those of floating point to a dtype; the module itself."""
        from penstock.tensor.dtypes import KINDS, checked
        from penstock.tensor.manipulation import astype

        is_device = isinstance(target, Device) or (isinstance(target, str) and _names_device(target))
        for _, tensor in self.named_tensors():
            with no_grad():
                if is_device:
                    moved = tensor.to_device(target)
                    tensor.device = moved.device
                elif tensor._node.dtype.kind == "f":
                    dtype = checked(target)
                    if dtype not in KINDS["real floating"]:
                        raise TypeError(
                            f"the parameters of a module are floating-point, and {target} was given"
                        )
                    moved = astype(tensor, dtype)
                else:
                    continue
                _assign(tensor, moved)
        return self


def _names_device(target: str) -> bool:
    from penstock.tensor.dtypes import ALL

    return target not in [str(dtype) for dtype in ALL]


def _parts(root: Module, prefix: str) -> Iterator[tuple[str, Tensor | Module]]:
    """Every module and tensor of a tree with its path, each once, in the order of their first use."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [(prefix, root)]
    while stack:
        path, value = stack.pop()
        inside = _inside(value, path)
        if id(value) in seen or (inside is None and not isinstance(value, Tensor)):
            continue
        seen.add(id(value))  # also of lists and dicts: they can hold themselves
        if isinstance(value, (Tensor, Module)):
            yield path, value
        below = [(f"{path}.{name}" if path else str(name), part) for name, part in inside or ()]
        stack += reversed(below)


def _inside(value: Any, path: str) -> list[tuple[Any, Any]] | None:
    """What a module or a container holds, by name; None for anything else."""
    if isinstance(value, Module):
        return list(vars(value).items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (Set, deque)) and any(isinstance(part, (Tensor, Module)) for part in value):
        kind = type(value).__name__
        raise TypeError(f"{path} is a {kind}, in which parts of a module have no names; use a list or a dict")
    return None


def _assign(tensor: Tensor, value: Tensor) -> None:
    """Another value, of any shape and dtype, in a tensor that others may hold."""
    value.realize()
    from penstock.graph.node import leaf

    value._node.value.shared = True
    tensor._become(leaf(value._node.value, value.shape, value._node.dtype))
