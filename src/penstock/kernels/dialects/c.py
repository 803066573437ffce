"""Expressions and statements on scalars in the C that OpenCL and CUDA share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from penstock.kernels import ir
from penstock.kernels.dialects.c_expressions import c_type, expression, neutral
from penstock.kernels.dialects.printer import Printer
from penstock.kernels.source import C_TYPES

_SUFFIXES = {"uint32": "u", "int64": "l", "uint64": "ul", "float32": "f"}


class CPrinter(Printer):
    """Prints scalars; subclasses print vectors for a CPU, and lanes for a GPU."""

    integer = variable = "int"
    barriers = ("BARRIER;", "DEVICE_BARRIER;")
    atomic_add = "LOCAL_ADD("
    kernel_name = ""  # the prefix of the names of its functions and tables
    tables: frozenset[str] = frozenset()
    workgroup_name = ""  # the parameter with the workgroup's index, in a function

    def __init__(self) -> None:
        super().__init__()
        self._rounded: dict[tuple[str, str], ir.Expr] = {}  # by name and dtype: the value before rounding

    def workgroup(self, axis: int) -> str:
        return self.workgroup_name or f"GROUP({axis})"

    def constant(self, value: float, type: ir.Type) -> str:
        suffix = _SUFFIXES.get(type.dtype, "")
        if not type.dtype.startswith("float"):
            return f"{int(value)}{suffix}"
        if math.isfinite(value):
            return f"{float(value)!r}{suffix}"
        return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"

    def expression(self, operation: str, result: ir.Type, of: ir.Type, inputs: Sequence[str]) -> str | None:
        return expression(operation, result, of, inputs)

    def neutral(self, reduction: str, type: ir.Type) -> str:
        return neutral(reduction, type)

    def value(self, expr: ir.Expr, lane: int | None) -> str:
        match expr:
            case ir.Select():
                return f"{self.expr(expr.condition)} ? {self.expr(expr.yes)} : {self.expr(expr.no)}"
            case ir.Cast():
                return f"({c_type(expr.type)}){self.operand(expr.value)}"
            case ir.Clamp():
                value, length, last = (self.operand(part) for part in (expr.value, expr.length, expr.last))
                return f"{value} < 0 ? 0 : {value} < {length} ? (int){value} : {last}"
            case ir.Broadcast():
                return self.broadcast(expr)
            case ir.Random():
                return self.philox(expr, self.operand(expr.index))
            case ir.Load():
                return self.load(expr, self.addend(expr.index))
            case ir.LoadIndex():
                item = f"{expr.buffer}[{self.expr(expr.index)}]"
                unsigned = "ulong" if expr.stored.endswith("64") else "uint"
                return f"(({unsigned}){item} < {self.operand(expr.length)} ? (int){item} : -1)"
            case ir.SameMemory(left, right):
                return f"({left} == {right})"
            case _:
                raise AssertionError(f"{expr} has no text in C")

    @abstractmethod
    def broadcast(self, expr: ir.Broadcast) -> str:
        """A scalar in every lane."""

    def philox(self, expr: ir.Random, index: str) -> str:
        """The word of random bits at an index."""
        low, high, first, second = (self.expr(word) for word in expr.state)
        block = f"((((ulong){second} << 32) | {first}) + (ulong)({index} / 4))"
        return f"philox({low}, {high}, (uint){block}, (uint)({block} >> 32), {index} % 4)"

    def load(self, expr: ir.Load, index: str) -> str:
        """An item of memory."""
        table = f"{self.kernel_name}_" if expr.buffer in self.tables else ""
        value = f"{table}{expr.buffer}[{index}]"
        if expr.stored == "float16":
            value = f"vload_half({index}, {expr.buffer})"
        if expr.stored == "bfloat16":
            value = f"FROM_BFLOAT16({value})"
        return f"{self.expr(expr.mask)} ? {value} : 0" if expr.mask is not None else value

    def define(self, statement: ir.Let | ir.Declare) -> list[str]:
        value = statement.value
        # The name may have been that of another value, such as in the loop over vectors before this one.
        for stored in ("float16", "bfloat16"):
            self._rounded.pop((statement.name, stored), None)
        if isinstance(value, ir.Call) and value.operation.startswith("round_"):
            self._rounded[statement.name, value.operation.removeprefix("round_")] = value.inputs[0]
        return self.define_value(statement)

    def define_value(self, statement: ir.Let | ir.Declare) -> list[str]:
        """The definition of a name, whatever its value is."""
        return [f"{c_type(statement.type)} {statement.name} = {self.named(statement.value)};"]

    def store(self, statement: ir.Store) -> list[str]:
        value = statement.value
        if isinstance(value, ir.Var):  # storing rounds, too
            value = self._rounded.get((value.name, statement.stored), value)
            statement = replace(statement, value=value, width=statement.type.width)
        return self.store_value(statement)

    def store_value(self, statement: ir.Store) -> list[str]:
        """The lines that write a value."""
        return [self.store_item(statement, self.addend(statement.index), self.expr(statement.value))]

    def store_item(self, statement: ir.Store, index: str, value: str) -> str:
        """The statement that writes an item."""
        if statement.stored == "float16":
            return f"vstore_half({value}, {index}, {statement.buffer});"
        rounded = f"TO_BFLOAT16({value})" if statement.stored == "bfloat16" else value
        return f"{statement.buffer}[{index}] = {rounded};"

    def registers(self, name: str, dtype: str, length: int) -> str:
        return f"{c_type(ir.Type(dtype))} {name}[{length}];"

    def special(self, statement: ir.Statement) -> list[str]:
        match statement:
            case ir.UniformLoad(name, array, index):
                return ["BARRIER;", f"int {name} = {array}[{self.expr(index)}];"]
            case ir.CallFunction():
                return [self._call_function(statement)]
            case _:
                raise AssertionError(f"{statement} is for the threads of a GPU")

    def _call_function(self, statement: ir.CallFunction) -> str:
        arguments = [self.expr(statement.group)]
        arguments += [
            f"(LOCAL_AT {C_TYPES[dtype]} *)({ir.LOCAL_MEMORY} + {at})" for dtype, at in statement.arrays
        ]
        arguments += [
            f"(GLOBAL {C_TYPES[dtype]} *){self._buffer(buffer)}" for dtype, buffer in statement.buffers
        ]
        arguments += map(self.expr, statement.arguments)
        return f"{self.kernel_name}_{statement.function}({', '.join(arguments)});"

    def _buffer(self, buffer: str | ir.Expr) -> str:
        return buffer if isinstance(buffer, str) else f"{ir.POINTERS}[{self.expr(buffer)}]"

    def loop(self, loop: ir.For) -> list[str]:
        unroll = f'_Pragma("unroll {loop.unrolled}") ' if loop.unrolled else ""
        start, stop, step = (self.expr(bound) for bound in (loop.start, loop.stop, loop.step))
        stop = f"({stop})" if isinstance(loop.stop, ir.Select) else stop
        return [unroll + self.opening(loop.name, start, stop, step), *self.statements(loop.body), "}"]
