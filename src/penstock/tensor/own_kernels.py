"""`kernel`: user-defined operations, elementwise or over rows, as a formula or as a function.

They record ordinary nodes, so they fuse with the operations around them and have gradients. `kernel` adds the
guarantee that they can be fused: it refuses all that is neither elementwise nor a reduction over the last
axis.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

from penstock.errors import KernelError
from penstock.graph import elementwise, reducing, shaping
from penstock.graph.calls import inline
from penstock.graph.node import Kind, Node, Shape, topological
from penstock.tensor.broadcasting import common_shape
from penstock.tensor.capture import Capture, capture
from penstock.tensor.core import Scalar, Tensor, captured_by, record
from penstock.tensor.formula import Formula
from penstock.tensor.operands import OPERANDS, operand
from penstock.tensor.own_gradients import GradientFunction, with_gradient


@overload
def kernel(
    function: str,
    *,
    name: str | None = None,
    parameters: Sequence[str] | None = None,
    gradient: GradientFunction | None = None,
) -> FormulaKernel: ...
@overload
def kernel(
    function: Callable[..., Tensor], *, gradient: GradientFunction | None = None
) -> FunctionKernel: ...
@overload
def kernel(*, gradient: GradientFunction) -> Callable[[Callable[..., Tensor]], FunctionKernel]: ...
def kernel(
    function: str | Callable[..., Tensor] | None = None,
    *,
    name: str | None = None,
    parameters: Sequence[str] | None = None,
    gradient: GradientFunction | None = None,
) -> Any:
    """A user-defined operation that fuses with others, from a formula or from a function of tensors.

    `kernel("x / (1 + exp(-x * beta))")` takes its parameters in the order of their first use in the formula,
    or in that of `parameters`. A formula may have the operators and elementwise functions of the namespace,
    conditions (`a if x > 0 else b`) and reductions over the last axis, which is kept with length 1: sum,
    prod, max, min, mean, var, std, all, any. As a decorator of a function, such a kernel takes the function's
    name, the order of its parameters and their defaults.

    `@kernel` on a function checks, whenever it is called, that it is elementwise or reduces over the last
    axis with `keepdims=True`, and reads no value.

    The gradient is that of the operations, unless `gradient(g, result, *arguments)` is given: from the
    gradient of the result it computes that of each argument, or None, in the shape of the argument or in any
    shape to which that broadcasts.

    >>> scale = ps.kernel("2 * x + y")
    >>> scale(ps.asarray([1.0]), ps.asarray([3.0])).tolist()
    [5.0]
    """
    if isinstance(function, str):
        return FormulaKernel(Formula(function, parameters), name, gradient)
    if name is not None or parameters is not None:
        raise KernelError("name= and parameters= are for formulas; a function has its own")
    if function is None:
        return lambda given: FunctionKernel(given, gradient)
    if not callable(function):
        raise TypeError(f"kernel takes a formula or a function, and {type(function).__name__} was given")
    return FunctionKernel(function, gradient)


class FormulaKernel:
    """A formula as a function of tensors and numbers."""

    def __init__(
        self,
        formula: Formula,
        name: str | None,
        gradient: GradientFunction | None,
        signature: inspect.Signature | None = None,
    ) -> None:
        self.formula = formula.text
        self.__name__ = name or "formula"
        self.__doc__ = f"`{formula.text}`, item by item."
        self._formula = formula
        self._gradient = gradient
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(parameter, kind) for parameter in formula.parameters]
        self.__signature__ = signature or inspect.Signature(parameters)

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}{self.__signature__}: {self.formula}>"

    @overload
    def __call__(self, function: Callable[..., Any], /) -> FormulaKernel: ...
    @overload
    def __call__(self, *args: Tensor | Scalar, **kwargs: Tensor | Scalar) -> Tensor: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the formula to tensors and numbers; or decorate a function, for its name and defaults."""
        if len(args) == 1 and inspect.isfunction(args[0]):
            return self._named_by(args[0])
        given = _bound(self.__name__, self.__signature__, args, kwargs)
        for name, value in given.items():
            if not isinstance(value, OPERANDS):
                raise TypeError(
                    f"kernel {self.__name__!r} takes tensors, NumPy arrays and numbers; "
                    f"{name} is {type(value).__name__}"
                )
        device = _some_tensor(self.__name__, given.values())[0].device
        given = {name: operand(value, device, self.__name__) for name, value in given.items()}
        try:
            result: Tensor = self._formula.function(*(given[name] for name in self._formula.parameters))
        except (TypeError, ValueError, OverflowError) as error:
            error.add_note(f"in the kernel {self.__name__!r}: {self.formula}")
            raise
        return _finished(self.__name__, result, list(given.values()), self._gradient)

    def _named_by(self, function: Callable[..., Any]) -> FormulaKernel:
        signature = inspect.signature(function)
        if set(signature.parameters) != set(self._formula.parameters):
            raise KernelError(
                f"{function.__name__} has the parameters {list(signature.parameters)}, and the formula "
                f"{self.formula} has {list(self._formula.parameters)}"
            )
        plain = [given.replace(annotation=given.empty) for given in signature.parameters.values()]
        named = FormulaKernel(self._formula, function.__name__, self._gradient, inspect.Signature(plain))
        named.__doc__ = function.__doc__ or named.__doc__
        return named


