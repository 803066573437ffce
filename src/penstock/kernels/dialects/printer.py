"""Printing the IR: what all languages share of statements, and expressions with their parentheses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from penstock.kernels import ir
from penstock.kernels.dialects.patterns import COMBINE
from penstock.kernels.source import WORD, item_size

# Precedences. Bitwise operators need parentheses beside any other, as WGSL demands.
_LEVELS = {"||": 1, "&&": 1, "+": 3, "-": 3, "*": 4, "/": 4, "%": 4}
_LEVELS |= dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), 2)
_COMPOUND = (ir.Binary, ir.Select, ir.Unary)  # which need parentheses beside another operator
_BITS = ("&", "|", "^", "<<", ">>")

Text = Callable[[int | None], str]  # of a lane


def fills_words(access: ir.Load | ir.Store) -> bool:
    """Whether the lanes are neighbours in memory, and together fill whole words."""
    together = isinstance(access, ir.Store) or access.step == 1
    return together and access.type.width > 1 and access.aligned * item_size(access.stored) >= WORD


class Printer(ABC):
    """Prints the statements of one kernel.

    `lane` is a lane of a wide value, or None where the same text serves all lanes.
    """

    integer: str  # declares a constant integer
    variable: str  # declares a variable integer
    barriers: tuple[str, str]  # for local memory, and for device memory too
    atomic_add: str  # the text before the item
    packs = True  # whether private arrays hold two 16-bit floats per word

    def __init__(self) -> None:
        self.packed: set[str] = set()  # private arrays with two 16-bit floats per word

    # Statements

    def statements(self, body: Sequence[ir.Statement]) -> list[str]:
        """The lines of statements, indented."""
        return [f"    {line}" for statement in body for line in self.lines(statement)]

    def lines(self, statement: ir.Statement) -> list[str]:
        """The lines of a statement."""
        match statement:
            case ir.Let() | ir.Declare():
                return self.define(statement)
            case ir.Assign() | ir.Accumulate():
                return self.each(statement.type, lambda lane: self._update(statement, lane))
            case ir.MultiplyAdd():
                return self.each(statement.target.type, lambda lane: self._update(statement, lane))
            case ir.Store():
                return self.store(statement)
            case ir.RegisterArray(name, dtype, length):
                if self.packs and dtype in ir.HALF_PRECISION:
                    self.packed.add(name)
                    dtype, length = "uint32", length // 2
                return [self.registers(name, dtype, length)]
            case ir.AtomicAdd(array, index, value, name):
                text = f"{self.atomic_add}{self.shared_item(array, self.expr(index))}, {self.expr(value)});"
                return [f"{self.integer} {name} = {text}" if name else text]
            case ir.For():
                return self.loop(statement)
            case ir.While() | ir.If():
                return self._conditional(statement)
            case ir.Barrier():
                return [self.barriers[statement.device_memory]]
            case ir.Fence():
                return ["FENCE;"]
            case _:
                return self.special(statement)

    def each(self, type: ir.Type, text: Text) -> list[str]:
        """The lines for all lanes of a type, given the text for a lane."""
        return [text(None)]

    @abstractmethod
    def define(self, statement: ir.Let | ir.Declare) -> list[str]:
        """The definition of a name."""

    @abstractmethod
    def store(self, statement: ir.Store) -> list[str]:
        """A store to memory."""

    @abstractmethod
    def registers(self, name: str, dtype: str, length: int) -> str:
        """The declaration of a private array."""

    @abstractmethod
    def loop(self, loop: ir.For) -> list[str]:
        """A loop over integers."""

    @abstractmethod
    def special(self, statement: ir.Statement) -> list[str]:
        """A statement that differs between languages."""

    def opening(self, name: str, start: str, stop: str, step: str) -> str:
        """The first line of a loop."""
        return f"for ({self.variable} {name} = {start}; {name} < {stop}; {name} += {step}) {{"

    def shared_item(self, array: str, index: str) -> str:
        """An item of local memory, as an assignment's target."""
        return f"{array}[{index}]"

    def accumulator(self, statement: ir.Accumulate, lane: int | None) -> str:
        """The target of an accumulation."""
        return self.name(statement.target, lane)

    def accumulated(self, operation: str, type: ir.Type, sum_: str, more: str) -> str:
        """An accumulator combined with one more value."""
        return self.combine(operation, type, sum_, more)

    def multiply_add(self, total: str, left: str, right: str) -> str:
        """A statement that adds a product to a variable."""
        return f"{total} += {left} * {right};"

    def _update(self, statement: ir.Assign | ir.Accumulate | ir.MultiplyAdd, lane: int | None) -> str:
        """A new value for a variable or a lane of it."""
        match statement:
            case ir.Assign(name, value):
                return f"{self.name(ir.Var(name, value.type), lane)} = {self.expr(value, lane)};"
            case ir.MultiplyAdd(target, left, right):
                return self.multiply_add(
                    self.name(target, lane), self.operand(left, lane), self.operand(right, lane)
                )
            case ir.Accumulate():
                sum_, more = self.accumulator(statement, lane), self.expr(statement.value, lane)
                return f"{sum_} = {self.accumulated(statement.operation, statement.type, sum_, more)};"

    def _conditional(self, statement: ir.While | ir.If) -> list[str]:
        """A branch or a `while` loop."""
        word = "while" if isinstance(statement, ir.While) else "if"
        lines = [f"{word} ({self.expr(statement.condition)}) {{", *self.statements(statement.body)]
        match statement:
            case ir.If(otherwise=[ir.If() as other]):
                first, *rest = self._conditional(other)
                return [*lines, f"}} else {first}", *rest]
            case ir.If(otherwise=[_, *_]):
                lines += ["} else {", *self.statements(statement.otherwise)]
        return [*lines, "}"]

    # Expressions

    def expr(self, expr: ir.Expr, lane: int | None = None) -> str:
        """The text of an expression."""
        match expr:
            case ir.Var():
                return self.name(expr, lane)
            case ir.Const():
                return self.constant(expr.value, expr.type)
            case ir.ThreadId():
                return "THREAD"
            case ir.WorkgroupId():
                return self.workgroup(expr.axis)
            case ir.Affine():
                return self._affine(expr)
            case ir.Unary():
                return f"{expr.operator}{self.operand(expr.operand, lane)}"
            case ir.Binary():
                left = self._side(expr, expr.left, lane, is_left=True)
                return f"{left} {expr.operator} {self._side(expr, expr.right, lane, is_left=False)}"
            case ir.Call():
                return self.call(expr, tuple(self.operand(value, lane) for value in expr.inputs))
            case ir.Combine(type, reduction, left, right):
                return self.combine(reduction, type, self.operand(left, lane), self.operand(right, lane))
            case ir.Identity():
                return self.neutral(expr.reduction, expr.type)
            case ir.Lane():
                return self.name(expr.variable, expr.number)
            case _:
                return self.value(expr, lane)

    @abstractmethod
    def name(self, var: ir.Var, lane: int | None) -> str:
        """A variable."""

    @abstractmethod
    def constant(self, value: float, type: ir.Type) -> str:
        """A literal."""

    @abstractmethod
    def workgroup(self, axis: int) -> str:
        """The index of the workgroup."""

    @abstractmethod
    def expression(self, operation: str, result: ir.Type, of: ir.Type, inputs: Sequence[str]) -> str | None:
        """A primitive on inputs of type `of`; None if the language lacks it."""

    @abstractmethod
    def neutral(self, reduction: str, type: ir.Type) -> str:
        """The identity element of a reduction."""

    @abstractmethod
    def value(self, expr: ir.Expr, lane: int | None) -> str:
        """An expression that differs between languages."""

    def call(self, expr: ir.Call, inputs: Sequence[str]) -> str:
        """A primitive operation, given the texts of its inputs."""
        text = self.expression(expr.operation, expr.type, expr.of, inputs)
        assert text is not None, expr
        return text

    def combine(self, reduction: str, type: ir.Type, left: str, right: str) -> str:
        """Two values combined by a reduction."""
        text = self.expression(COMBINE[reduction], type, type, (left, right))
        assert text is not None, reduction
        return text

    def operand(self, expr: ir.Expr, lane: int | None = None) -> str:
        """An expression as the operand of any operator."""
        text = self.expr(expr, lane)
        return f"({text})" if isinstance(expr, _COMPOUND) else text

    def addend(self, expr: ir.Expr) -> str:
        """An expression as the operand of a sum."""
        arithmetic = isinstance(expr, ir.Binary) and _LEVELS.get(expr.operator, 0) >= _LEVELS["+"]
        return self.expr(expr) if arithmetic else self.operand(expr)

    def named(self, expr: ir.Expr, lane: int | None = None) -> str:
        """An expression on the right of an assignment."""
        text = self.expr(expr, lane)
        return f"({text})" if isinstance(expr, ir.Binary) and expr.operator == "&&" else text

    def _affine(self, expr: ir.Affine) -> str:
        parts = [
            self.expr(term) if factor is None else f"{self.expr(term)} * {self.expr(factor)}"
            for term, factor in expr.terms
        ]
        if expr.constant is not None:
            parts.append(self.expr(expr.constant))
        return f"({' + '.join(parts)})"

    def _side(self, parent: ir.Binary, child: ir.Expr, lane: int | None, is_left: bool) -> str:
        """An operand of a binary operator."""
        if isinstance(child, ir.Binary):
            text = self.expr(child, lane)
            if parent.operator in _BITS or child.operator in _BITS:
                return f"({text})"
            outer, inner = _LEVELS[parent.operator], _LEVELS[child.operator]
            chained = inner in (3, 4) or child.operator == parent.operator == "&&"
            return text if inner > outer or (is_left and inner == outer and chained) else f"({text})"
        if isinstance(child, ir.Unary):
            return self.expr(child, lane)
        return self.operand(child, lane)
