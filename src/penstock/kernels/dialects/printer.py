"""What printing the IR has in common in all languages: expressions with their parentheses, and names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.kernels import ir

# How tightly operators bind. Those of bits stand in parentheses beside any other, as WGSL demands.
_LEVELS = {"||": 1, "&&": 1, "+": 3, "-": 3, "*": 4, "/": 4, "%": 4}
_LEVELS |= dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), 2)
_COMPOUND = (ir.Binary, ir.Select, ir.Unary)  # which need parentheses beside another operator
_BITS = ("&", "|", "^", "<<", ">>")


class Printer(ABC):
    """Prints the statements of one kernel."""

    def statements(self, body: Sequence[ir.Statement], depth: int = 1) -> list[str]:
        """The lines of statements, set in by `depth` steps."""
        return ["    " * depth + line for statement in body for line in self.lines(statement)]

    @abstractmethod
    def lines(self, statement: ir.Statement) -> list[str]:
        """The lines of one statement."""

    @abstractmethod
    def value(self, expr: ir.Expr, lane: int) -> str:
        """An expression of a kind that languages write differently."""

    @abstractmethod
    def workgroup(self, axis: int) -> str:
        """The number of the workgroup."""

    @abstractmethod
    def constant(self, value: float, type: ir.Type) -> str:
        """A number."""

    def expr(self, expr: ir.Expr, lane: int = 0) -> str:
        """The text of an expression; of one with a width, that of one lane where lanes are apart."""
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
            case _:
                return self.value(expr, lane)

    def conditional(self, statement: ir.While | ir.If) -> list[str]:
        """Statements under a condition, once or as long as it holds."""
        word = "while" if isinstance(statement, ir.While) else "if"
        lines = [f"{word} ({self.expr(statement.condition)}) {{", *self.statements(statement.body)]
        match statement:
            case ir.If(otherwise=[ir.If() as other]):
                first, *rest = self.conditional(other)
                return [*lines, f"}} else {first}", *rest]
            case ir.If(otherwise=[_, *_]):
                lines += ["} else {", *self.statements(statement.otherwise)]
        return [*lines, "}"]

    def name(self, var: ir.Var, lane: int) -> str:
        """A variable."""
        return var.name

    def operand(self, expr: ir.Expr, lane: int = 0) -> str:
        """An expression as it can stand beside any operator."""
        text = self.expr(expr, lane)
        return f"({text})" if isinstance(expr, _COMPOUND) else text

    def addend(self, expr: ir.Expr) -> str:
        """An expression as it can stand in a sum."""
        arithmetic = isinstance(expr, ir.Binary) and _LEVELS.get(expr.operator, 0) >= _LEVELS["+"]
        return self.expr(expr) if arithmetic else self.operand(expr)

    def named(self, expr: ir.Expr) -> str:
        """An expression after an equals sign."""
        text = self.expr(expr)
        return f"({text})" if isinstance(expr, ir.Binary) and expr.operator == "&&" else text

    def _affine(self, expr: ir.Affine) -> str:
        parts = [
            self.expr(term) if factor is None else f"{self.expr(term)} * {self.expr(factor)}"
            for term, factor in expr.terms
        ]
        if expr.constant is not None:
            parts.append(self.expr(expr.constant))
        return f"({' + '.join(parts)})"

    def _side(self, parent: ir.Binary, child: ir.Expr, lane: int, is_left: bool) -> str:
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
