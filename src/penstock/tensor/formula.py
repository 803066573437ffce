"""Compiles formulas such as `x / (1 + exp(-x * beta))` to functions of tensors and numbers.

A formula is a Python expression in which only arithmetic, comparisons, conditions and calls of known
functions are allowed. Reductions such as `sum(x)` go over the last axis and keep it.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import keyword
import math
import operator as op
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.errors import KernelError
from penstock.graph.elementwise import PRIMITIVES
from penstock.tensor import arithmetic, reduction
from penstock.tensor.core import Tensor, scalar
from penstock.tensor.dtypes import bool_

Function = Callable[..., Any]

_ELEMENTWISE: dict[str, Function] = {name: getattr(arithmetic, name) for name in arithmetic.__all__}
_REDUCTIONS = ("sum", "prod", "max", "min", "mean", "var", "std", "all", "any")
_CONSTANTS = {"pi": math.pi, "e": math.e, "inf": math.inf, "nan": math.nan}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "bitwise_left_shift",
    ast.RShift: "bitwise_right_shift",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
_SIGNS: dict[type[ast.unaryop], str] = {
    ast.USub: "negative",
    ast.UAdd: "positive",
    ast.Invert: "bitwise_invert",
    ast.Not: "logical_not",
}


# Functions


def _of_numbers(name: str) -> Function:
    """A function of Python numbers, whose result is a number: it takes the dtype of tensors beside it."""
    extra: dict[str, Function] = {"reciprocal": lambda x: np.divide(1, x), "square": np.square, "pow": _power}
    reference = extra.get(name) or PRIMITIVES[name].reference

    def function(*numbers: Any) -> Any:
        if name in _EXACT and all(type(number) is int for number in numbers) and _is_exact(name, *numbers):
            return _EXACT[name](*numbers)
        wide = [float(n) if type(n) is int and n.bit_length() > 63 else n for n in numbers]
        with np.errstate(all="ignore"):
            return np.asarray(reference(*map(np.asarray, wide))).item()

    return function


def _power(x: Any, y: Any) -> Any:
    return np.power(x.astype(np.float64) if y < 0 else x, y)  # NumPy refuses negative powers of integers


# Integers in a formula have any size; their range is checked when they are combined with a tensor.
_EXACT: dict[str, Function] = {
    "abs": abs,
    "add": op.add,
    "bitwise_and": op.and_,
    "bitwise_invert": op.invert,
    "bitwise_left_shift": op.lshift,
    "bitwise_or": op.or_,
    "bitwise_right_shift": op.rshift,
    "bitwise_xor": op.xor,
    "equal": op.eq,
    "floor_divide": op.floordiv,
    "greater": op.gt,
    "greater_equal": op.ge,
    "less": op.lt,
    "less_equal": op.le,
    "maximum": max,
    "minimum": min,
    "multiply": op.mul,
    "negative": op.neg,
    "not_equal": op.ne,
    "positive": op.pos,
    "pow": op.pow,
    "remainder": op.mod,
    "square": lambda x: x * x,
    "subtract": op.sub,
}
_MAX_BITS = 1024  # of an integer: no dtype holds more


def _is_exact(name: str, x: int, y: int = 1) -> bool:
    """Whether the result is an integer; an OverflowError if it has more than `_MAX_BITS` bits."""
    bits = x.bit_length() * y if name == "pow" else x.bit_length() + y if name == "bitwise_left_shift" else 0
    if bits > _MAX_BITS:
        raise OverflowError(f"{name} of {x} and {y} is beyond every dtype")
    if name in ("floor_divide", "remainder"):
        return y != 0
    return y >= 0 or (name != "pow" and "shift" not in name)


def _elementwise(name: str) -> Function:
    of_tensors, of_numbers = _ELEMENTWISE[name], _of_numbers(name)

    def function(*args: Any) -> Any:
        return (of_tensors if any(isinstance(arg, Tensor) for arg in args) else of_numbers)(*args)

    return function


def _reduction(name: str) -> Function:
    reduce = getattr(reduction, name)

    def function(x: Any) -> Tensor:
        if not isinstance(x, Tensor) or not x.ndim:
            given = "a tensor without axes" if isinstance(x, Tensor) else f"the number {x!r}"
            raise TypeError(f"{name} goes over the last axis of a tensor, and {given} was given")
        result: Tensor = reduce(x, axis=-1, keepdims=True)
        return result

    return function


def _where(condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, Tensor):
        tensor = next((value for value in (x, y) if isinstance(value, Tensor)), None)
        if tensor is None:
            return x if condition else y
        condition = scalar(bool(condition), bool_, tensor.device)
    return arithmetic.where(condition, x, y)


def _clip(x: Any, low: Any, high: Any) -> Any:
    if isinstance(x, Tensor):
        return arithmetic.clip(x, low, high)
    return _FUNCTIONS["minimum"](_FUNCTIONS["maximum"](x, low), high)


_FUNCTIONS: dict[str, Function] = {
    **{name: _elementwise(name) for name in _ELEMENTWISE if name not in ("where", "clip")},
    **{name: _reduction(name) for name in _REDUCTIONS},
    "where": _where,
    "clip": _clip,
}
_COUNTS = {name: len(inspect.signature(function).parameters) for name, function in _ELEMENTWISE.items()}
_COUNTS |= dict.fromkeys(_REDUCTIONS, 1)
# The keys are no identifiers, so they cannot collide with parameters.
_SCOPE = {f"{name}()": function for name, function in _FUNCTIONS.items()}


# From text to a function


class Formula:
    """A parsed formula: its parameters and its function."""

    def __init__(self, text: str, parameters: Sequence[str] | None = None) -> None:
        self.text = text
        reader = _Reader(text, parameters)
        body = reader.read()
        self.parameters: tuple[str, ...] = tuple(reader.parameters)
        arguments = ast.arguments([], [ast.arg(name) for name in self.parameters], None, [], [], None, [])
        whole = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
        # Safe to evaluate: all names are parameters or functions in the scope.
        self.function: Function = eval(compile(whole, "<formula>", "eval"), {"__builtins__": {}, **_SCOPE})


class _Reader:
    """Turns the syntax tree of a formula into calls; errors point at the part that is not allowed."""

    def __init__(self, text: str, parameters: Sequence[str] | None) -> None:
        self._text = text
        self._line = text.replace("\n", " ")  # of the same length, so positions stay valid
        self._given = None if parameters is None else tuple(parameters)
        self.parameters: dict[str, None] = dict.fromkeys(self._given or ())
        self._used: set[str] = set()

    def read(self) -> ast.expr:
        """The expression as a tree of calls."""
        self._check_parameters()
        start = len(self._line) - len(self._line.lstrip())
        try:
            tree = ast.parse(self._line[start:], mode="eval")
        except SyntaxError as error:
            position = start + error.offset - 1 if error.offset else len(self._line.rstrip())
            end = start + (error.end_offset or 0) - 1
            self._refuse_at(position, max(end, position + 1), f"this is no expression ({error.msg})")
        except ValueError as error:  # a character that Python's source cannot have
            self._refuse_at(0, len(self._line), f"this is no expression ({error})")
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):  # ast's offsets count bytes; convert to characters
                line = self._line[start:].encode()
                node.col_offset = start + len(line[: node.col_offset].decode())
                node.end_col_offset = start + len(line[: node.end_col_offset].decode())
        if self._given is None:
            self.parameters = dict.fromkeys(_free_names(tree))
        body = self._expression(tree.body)
        if not self.parameters:
            self._refuse_at(0, len(self._line), "a formula needs a parameter, and this is a constant")
        unused = [name for name in self.parameters if name not in self._used]
        if unused:
            self._refuse_at(0, len(self._line), f"the formula does not use the parameter {unused[0]!r}")
        return body

    def _check_parameters(self) -> None:
        for name in self._given or ():
            if not name.isidentifier() or keyword.iskeyword(name) or name in _FUNCTIONS:
                raise KernelError(f"a parameter cannot be called {name!r}: that is no name, or a function's")
        if self._given is not None and len(set(self._given)) != len(self._given):
            raise KernelError(f"parameters {list(self._given)} have a name twice")

    def _expression(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.Constant(value=bool() | int() | float()):
                return node
            case ast.Name():
                return self._name(node)
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                return self._call(_OPERATORS[type(operator)], left, right)
            case ast.UnaryOp(operator, operand):
                return self._call(_SIGNS[type(operator)], operand)
            case ast.Compare(left, operators, comparators):
                return self._comparison(node, left, operators, comparators)
            case ast.BoolOp(operator, values):
                name = "logical_and" if isinstance(operator, ast.And) else "logical_or"
                return self._joined(name, [self._expression(value) for value in values])
            case ast.IfExp(test, body, orelse):
                return self._call("where", test, body, orelse)
            case ast.Call():
                return self._function(node)
        self._refuse(node, f"{_described(node)} is not allowed in a formula")

    def _name(self, node: ast.Name) -> ast.expr:
        name = node.id
        if name in self.parameters:
            self._used.add(name)
            return node
        if name in _FUNCTIONS:
            self._refuse(node, f"{name!r} is a function; call it, as in {name}(x)")
        if name in _CONSTANTS:
            return ast.Constant(_CONSTANTS[name])
        self._refuse(node, f"{name!r} is not among the parameters {list(self.parameters)}")

    def _comparison(
        self, node: ast.Compare, left: ast.expr, operators: list[ast.cmpop], comparators: list[ast.expr]
    ) -> ast.expr:
        parts = []
        for operator, right in zip(operators, comparators, strict=True):
            if type(operator) not in _COMPARISONS:
                self._refuse(node, f"{_described(operator)} does not compare items")
            parts.append(self._call(_COMPARISONS[type(operator)], left, right))
            left = right
        return self._joined("logical_and", parts)

    def _function(self, node: ast.Call) -> ast.expr:
        if not isinstance(node.func, ast.Name):
            self._refuse(node.func, "only functions can be called, by their names")
        name = node.func.id
        if name not in _FUNCTIONS:
            close = difflib.get_close_matches(name, _FUNCTIONS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            self._refuse(node.func, f"{name!r} is no function here{hint}")
        if node.keywords:
            self._refuse(node.keywords[0].value, f"{name} takes no keywords in a formula")
        if len(node.args) != _COUNTS[name]:
            hint = f"; of two values, item by item, there is {name}imum" if name in ("max", "min") else ""
            takes = f"{_COUNTS[name]} value{'s' if _COUNTS[name] > 1 else ''}"
            self._refuse(node, f"{name} takes {takes}, and {len(node.args)} were given{hint}")
        return self._call(name, *node.args)

    def _call(self, name: str, *operands: ast.expr) -> ast.expr:
        return _called(name, [self._expression(operand) for operand in operands])

    @staticmethod
    def _joined(name: str, parts: list[ast.expr]) -> ast.expr:
        joined = parts[0]
        for part in parts[1:]:
            joined = _called(name, [joined, part])
        return joined

    def _refuse(self, node: ast.expr, why: str) -> NoReturn:
        self._refuse_at(node.col_offset, node.end_col_offset or node.col_offset + 1, why)

    def _refuse_at(self, start: int, end: int, why: str) -> NoReturn:
        """Raise, with the line of the formula and a mark under the given part."""
        first = self._text.rfind("\n", 0, start) + 1
        last = self._text.find("\n", start)
        line = self._text[first : last if last >= 0 else None]
        mark = " " * (start - first) + "^" * max(min(end, first + len(line)) - start, 1)
        raise KernelError(f"formula: {why}\n    {line}\n    {mark}")


def _free_names(tree: ast.AST) -> list[str]:
    """The names that are neither functions nor constants, from left to right."""
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in called]
    names.sort(key=lambda node: node.col_offset)
    return [node.id for node in names if node.id not in _FUNCTIONS and node.id not in _CONSTANTS]


def _called(name: str, arguments: list[ast.expr]) -> ast.expr:
    return ast.Call(ast.Name(f"{name}()", ast.Load()), arguments, [])


def _described(node: ast.AST) -> str:
    """The name of a syntax element, for an error."""
    words = {
        ast.BinOp: "a matrix product (@)",
        ast.Attribute: "a dot",
        ast.Subscript: "an index",
        ast.Constant: "such a constant",
        ast.NamedExpr: "an assignment",
        ast.Lambda: "a function",
        ast.Tuple: "a comma",
        ast.Starred: "a star",
        ast.In: "'in'",
        ast.NotIn: "'not in'",
        ast.Is: "'is'",
        ast.IsNot: "'is not'",
    }
    return words.get(type(node), type(node).__name__.lower())
