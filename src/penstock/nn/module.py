"""The base class of layers and networks: a tree of tensors and modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar

import numpy.typing as npt

from penstock.errors import CaptureError
from penstock.nn.hooks import Handle, Hook, Hooks
from penstock.nn.module_text import text_of
from penstock.nn.parameter import Parameter
from penstock.nn.state import Differences, assign, load, read
from penstock.nn.tree import Part, members, walk
from penstock.runtime import Device
from penstock.tensor import dtypes
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, realize_together
from penstock.tensor.recording import no_grad

_evaluating: ContextVar[bool] = ContextVar("evaluating", default=False)


P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Forward(Protocol[P, R]):
    """For type checkers: a call of a module has the signature of its `forward`."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Module.forward`."""


@contextmanager
def evaluating() -> Iterator[None]:
    """In this block and this thread, modules behave as after `eval()`, whatever their mode."""
    token = _evaluating.set(True)
    try:
        yield
    finally:
        _evaluating.reset(token)


class Module:
    """A layer or a network. Its parts are the tensors and modules among its attributes.

    Parts may also be in lists, tuples, dicts and dataclasses, at any depth. Tensors that require a gradient,
    and each `Parameter`, are its parameters; the other tensors are its buffers.

    >>> class Twice(ps.nn.Module):
    ...     def __init__(self):
    ...         self.layer = ps.nn.Linear(2, 2)
    ...
    ...     def forward(self, x):
    ...         return self.layer(self.layer(x))
    ...
    >>> Twice()(ps.zeros((4, 2))).shape
    (4, 2)
    """

    _training = True
    _computed = False  # whether all of its tensors have been computed
    _hooks: Hooks | None = None
    _unsaved: frozenset[str] = frozenset()  # names of buffers that are not in its state_dict

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the capture that creates the module: it may assign attributes."""
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
        """Whether it is in training mode. A jitted function that reads this is captured for each value."""
        capturing = capture.get()
        if capturing is not None:
            # The same fact for all modules that are evaluated by a block: each call checks it once.
            by_block = _evaluating.get()
            capturing.assume(
                _evaluating.get if by_block else lambda: self._training and not _evaluating.get()
            )
        return self._training and not _evaluating.get()

    @training.setter
    def training(self, mode: bool) -> None:
        self._training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    if TYPE_CHECKING:

        def __call__(self: _Forward[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
            """Call `forward`, with hooks."""

    else:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Call `forward`, with hooks."""
            if not self._computed and capture.get() is None:
                self._compute()
            if self._hooks is not None:
                return self._hooks.call(self, args, kwargs)
            return self.forward(*args, **kwargs)

    def _compute(self) -> None:
        """Compute pending parameters in one run; otherwise each forward pass would recompute them."""
        fresh: dict[Device, list[Tensor]] = {}
        for _, tensor in self.named_tensors():
            if tensor._node.value is None:
                fresh.setdefault(tensor.device, []).append(tensor)
        for tensors in fresh.values():
            realize_together(tensors)
        for module in self.modules():
            module._computed = True

    def __repr__(self) -> str:
        return text_of(self)

    def extra_repr(self) -> str:
        """The text between the parentheses when printed; subclasses define it."""
        return ""

    # Parts

    def _own_parts(self) -> Mapping[str, Any]:
        """The attributes that may hold parts, by name."""
        return vars(self)

    def named_members(self) -> Iterator[tuple[str, Tensor | Module]]:
        """Its direct tensors and modules with their names."""
        return ((path, part) for path, part in members(self))

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the tree with its path, such as `layers.0.weight`; shared tensors once."""
        return ((path, part) for path, part, _ in self._tensors(prefix))

    def _tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor, bool]]:
        """Like `named_tensors`, with whether each is in the state_dict."""
        named: set[str] = set()
        for path, part, saved in walk(self, prefix):
            if isinstance(part, Tensor):
                if path in named:
                    raise ValueError(f"two tensors of {type(self).__name__} have the name {path!r}")
                named.add(path)
                yield path, part, saved

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, including frozen ones, with its path."""
        return ((name, tensor) for name, tensor in self.named_tensors() if _is_parameter(tensor))

    def parameters(self) -> list[Tensor]:
        """Every parameter, including frozen ones."""
        return [tensor for _, tensor in self.named_parameters()]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is no parameter, with its path."""
        return ((name, tensor) for name, tensor in self.named_tensors() if not _is_parameter(tensor))

    def buffers(self) -> list[Tensor]:
        """Every tensor that is no parameter."""
        return [tensor for _, tensor in self.named_buffers()]

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all modules inside it with their paths, each once."""
        return ((path, part) for path, part, _ in walk(self, prefix) if isinstance(part, Module))

    def modules(self) -> Iterator[Module]:
        """This module and all modules inside it, each once."""
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Its direct modules with their names."""
        return ((name, part) for name, part in self.named_members() if isinstance(part, Module))

    def children(self) -> Iterator[Module]:
        """Its direct modules."""
        return (module for _, module in self.named_children())

    def get_submodule(self, path: str) -> Module:
        """The module at a path, such as `layers.0`; a KeyError lists the paths."""
        return _named(dict(self.named_modules()), path, "module")

    def get_parameter(self, path: str) -> Tensor:
        """The parameter at a path; a KeyError lists the paths."""
        return _named(dict(self.named_parameters()), path, "parameter")

    def get_buffer(self, path: str) -> Tensor:
        """The buffer at a path; a KeyError lists the paths."""
        return _named(dict(self.named_buffers()), path, "buffer")

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that moves with the module but is not trained; `persistent`: in the state_dict."""
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"a buffer is a tensor, and {type(tensor).__name__} was given")
        setattr(self, name, tensor)
        self._unsaved = self._unsaved - {name} if persistent else self._unsaved | {name}

    def register_parameter(self, name: str, parameter: Tensor | None) -> None:
        """Add a parameter; the same as assigning the attribute."""
        setattr(self, name, parameter)

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a module; the same as assigning the attribute."""
        setattr(self, name, module)

    def apply(self, function: Callable[[Module], Any]) -> Self:
        """Call a function with every module inside, and with this module last. Returns the module."""
        for module in reversed(list(self.modules())):
            function(module)
        return self

    # Hooks

    def register_forward_pre_hook(self, hook: Hook) -> Handle:
        """Call `hook(module, args)` before `forward`; its result, unless None, replaces `args`."""
        hooks = self._own_hooks()
        return hooks.add(hooks.before, hook)

    def register_forward_hook(self, hook: Hook) -> Handle:
        """Call `hook(module, args, result)` after `forward`; its result, unless None, replaces the result."""
        hooks = self._own_hooks()
        return hooks.add(hooks.after, hook)

    def register_full_backward_hook(self, hook: Hook) -> Handle:
        """Call `hook(module, grad_input, grad_output)`, both tuples; its result replaces `grad_input`."""
        hooks = self._own_hooks()
        return hooks.add(hooks.backward, hook)

    def _own_hooks(self) -> Hooks:
        if self._hooks is None:
            self._hooks = Hooks()
        return self._hooks

    # State

    def state_dict(self, prefix: str = "") -> dict[str, npt.NDArray[Any]]:
        """The values of parameters and buffers by path, as NumPy arrays."""
        return read(self.saved_tensors(prefix))

    def saved_tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The parameters and buffers of the `state_dict` by path."""
        return {name: tensor for name, tensor, saved in self._tensors(prefix) if saved}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Differences:
        """Load values: arrays, tensors, or tensors of PyTorch.

        A KeyError or ValueError names what does not fit, before anything changes. Without `strict`, names
        that only one side has are ignored, and returned.
        """
        return load(self, state, strict)

    def _quantize_rest(self, quantized: Callable[[Tensor], Module]) -> None:
        """Quantize weights that it has besides its linear layers: `quantized` makes a layer of a weight."""

    # Modes and moves

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode (dropout is active), or out of it. Returns the module."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode, without dropout. Returns the module."""
        return self.train(False)

    def requires_grad_(self, requires: bool = True) -> Self:
        """Train all parameters, or freeze them. Returns the module."""
        for tensor in self.parameters():
            tensor.requires_grad_(requires)
        return self

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for tensor in self.parameters():
            tensor.grad = None

    def to(self, target: Device | str | Any) -> Self:
        """Move all tensors to a device, or convert floating-point tensors to a dtype. Returns the module."""
        from penstock.tensor.manipulation import astype

        is_device = isinstance(target, Device) or (isinstance(target, str) and _names_device(target))
        for _, tensor in self.named_tensors():
            with no_grad():
                if is_device:
                    moved = tensor.to_device(target)
                    tensor.device = moved.device
                elif tensor._node.dtype.kind == "f":
                    dtype = dtypes.checked(target)
                    if dtype not in dtypes.KINDS["real floating"]:
                        raise TypeError(
                            f"the parameters of a module are floating-point, and {target} was given"
                        )
                    moved = astype(tensor, dtype)
                else:
                    continue
                assign(tensor, moved)
        return self

    def float(self) -> Self:
        """Convert floating-point tensors to float32. Returns the module."""
        return self.to(dtypes.float32)

    def half(self) -> Self:
        """Convert floating-point tensors to float16. Returns the module."""
        return self.to(dtypes.float16)

    def bfloat16(self) -> Self:
        """Convert floating-point tensors to bfloat16. Returns the module."""
        return self.to(dtypes.bfloat16)


def _is_parameter(tensor: Tensor) -> bool:
    return tensor.requires_grad or isinstance(tensor, Parameter)


def _named(known: Mapping[str, Part], path: str, kind: str) -> Part:
    if path not in known:
        raise KeyError(f"there is no {kind} {path!r}; there are {', '.join(map(repr, known)) or 'none'}")
    return known[path]


def _names_device(target: str) -> bool:
    return target not in [str(dtype) for dtype in dtypes.ALL]