class FunctionKernel:
    """A function of tensors that is checked to be elementwise, or to work row by row."""

    __name__: str

    def __init__(self, function: Callable[..., Tensor], gradient: GradientFunction | None) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function = function
        self._gradient = gradient
        self._signature = inspect.signature(function)

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}{self._signature}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the function with these arguments."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = _flat(bound.arguments, self._signature)
        tensors = _some_tensor(self.__name__, given)
        # New tensors, so that changes in place do not reach the caller.
        copies = {id(tensor): record(tensor._node, tensor) for tensor in tensors}
        inside = [[copies.get(id(arg), arg) for arg in part] for part in (args, kwargs.values())]
        with _guarded(self.__name__, copies.values()):
            result = self._function(*inside[0], **dict(zip(kwargs, inside[1], strict=True)))
        if not isinstance(result, Tensor):
            raise KernelError(
                f"kernel {self.__name__!r} has to return a tensor, and it returned {type(result).__name__}"
            )
        _Check(self.__name__, [tensor._node for tensor in tensors]).run(result._node)
        return _finished(self.__name__, result, given, self._gradient)


def _bound(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name, in the order of the parameters."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _flat(arguments: dict[str, Any], signature: inspect.Signature) -> list[Any]:
    """The arguments in the order of the parameters, including those in *args and **kwargs."""
    flat: list[Any] = []
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            flat += value
        elif kind is inspect.Parameter.VAR_KEYWORD:
            flat += value.values()
        else:
            flat.append(value)
    return flat


def _some_tensor(name: str, values: Any) -> list[Tensor]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        raise TypeError(
            f"kernel {name!r} needs a tensor, and {[type(v).__name__ for v in values]} were given"
        )
    return tensors


def _finished(name: str, result: Tensor, given: list[Any], gradient: GradientFunction | None) -> Tensor:
    if any(result is value for value in given):  # a tensor of its own, which may be changed in place
        result = record(result._node, result)
    return result if gradient is None else with_gradient(name, result, given, gradient)


# Checks of functions


class _Guard:
    """Allows a function the use of its own tensors only, and no reading of values."""

    def __init__(self, name: str, own: Any, outer: Capture | None) -> None:
        self._name = name
        self._own = {id(tensor): tensor for tensor in own}
        self._outer = outer

    def made(self, tensor: Tensor) -> None:
        """Note a tensor that the function created."""
        self._own[id(tensor)] = tensor
        if self._outer is not None:
            self._outer.made(tensor)

    def used(self, tensor: Tensor) -> None:
        """Raise if a tensor is neither an argument of the function nor created by it."""
        if id(tensor) not in self._own:
            raise KernelError(
                f"kernel {self._name!r} uses {tensor.dtype}{list(tensor.shape)}, which is not among its "
                f"arguments; give it as one"
            )
        if self._outer is not None:
            self._outer.used(tensor)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor with the state that an enclosing capture sees."""
        return tensor if self._outer is None else self._outer.stand_in(tensor)

    def grad_of(self, tensor: Tensor) -> Tensor | None:
        """The gradient that an enclosing capture sees."""
        return tensor._actual_grad if self._outer is None else self._outer.grad_of(tensor)

    def set_grad(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """A kernel changes nothing."""
        raise KernelError(f"kernel {self._name!r} cannot assign a gradient")

    def still_at(self, tensor: Tensor, node: Node) -> bool:
        """The answer of an enclosing capture."""
        return self._outer is not None and self._outer.still_at(tensor, node)

    def forget(self, tensor: Tensor) -> None:
        """A kernel changes nothing."""
        raise KernelError(f"kernel {self._name!r} cannot change a tensor")

    def assume(self, fact: Callable[[], object]) -> None:
        """Pass a fact on to an enclosing capture."""
        if self._outer is not None:
            self._outer.assume(fact)

    def part(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Raise: parts that replays have to update are random generators."""
        raise KernelError(
            f"kernel {self._name!r} uses random numbers; draw them outside, and give them as an argument"
        )

    def refuse_value(self, node: Node) -> None:
        """Raise: a kernel cannot depend on values."""
        raise KernelError(
            f"kernel {self._name!r} reads the value of {node.dtype}{list(node.shape)}; only shapes and "
            f"dtypes are known inside a kernel, so use where() instead of if"
        )


def _guarded(name: str, own: Any) -> AbstractContextManager[None]:
    return captured_by(_Guard(name, own, capture.get()))


class _Check:
    """Checks that the nodes of a function are elementwise, or reductions of rows.

    The graph drops a reduced axis, and a reshape puts it back with length 1. In between a node is `bare`, and
    must not be combined with whole rows: broadcasting would align its axes wrongly.
    """

    def __init__(self, name: str, inputs: Sequence[Node]) -> None:
        self._name = name
        self._inputs = set(inputs)
        self._shape: Shape = common_shape(*(node.shape for node in inputs))
        self._bare: set[Node] = set()
        self._constant: set[Node] = set()

    def run(self, result: Node) -> None:
        """Raise KernelError for the first node that is not allowed."""
        (result,) = inline([result], self._inputs)
        for node in topological([result], through_values=True, until=self._inputs):
            if node not in self._inputs:
                self._check(node)
        if result in self._bare:
            self._refuse_bare()
        if not _broadcasts(result.shape, self._shape):
            raise KernelError(
                f"kernel {self._name!r} gives shape {result.shape}, and its arguments have {self._shape}"
            )

    def _check(self, node: Node) -> None:
        primitive = node.primitive
        if primitive is elementwise.FULL:
            self._constant.add(node)
        elif primitive.kind is Kind.ELEMENTWISE or primitive.is_identity:
            self._check_elementwise(node)
        elif primitive.kind is Kind.REDUCTION:
            self._check_reduction(node)
        elif primitive is shaping.RESHAPE:
            self._check_reshape(node)
        elif primitive is reducing.EXPAND:
            if node.inputs[0] in self._bare:
                self._refuse_bare()
        else:
            self._refuse(f"uses {primitive.name}")

    def _check_elementwise(self, node: Node) -> None:
        rest = [parent for parent in node.inputs if parent not in self._constant]
        bare = [parent for parent in rest if parent in self._bare]
        if not rest:
            self._constant.add(node)
        elif bare and len(bare) < len(rest) and not node.primitive.is_identity:
            self._refuse_bare()
        elif node.inputs[0] in self._bare or (bare and not node.primitive.is_identity):
            self._bare.add(node)

    def _check_reduction(self, node: Node) -> None:
        source, axes = node.inputs[0], node.attributes["axes"]
        if axes != (source.ndim - 1,) or source in self._bare:
            self._refuse(f"reduces the axes {axes} of shape {source.shape}")
        self._bare.add(node)

    def _check_reshape(self, node: Node) -> None:
        source = node.inputs[0]
        before = len(node.shape) - source.ndim
        if source in self._bare and node.shape == (*source.shape, 1):
            return
        if source in self._bare:
            self._refuse_bare()
        if before < 0 or node.shape != (1,) * before + source.shape:
            self._refuse(f"makes shape {node.shape} of {source.shape}")

    def _refuse_bare(self) -> None:
        self._refuse("drops the axis that it reduces; keep it with keepdims=True")

    def _refuse(self, what: str) -> None:
        raise KernelError(
            f"kernel {self._name!r} {what}. A kernel is elementwise, or reduces over the last axis with "
            f"keepdims=True; other functions need no ps.kernel: they are fused where possible"
        )


def _broadcasts(shape: Shape, wide: Shape) -> bool:
    padded = (1,) * (len(wide) - len(shape)) + shape
    return len(padded) == len(wide) and all(a in (1, b) for a, b in zip(padded, wide, strict=True))
