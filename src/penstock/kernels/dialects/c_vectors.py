"""Statements in OpenCL C for the threads of a CPU, whose wide values are vectors."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels import ir
from penstock.kernels.dialects.c import CPrinter
from penstock.kernels.dialects.c_expressions import CPU_SCALAR_PATTERNS, c_type, expression
from penstock.kernels.source import C_TYPES


class VectorPrinter(CPrinter):
    """Prints scalars and vectors."""

    packs = False

    def __init__(self, private: bool = False) -> None:
        """`private`: local arrays are arrays of the thread."""
        super().__init__()
        self._array_space = "" if private else "LOCAL "
        self._registers: set[str] = set()  # arrays of the thread
        self._pointers: dict[str, str] = {}  # by name: the buffer or array that it points into

    def special(self, statement: ir.Statement) -> list[str]:
        match statement:
            case ir.BlockReduce():
                return self._reduce(statement)
            case ir.Pointer(name, buffer, stored, offset, condition, otherwise):
                self._pointers[name] = buffer
                const = "const " if buffer.startswith("in") else ""
                target = f"{self._space(buffer)}{const}{C_TYPES[stored]} *RESTRICT {name}"
                place = f"{buffer} + {self.addend(offset)}"
                if condition is None:
                    return [f"{target} = {place};"]
                return [f"{target} = {self.expr(condition)} ? {place} : {otherwise};"]
            case ir.Prefetch(buffer, index):
                # Its argument is of no address space.
                return [f"__builtin_prefetch((const void *)(size_t)({buffer} + {self.addend(index)}));"]
            case ir.Pointers(count):
                names = ", ".join(f"out{number}" for number in range(count))
                return [f"GLOBAL uchar *{ir.POINTERS}[] = {{{names}}};"]
            case ir.SharedTasks(name, count, number, before):
                task = f"next_task({self._counters}, {self.expr(number)})"
                return [
                    f"if (!are_done({self._counters}, {self.expr(before)})) {{",
                    f"    END_TASKS({self._counters});",
                    "    return;",
                    "}",
                    f"for (int {name}; ({name} = {task}) < {count};) {{",
                    *self.statements(statement.body),
                    f"    task_done({self._counters});",
                    "}",
                ]
            case ir.EndTasks():
                return [f"END_TASKS({self._counters});"]
            case _:
                return super().special(statement)

    @property
    def _counters(self) -> str:
        return f"{self.kernel_name}_{ir.COUNTERS}"

    def expression(self, operation: str, result: ir.Type, of: ir.Type, inputs: Sequence[str]) -> str | None:
        if operation == "minimum" and of == ir.INT:
            # With `?:` LLVM unrolls loops, and a product with GELU takes 3 times as long.
            return f"min({inputs[0]}, {inputs[1]})"
        return expression(operation, result, of, inputs, CPU_SCALAR_PATTERNS if of.width == 1 else None)

    def registers(self, name: str, dtype: str, length: int) -> str:
        self._registers.add(name)
        return super().registers(name, dtype, length)

    def accumulator(self, statement: ir.Accumulate, lane: int | None) -> str:
        if statement.first is None:
            return super().accumulator(statement, lane)
        array, type, index = statement.target.name, statement.type, self.addend(statement.first)
        return f"{array}[{index}]" if type.width == 1 else self._vector(array, type.dtype, type.width, index)

    def accumulated(self, operation: str, type: ir.Type, sum_: str, more: str) -> str:
        # Whether the first is a NaN is asked of the new value, so that no turn waits for the answer.
        pair = (more, sum_) if operation in ("max", "min") else (sum_, more)
        return self.combine(operation, type, *pair)

    def name(self, var: ir.Var, lane: int | None) -> str:
        return var.name if lane is None else f"{var.name}.s{lane:x}"

    def value(self, expr: ir.Expr, lane: int | None) -> str:
        if isinstance(expr, ir.Vector):
            return f"({c_type(expr.type)})({', '.join(map(self.expr, expr.items))})"
        if isinstance(expr, ir.Shuffle):
            lanes = ", ".join(map(str, expr.lanes))
            return f"__builtin_shufflevector({self.expr(expr.left)}, {self.expr(expr.right)}, {lanes})"
        if isinstance(expr, ir.Select) and expr.condition.type.width > 1:
            parts = [self.expr(part) for part in (expr.condition, expr.yes, expr.no)]
            text = self.expression("where", expr.type, expr.type, parts)
            assert text is not None
            return text
        return super().value(expr, lane)

    def broadcast(self, expr: ir.Broadcast) -> str:
        value = self.expr(expr.value)
        if expr.type.width == 1:
            return value
        value = f"-({value})" if expr.type.dtype == "bool" else value
        whole = f"({c_type(expr.type)})({value})"
        if not expr.step:
            return whole
        offsets = ", ".join(map(str, ir.lane_offsets(expr.step, expr.type.width)))
        return f"{whole} + ({c_type(expr.type)})({offsets})"

    def philox(self, expr: ir.Random, index: str) -> str:
        width = expr.type.width
        if width == 1:
            return super().philox(expr, index)
        state = ", ".join(map(self.expr, expr.state))
        offsets = ", ".join(map(str, ir.lane_offsets(expr.step, width)))
        return f"philox_{width}({state}, (int{width})({index}) + (int{width})({offsets}))"

    def load(self, expr: ir.Load, index: str) -> str:
        width = expr.type.width
        if width == 1:
            return super().load(expr, index)
        if expr.step != 1:
            items = [self._item(expr, f"{index} + {far}") for far in ir.lane_offsets(expr.step, width)]
            return f"({c_type(expr.type)})({', '.join(items)})"
        value = self._vector(expr.buffer, expr.stored, width, index)
        if expr.stored == "float16":
            return f"from_halves_{width}({value})"
        if expr.stored == "bfloat16":
            return f"FROM_BFLOAT16_{width}({value})"
        return f"(__builtin_convertvector({value}, int{width}) != 0)" if expr.type.dtype == "bool" else value

    def _item(self, expr: ir.Load, index: str) -> str:
        value = super().load(expr, index)
        return f"-({value} != 0)" if expr.type.dtype == "bool" else value

    def store_item(self, statement: ir.Store, index: str, value: str) -> str:
        width = statement.type.width
        if width == 1:
            return super().store_item(statement, index, value)
        if statement.stored == "float16":
            value = f"to_halves_{width}({value})"
        elif statement.stored == "bfloat16":
            value = f"TO_BFLOAT16_{width}({value})"
        elif statement.type.dtype == "bool":
            value = f"__builtin_convertvector({value} & 1, uchar{width})"
        if statement.streamed:
            target = f"(GLOBAL {C_TYPES[statement.stored]}{width} *)({statement.buffer} + {index})"
            return f"__builtin_nontemporal_store({value}, {target});"
        return f"{self._vector(statement.buffer, statement.stored, width, index)} = {value};"

    def _reduce(self, statement: ir.BlockReduce) -> list[str]:
        type, name = statement.variable.type, statement.name
        width, value, lines = type.width, statement.variable.name, []
        while width > 1:
            width //= 2
            half = ir.Type(type.dtype, width)
            parts = (f"{value}.lo", f"{value}.hi")
            value = f"{name}_{width}"
            lines.append(f"{c_type(half)} {value} = {self.combine(statement.operation, half, *parts)};")
        if type.width > 1 and type.dtype == "bool":
            value = f"({value} & 1)"
        return [*lines, f"{c_type(ir.Type(type.dtype))} {name} = {value};"]

    def _space(self, buffer: str) -> str:
        """The address space of a buffer, an array or a pointer."""
        if buffer in self._registers:
            return ""
        return "GLOBAL " if ir.is_buffer(self._pointers.get(buffer, buffer)) else self._array_space

    def _vector(self, buffer: str, stored: str, width: int, index: str) -> str:
        """A vector in memory that has the alignment of its items only."""
        item = "ushort" if stored == "float16" else C_TYPES[stored]
        return f"*({self._space(buffer)}loose_{item}{width} *)({buffer} + {index})"
