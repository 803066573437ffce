"""Hooks: functions that are called before and after `forward`, and with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.tensor.autograd import custom_vjp
from penstock.tensor.core import Tensor

if TYPE_CHECKING:
    from penstock.nn.module import Module

Hook = Callable[..., Any]


class Handle:
    """The handle of a registered hook: `remove()`, or the end of a `with` block, removes it."""

    def __init__(self, hooks: dict[int, Hook], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Remove the hook."""
        self._hooks.pop(self._number, None)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Hooks:
    """The hooks of a module, each kind in the order in which they were registered."""

    def __init__(self) -> None:
        self.before: dict[int, Hook] = {}
        self.after: dict[int, Hook] = {}
        self.backward: dict[int, Hook] = {}
        self._count = 0

    def add(self, hooks: dict[int, Hook], hook: Hook) -> Handle:
        """Register a hook in one of the tables."""
        self._count += 1
        hooks[self._count] = hook
        return Handle(hooks, self._count)

    def call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `module.forward` with all hooks."""
        for hook in list(self.before.values()):
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        watched = _Watched(self, module) if self.backward else None
        result = module.forward(*(args if watched is None else watched.inputs(args)), **kwargs)
        result = result if watched is None else watched.output(result)
        for hook in list(self.after.values()):
            changed = hook(module, args, result)
            result = result if changed is None else changed
        return result


class _Watched:
    """A call whose backward hooks get the gradients of its result and of its input."""

    def __init__(self, hooks: Hooks, module: Module) -> None:
        self._hooks, self._module = hooks, module
        self._of_result: Tensor | None = None
        self._has_input = False

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tracked = [at for at, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        if len(tracked) > 1:
            raise ValueError(
                f"a backward hook is for modules with a single input that has a gradient, and "
                f"{type(self._module).__name__} was given {len(tracked)}"
            )
        self._has_input = bool(tracked)
        return tuple(
            custom_vjp(arg, [arg], self._input_rule) if at in tracked else arg for at, arg in enumerate(args)
        )

    def output(self, result: Any) -> Tensor:
        if not isinstance(result, Tensor):
            raise ValueError(
                f"a backward hook is for modules with a single result, and {type(self._module).__name__} "
                f"returned {type(result).__name__}"
            )
        return custom_vjp(result, [result], self._output_rule)

    def _output_rule(self, g: Tensor, *_: Tensor) -> list[Tensor | None]:
        self._of_result = g
        if not self._has_input:
            self._call(None)
        return [g]

    def _input_rule(self, g: Tensor, *_: Tensor) -> list[Tensor | None]:
        return [self._call(g)]

    def _call(self, g: Tensor | None) -> Tensor | None:
        for hook in list(self._hooks.backward.values()):
            changed = hook(self._module, (g,), (self._of_result,))
            if changed is not None:
                g = changed[0] if isinstance(changed, tuple) else changed
        return g
