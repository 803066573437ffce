"""Expressions and statements on single values in C, as OpenCL and CUDA take it."""

from __future__ import annotations

import math

from penstock.kernels.dialects.c_expressions import Patterns, c_type, combine, expression, neutral
from penstock.kernels.dialects.printer import Printer
from penstock.kernels.ir.expressions import (
    Bitcast,
    Broadcast,
    Call,
    Cast,
    Clamp,
    Combine,
    Expr,
    Identity,
    Lane,
    Load,
    LoadIndex,
    Random,
    Select,
    Type,
)
from penstock.kernels.ir.statements import (
    LOCAL_MEMORY,
    Accumulate,
    Assign,
    AtomicAdd,
    Barrier,
    CallFunction,
    Declare,
    For,
    If,
    Let,
    MultiplyAdd,
    RegisterArray,
    Statement,
    Store,
    UniformLoad,
    While,
)
from penstock.kernels.source import C_TYPES

_SUFFIXES = {"uint32": "u", "int64": "l", "uint64": "ul", "float32": "f"}


class CPrinter(Printer):
    """Prints single values; how values with a width are printed depends on who computes them."""

    kernel_name = ""  # which the names of its functions and tables begin with
    tables: frozenset[str] = frozenset()
    workgroup_name = ""  # of a variable with the number of the workgroup, in a function
    patterns: Patterns | None = None  # of functions of float32, where there are better ones than C's

    def workgroup(self, axis: int) -> str:
        return self.workgroup_name or f"GROUP({axis})"

    def constant(self, value: float, type: Type) -> str:
        if type.dtype == "bool" or not type.dtype.startswith("float"):
            return f"{int(value)}{_SUFFIXES.get(type.dtype, '')}"
        if not math.isfinite(value):
            return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
        return f"{float(value)!r}{_SUFFIXES.get(type.dtype, '')}"

    def value(self, expr: Expr, lane: int) -> str:
        match expr:
            case Call():
                return self.call(expr)
            case Select():
                return f"{self.expr(expr.condition)} ? {self.expr(expr.yes)} : {self.expr(expr.no)}"
            case Cast():
                return f"({c_type(expr.type)}){self.operand(expr.value)}"
            case Bitcast():
                return self.bits(expr)
            case Clamp():
                value, length, last = (self.operand(part) for part in (expr.value, expr.length, expr.last))
                return f"{value} < 0 ? 0 : {value} < {length} ? (int){value} : {last}"
            case Combine():
                left, right = self.operand(expr.left), self.operand(expr.right)
                return combine(expr.reduction, expr.type, left, right, self.patterns)
            case Identity():
                return neutral(expr.reduction, expr.type)
            case Broadcast():
                return self.broadcast(expr)
            case Lane():
                return self.lane(expr)
            case Random():
                return self.random(expr)
            case Load():
                return self.load(expr, self.addend(expr.index))
            case LoadIndex():
                item = f"{expr.buffer}[{self.expr(expr.index)}]"
                unsigned = "ulong" if expr.stored.endswith("64") else "uint"
                return f"(({unsigned}){item} < {self.operand(expr.length)} ? (int){item} : -1)"
            case _:
                raise AssertionError(f"{expr} has no text in C")

    def call(self, expr: Call) -> str:
        """A primitive operation."""
        inputs = tuple(map(self.operand, expr.inputs))
        text = expression(expr.operation, expr.type, expr.of, inputs, self.patterns)
        assert text is not None, expr
        return text

    def bits(self, expr: Bitcast) -> str:
        """The bits of a value."""
        value, kinds = self.expr(expr.value), (expr.value.type.dtype, expr.type.dtype)
        if "float64" in kinds:
            return f"BITS_DOUBLE({value})" if kinds[1] == "float64" else f"(ulong)DOUBLE_BITS({value})"
        if "float32" in kinds:
            return f"BITS_FLOAT({value})" if kinds[1] == "float32" else f"FLOAT_BITS({value})"
        return f"({c_type(expr.type)}){self.operand(expr.value)}"

    def broadcast(self, expr: Broadcast) -> str:
        """A number in every lane."""
        return self.expr(expr.value)

    def lane(self, expr: Lane) -> str:
        """An item of a variable."""
        return f"{expr.variable.name}[{expr.number}]"

    def random(self, expr: Random) -> str:
        """A word of random bits."""
        return self.philox(expr, self.operand(expr.index))

    def philox(self, expr: Random, index: str) -> str:
        """The word of random bits with a number."""
        low, high, first, second = (self.expr(word) for word in expr.state)
        block = f"((((ulong){second} << 32) | {first}) + (ulong)({index} / 4))"
        return f"philox({low}, {high}, (uint){block}, (uint)({block} >> 32), {index} % 4)"

    def load(self, expr: Load, index: str) -> str:
        """An item of memory."""
        table = f"{self.kernel_name}_" if expr.buffer in self.tables else ""
        value = f"{table}{expr.buffer}[{index}]"
        if expr.stored == "float16":
            value = f"vload_half({index}, {expr.buffer})"
        if expr.stored == "bfloat16":
            value = f"FROM_BFLOAT16({value})"
        return f"{self.expr(expr.mask)} ? {value} : 0" if expr.mask is not None else value

    def store(self, statement: Store, index: str, value: str) -> str:
        """What writes an item."""
        if statement.stored == "float16":
            return f"vstore_half({value}, {index}, {statement.buffer});"
        rounded = f"TO_BFLOAT16({value})" if statement.stored == "bfloat16" else value
        return f"{statement.buffer}[{index}] = {rounded};"

    def lines(self, statement: Statement) -> list[str]:
        match statement:
            case Let() | Declare():
                return [f"{c_type(statement.type)} {statement.name} = {self.named(statement.value)};"]
            case Assign():
                return [f"{statement.name} = {self.expr(statement.value)};"]
            case Store():
                return [self.store(statement, self.addend(statement.index), self.expr(statement.value))]
            case Accumulate():
                target, value = self.expr(statement.target), self.expr(statement.value)
                text = combine(statement.operation, statement.type, target, value, self.patterns)
                return [f"{target} = {text};"]
            case MultiplyAdd():
                left, right = self.operand(statement.left), self.operand(statement.right)
                return [f"{self.expr(statement.target)} += {left} * {right};"]
            case RegisterArray():
                return [f"{c_type(Type(statement.dtype))} {statement.name}[{statement.length}];"]
            case UniformLoad():
                item = f"{statement.array}[{self.expr(statement.index)}]"
                return ["BARRIER;", f"int {statement.name} = {item};"]
            case CallFunction():
                return [self._call_function(statement)]
            case AtomicAdd():
                return [self._atomic(statement)]
            case For():
                return self._for(statement)
            case While() | If():
                return self.conditional(statement)
            case Barrier():
                return ["DEVICE_BARRIER;" if statement.device_memory else "BARRIER;"]
            case _:
                raise AssertionError(f"{statement} is for the threads of a GPU")

    def _call_function(self, statement: CallFunction) -> str:
        arguments = [self.expr(statement.group)]
        arguments += [
            f"(LOCAL_AT {C_TYPES[dtype]} *)({LOCAL_MEMORY} + {at})" for dtype, at in statement.arrays
        ]
        arguments += [f"(GLOBAL {C_TYPES[dtype]} *){buffer}" for dtype, buffer in statement.buffers]
        arguments += map(self.expr, statement.arguments)
        return f"{self.kernel_name}_{statement.function}({', '.join(arguments)});"

    def _for(self, loop: For) -> list[str]:
        unroll = f'_Pragma("unroll {loop.unrolled}") ' if loop.unrolled else ""
        start, stop, step = (self.expr(bound) for bound in (loop.start, loop.stop, loop.step))
        stop = f"({stop})" if isinstance(loop.stop, Select) else stop
        opening = f"for (int {loop.name} = {start}; {loop.name} < {stop}; {loop.name} += {step}) {{"
        return [f"{unroll}{opening}", *self.statements(loop.body), "}"]

    def _atomic(self, statement: AtomicAdd) -> str:
        place = f"{statement.array}[{self.expr(statement.index)}]"
        text = f"LOCAL_ADD({place}, {self.expr(statement.value)});"
        return f"int {statement.name} = {text}" if statement.name else text
