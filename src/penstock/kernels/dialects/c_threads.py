"""Statements in C for the threads of a GPU.

A wide value is an array of the thread, and an operation on it is a loop over the lanes, which the compiler
unrolls: then every index is a constant, and the array is in registers. So the same text serves OpenCL and
CUDA, which has no vectors. Scalars may be operands beside arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels import ir
from penstock.kernels.dialects.c import CPrinter
from penstock.kernels.dialects.c_expressions import THREAD_PATTERNS, c_type, expression, neutral
from penstock.kernels.dialects.printer import Text, fills_words
from penstock.kernels.source import WORD, item_size

_ACCESS = 16  # bytes that a thread reads or writes at once, at most


class ThreadPrinter(CPrinter):
    """Prints lanes; knows which values were rounded, and the words that values were unpacked from."""

    def __init__(self, quick: bool = False) -> None:
        """`quick` functions are precise enough for float16 and bfloat16."""
        super().__init__()
        self._patterns = THREAD_PATTERNS[quick]
        self._words: dict[tuple[str, str], str] = {}  # by name and dtype: the words it was unpacked from

    def each(self, type: ir.Type, text: Text) -> list[str]:
        return [f"{_each(type)}{text(None)}"]

    def name(self, var: ir.Var, lane: int | None) -> str:
        return f"{var.name}[{'l_' if lane is None else lane}]" if var.type.width > 1 else var.name

    def expression(self, operation: str, result: ir.Type, of: ir.Type, inputs: Sequence[str]) -> str | None:
        return expression(operation, ir.Type(result.dtype), ir.Type(of.dtype), inputs, self._patterns)

    def neutral(self, reduction: str, type: ir.Type) -> str:
        return neutral(reduction, ir.Type(type.dtype))

    def special(self, statement: ir.Statement) -> list[str]:
        match statement:
            case ir.Forget(name, length):
                return [f"EACH_LANE({length // 2}) FORGET({name}[l_]);"] if name in self.packed else []
            case ir.UnknownOne(name):
                return [f"int {name} = UNKNOWN_ONE;"]
            case ir.MultiplyTiles(totals, left, right, dtype):
                words = ", ".join(map(self.expr, (*totals, *left, *right)))
                return [f"MULTIPLY_TILES_{dtype.upper()}({words});"]
            case ir.CopyAhead(array, index, buffer, start, mask):
                nbytes = "16" if mask is None else f"{self.expr(mask)} ? 16 : 0"
                places = f"{array} + {self.addend(index)}, {buffer} + {self.addend(start)}"
                return [f"COPY_AHEAD({places}, {nbytes});"]
            case ir.EndCopies():
                return ["END_COPIES;"]
            case ir.WaitForCopies(left):
                return [f"WAIT_FOR_COPIES({left});"]
            case ir.LoadTiles(names, array, index):
                words = ", ".join(names)
                return [f"uint {words}; LOAD_TILES({words}, {array} + {self.addend(index)});"]
            case ir.LoadPart(names, array, index):
                words = ", ".join(names)
                return [f"uint {words}; LOAD_PART({words}, {array} + {self.addend(index)});"]
            case ir.ComesLast(name, counters, index, count, array):
                own = f"{self.kernel_name}_" if counters == ir.COUNTERS else ""
                asked = f"COMES_LAST({own}{counters} + {self.addend(index)}, {self.expr(count)})"
                first = f"if (THREAD == 0) {array}[0] = {asked};"
                return ["DEVICE_BARRIER;", first, "BARRIER;", f"int {name} = {array}[0];"]
            case ir.WaitForEarlier():
                return ["WAIT_FOR_EARLIER;"]
            case ir.ClusterBarrier():
                return ["CLUSTER_BARRIER;"]
            case ir.ClusterSum(name, array, index, count):
                return [f"float {name} = CLUSTER_SUM({array}, {self.expr(index)}, {count});"]
            case ir.ClusterLoad(name, array, index, rank):
                return [f"float {name} = CLUSTER_LOAD({array}, {self.expr(index)}, {self.expr(rank)});"]
            case ir.BlockReduce():
                return self._block_reduce(statement)
            case ir.StridedReduce():
                return self._strided_reduce(statement)
            case _:
                return super().special(statement)

    def accumulator(self, statement: ir.Accumulate, lane: int | None) -> str:
        if statement.first is None:
            return super().accumulator(statement, lane)
        return f"{statement.target.name}[{_moved(self.expr(statement.first), int(statement.type.width > 1))}]"

    def multiply_add(self, total: str, left: str, right: str) -> str:
        return f"{total} = FMA({left}, {right}, {total});"

    def define_value(self, statement: ir.Let | ir.Declare) -> list[str]:
        name, value, type = statement.name, statement.value, statement.type
        if isinstance(value, ir.Load) and type.width > 1:
            return self._load(name, value)
        if isinstance(value, ir.Vector):
            items = ", ".join(map(self.expr, value.items))
            return [f"{c_type(ir.Type(type.dtype))} {name}[{type.width}] = {{{items}}};"]
        return [self._named(type, name, self.named(value))]

    def call(self, expr: ir.Call, inputs: Sequence[str]) -> str:
        dtype = expr.type.dtype
        if dtype in ("int8", "int16") and expr.operation in ("negative", "abs"):
            negated = f"NEGATE_{dtype.upper()}({inputs[0]})"
            return f"({inputs[0]} < 0 ? {negated} : {inputs[0]})" if expr.operation == "abs" else negated
        return super().call(expr, inputs)

    def broadcast(self, expr: ir.Broadcast) -> str:
        return _moved(self.addend(expr.value), expr.step)

    def philox(self, expr: ir.Random, index: str) -> str:
        if expr.type.width > 1:
            index = f"({_moved(self.addend(expr.index), expr.step)})"
        return super().philox(expr, index)

    def _named(self, kind: ir.Type, name: str, text: str) -> str:
        """The definition of a scalar, or of all lanes."""
        scalar = c_type(ir.Type(kind.dtype))
        if kind.width == 1:
            return f"{scalar} {name} = {text};"
        return f"{scalar} {name}[{kind.width}]; {_each(kind)}{name}[l_] = {text};"

    def load(self, expr: ir.Load, index: str) -> str:
        if expr.buffer in self.packed:
            return f"ITEM_{expr.stored.upper()}({expr.buffer}, {_moved(index, expr.step)})"
        return super().load(expr, _moved(index, expr.step if expr.type.width > 1 else 0))

    def _load(self, name: str, load: ir.Load) -> list[str]:
        """Load all lanes: whole words where the items are neighbours."""
        index, words, count = self.addend(load.index), f"{name}_words", _word_count(load)
        if not count:
            return [self._named(load.type, name, self.load(load, index))]
        loads = _accesses("LOAD_ONCE" if load.once else "LOAD", load, index, words)
        if load.mask is not None:
            loads = f"EACH_LANE({count}) {words}[l_] = 0; if ({self.expr(load.mask)}) {{ {loads} }}"
        self._words[name, load.stored] = words
        value = f"ITEM_{load.stored.upper()}({words}, l_)"
        return [f"uint {words}[{count}]; {loads}", self._named(load.type, name, value)]

    def store_value(self, store: ir.Store) -> list[str]:
        index, width, value = self.addend(store.index), store.type.width, store.value
        name = value.name if isinstance(value, ir.Var) else ""
        if store.buffer in self.packed:
            words = self._words.get((name, store.stored))
            word = self._word(store) if words is None else f"{words}[l_]"
            return [f"EACH_LANE({width // 2}) {store.buffer}[{self.operand(store.index)} / 2 + l_] = {word};"]
        words, count = f"{name}_words_{store.buffer}", _word_count(store)
        if not count:
            moved = _moved(index, int(width > 1))
            return [f"{_each(store.type)}{self.store_item(store, moved, self.expr(value))}"]
        stores = _accesses("STORE", store, index, words)
        return [f"uint {words}[{count}]; EACH_LANE({count}) {words}[l_] = {self._word(store)}; {stores}"]

    def _word(self, store: ir.Store) -> str:
        """Word `l_` of the values that are stored."""
        size, value = item_size(store.stored), store.value
        assert isinstance(value, ir.Var)

        def item(number: str) -> str:
            return f"{value.name}[{number}]" if value.type.width > 1 else value.name

        if size == 8:
            wide = item("l_ / 2")
            bits = f"DOUBLE_BITS({wide})" if store.stored == "float64" else f"(ulong){wide}"
            return f"(uint)({bits} >> 32 * (l_ % 2))"
        if size == 4:
            return f"FLOAT_BITS({item('l_')})" if store.stored == "float32" else f"(uint){item('l_')}"
        count = WORD // size
        items = ", ".join(item(f"{count} * l_ + {k}") for k in range(count))
        packed = {"bfloat16": "BFLOAT16_PAIR", "float16": "FLOAT16_PAIR"}
        return f"{packed.get(store.stored, 'TWO_SHORTS' if size == 2 else 'FOUR_BYTES')}({items})"

    def _block_reduce(self, statement: ir.BlockReduce) -> list[str]:
        variable, operation = statement.variable, statement.operation
        scalar, width, name = ir.Type(variable.type.dtype), variable.type.width, variable.name
        lines = []
        while width > 1:
            width //= 2
            text = self.combine(operation, scalar, f"{name}[l_]", f"{name}[l_ + {width}]")
            lines.append(f"EACH_LANE({width}) {name}[l_] = {text};")
        result, type_ = statement.name, c_type(scalar)
        lines.append(f"{type_} {result} = {name}{'[0]' if variable.type.width > 1 else ''};")
        if statement.array is not None and statement.threads != ir.Const(1):
            text = self.combine(operation, scalar, result, "other_")
            threads = self.expr(statement.threads)
            lines.append(f"FOLD_THREADS({type_}, {result}, {text}, {statement.array}, {threads})")
        return lines

    def _strided_reduce(self, statement: ir.StridedReduce) -> list[str]:
        kind = statement.target.type
        stride, threads = self.operand(statement.stride), self.operand(statement.threads)
        half = f"{threads} / {stride} / 2"
        if isinstance(statement.stride, ir.Const) and isinstance(statement.threads, ir.Const):
            half = str(int(statement.threads.value // statement.stride.value // 2))
        each, target = _each(kind), self.expr(statement.target)
        lane = f" + l_ * {threads}" if kind.width > 1 else ""
        mine = f"{statement.array}[THREAD{lane}]"
        other = f"{statement.array}[THREAD + half_ * {stride}{lane}]"
        text = self.combine(statement.operation, ir.Type(kind.dtype), target, other)
        return [
            f"{each}{mine} = {target};",
            f"for (int half_ = {half}; half_ > 0; half_ /= 2) {{",
            "    BARRIER;",
            f"    if (THREAD < half_ * {stride}) {{ {each}{mine} = {target} = {text}; }}",
            "}",
        ]


def _each(kind: ir.Type) -> str:
    return f"EACH_LANE({kind.width}) " if kind.width > 1 else ""


def _moved(index: str, step: ir.Steps) -> str:
    """An index in lane `l_`, given its step from lane to lane."""
    assert isinstance(step, int)
    return index if not step else f"{index} + l_" if step == 1 else f"{index} + l_ * {step}"


def _word_count(access: ir.Load | ir.Store) -> int:
    """How many words hold all lanes; 0 where the lanes are accessed separately."""
    in_words = ir.is_buffer(access.buffer) and fills_words(access)
    return access.type.width * item_size(access.stored) // WORD if in_words else 0


def _accesses(macro: str, access: ir.Load | ir.Store, index: str, words: str) -> str:
    """Accesses to all words, each as wide as the alignment allows."""
    size = item_size(access.stored)
    width = min(access.aligned * size, _ACCESS) // WORD
    return " ".join(
        f"{macro}_{width}({words}, {first}, {access.buffer} + {index} + {first * WORD // size})"
        for first in range(0, _word_count(access), width)
    )
