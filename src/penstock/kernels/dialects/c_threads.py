"""Statements in C for the threads of a GPU.

A value with a width is an array of the thread, and whatever is done to it a loop over the lanes, which the
compiler lays out: then every index is a constant, and the array is in registers. So the same text serves
OpenCL and CUDA, which has no vectors. Single values stand beside arrays as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.kernels import ir
from penstock.kernels.dialects.c import CPrinter
from penstock.kernels.dialects.c_expressions import (
    QUICK_PATTERNS,
    THREAD_PATTERNS,
    c_type,
    combine,
    expression,
    neutral,
)

HALF_PRECISION = ("bfloat16", "float16")
_WORD = 4  # bytes
_ACCESS = 16  # bytes that a thread reads or writes at once, at most


class ThreadPrinter(CPrinter):
    """Prints statements; knows which arrays hold two 16-bit floats a word, and which values were rounded."""

    def __init__(self, quick: bool = False) -> None:
        """`quick` functions are exact enough for float16 and bfloat16."""
        self._quick = quick
        self.patterns = QUICK_PATTERNS if quick else THREAD_PATTERNS
        self._packed: set[str] = set()  # arrays of float16 or bfloat16, two in a word
        self._rounded: dict[tuple[str, str], ir.Expr] = {}  # by name and dtype: what it was before
        self._differences: dict[str, tuple[str, str]] = {}  # from numbers that all lanes share
        self._words: dict[tuple[str, str], str] = {}  # by name and dtype: the words that it was taken from

    def lines(self, statement: ir.Statement) -> list[str]:
        match statement:
            case ir.Let() | ir.Declare():
                if isinstance(statement.value, ir.Load) and statement.type.width > 1:
                    return self._load(statement.name, statement.value)
                if isinstance(statement.value, ir.Vector):
                    items = ", ".join(map(self.expr, statement.value.items))
                    kind, width = c_type(ir.Type(statement.type.dtype)), statement.type.width
                    return [f"{kind} {statement.name}[{width}] = {{{items}}};"]
                return [self._named(statement.type, statement.name, self._defined(statement))]
            case ir.Assign() if statement.value.type.width > 1:
                item = f"{statement.name}[l_] = {self.expr(statement.value)};"
                return [f"{_each(statement.value.type)}{item}"]
            case ir.Store():
                return self._store(statement)
            case ir.RegisterArray() if statement.dtype in HALF_PRECISION:
                self._packed.add(statement.name)
                return [f"uint {statement.name}[{statement.length // 2}];"]
            case ir.Forget():
                packed = statement.name in self._packed
                return [f"EACH_LANE({statement.length // 2}) FORGET({statement.name}[l_]);"] if packed else []
            case ir.Accumulate():
                target, value = self.expr(statement.target), self.expr(statement.value)
                if statement.first is not None:
                    place = _moved(self.expr(statement.first), int(statement.type.width > 1))
                    target = f"{statement.target.name}[{place}]"
                scalar = ir.Type(statement.type.dtype)
                text = combine(statement.operation, scalar, target, value, self.patterns)
                return [f"{_each(statement.type)}{target} = {text};"]
            case ir.MultiplyAdd():
                return [f"{_each(statement.target.type)}{line}" for line in super().lines(statement)]
            case ir.BlockReduce():
                return self._block_reduce(statement)
            case ir.StridedReduce():
                return self._strided_reduce(statement)
            case _:
                return super().lines(statement)

    def name(self, var: ir.Var, lane: int) -> str:
        return f"{var.name}[l_]" if var.type.width > 1 else var.name

    def _defined(self, statement: ir.Let | ir.Declare) -> str:
        """The value of a name, or of an item of it; what later statements may make use of is noted."""
        value = statement.value
        if isinstance(value, ir.Call):
            if value.operation.startswith("round_"):
                self._rounded[statement.name, value.operation.removeprefix("round_")] = value.inputs[0]
            if self._quick and value.type.dtype == "float32" and value.operation == "subtract":
                less = value.inputs[1]
                if less.type.width == 1:
                    self._differences[statement.name] = self.expr(value.inputs[0]), self.expr(less)
        return self.named(value)

    def call(self, expr: ir.Call) -> str:
        first, *_ = inputs = tuple(map(self.operand, expr.inputs))
        if self._quick and expr.type.dtype == "float32" and expr.operation == "exp":
            given = expr.inputs[0]
            if isinstance(given, ir.Var) and given.name in self._differences:
                return "QUICK_EXP_LESS({}, {})".format(*self._differences[given.name])
        if expr.type.dtype in ("int8", "int16") and expr.operation in ("negative", "abs"):
            negated = f"NEGATE_{expr.type.dtype.upper()}({first})"
            return f"({first} < 0 ? {negated} : {first})" if expr.operation == "abs" else negated
        result, of = ir.Type(expr.type.dtype), ir.Type(expr.of.dtype)
        text = expression(expr.operation, result, of, inputs, self.patterns)
        assert text is not None, expr
        return text

    def value(self, expr: ir.Expr, lane: int) -> str:
        if isinstance(expr, ir.Identity):
            return neutral(expr.reduction, ir.Type(expr.type.dtype))
        return super().value(expr, lane)

    def broadcast(self, expr: ir.Broadcast) -> str:
        return _moved(self.addend(expr.value), expr.step)

    def random(self, expr: ir.Random) -> str:
        if expr.type.width == 1:
            return super().random(expr)
        return self.philox(expr, f"({_moved(self.addend(expr.index), expr.step)})")

    def _named(self, kind: ir.Type, name: str, text: str) -> str:
        """A name for a value, or for the values of all lanes."""
        scalar = c_type(ir.Type(kind.dtype))
        if kind.width == 1:
            return f"{scalar} {name} = {text};"
        return f"{scalar} {name}[{kind.width}]; {_each(kind)}{name}[l_] = {text};"

    def load(self, expr: ir.Load, index: str) -> str:
        if expr.buffer in self._packed:
            return f"ITEM_{expr.stored.upper()}({expr.buffer}, {_moved(index, expr.step)})"
        return super().load(expr, _moved(index, expr.step if expr.type.width > 1 else 0))

    def _load(self, name: str, load: ir.Load) -> list[str]:
        """Several items, at once where they lie side by side."""
        index = self.addend(load.index)
        accesses = _accesses(load)
        if not accesses:
            return [self._named(load.type, name, self.load(load, index))]
        words = f"{name}_words"
        count = sum(width for _, width, _ in accesses)
        loads = _calls("LOAD", load, index, words)
        if load.mask is not None:
            loads = f"EACH_LANE({count}) {words}[l_] = 0; if ({self.expr(load.mask)}) {{ {loads} }}"
        self._words[name, load.stored] = words
        value = f"ITEM_{load.stored.upper()}({words}, l_)"
        return [f"uint {words}[{count}]; {loads}", self._named(load.type, name, value)]

    def _store(self, store: ir.Store) -> list[str]:
        index, width, value = self.addend(store.index), store.type.width, store.value
        if isinstance(value, ir.Var):  # storing rounds, too
            value = self._rounded.get((value.name, store.stored), value)
            store = replace(store, value=value, width=width)
        name = value.name if isinstance(value, ir.Var) else ""
        if store.buffer in self._packed:
            words = self._words.get((name, store.stored))
            word = self._word(store) if words is None else f"{words}[l_]"
            return [f"EACH_LANE({width // 2}) {store.buffer}[{self.operand(store.index)} / 2 + l_] = {word};"]
        accesses = _accesses(store)
        if not accesses:
            place = _moved(index, int(width > 1))
            return [f"{_each(store.type)}{self.store(store, place, self.expr(value))}"]
        words = f"{name}_words_{store.buffer}"
        count = sum(width for _, width, _ in accesses)
        stores = _calls("STORE", store, index, words)
        return [f"uint {words}[{count}]; EACH_LANE({count}) {words}[l_] = {self._word(store)}; {stores}"]

    def _word(self, store: ir.Store) -> str:
        """Word number `l_` of the values that are stored."""
        size, value = _size(store.stored), store.value
        assert isinstance(value, ir.Var)

        def item(number: str) -> str:
            return f"{value.name}[{number}]" if value.type.width > 1 else value.name

        if size == 8:
            wide = item("l_ / 2")
            bits = f"DOUBLE_BITS({wide})" if store.stored == "float64" else f"(ulong){wide}"
            return f"(uint)({bits} >> 32 * (l_ % 2))"
        if size == 4:
            return f"FLOAT_BITS({item('l_')})" if store.stored == "float32" else f"(uint){item('l_')}"
        count = _WORD // size
        items = ", ".join(item(f"{count} * l_ + {k}") for k in range(count))
        packed = {"bfloat16": "BFLOAT16_PAIR", "float16": "FLOAT16_PAIR"}
        return f"{packed.get(store.stored, 'TWO_SHORTS' if size == 2 else 'FOUR_BYTES')}({items})"

    def _block_reduce(self, statement: ir.BlockReduce) -> list[str]:
        variable, operation = statement.variable, statement.operation
        scalar, width, name = ir.Type(variable.type.dtype), variable.type.width, variable.name
        lines = []
        while width > 1:
            width //= 2
            text = combine(operation, scalar, f"{name}[l_]", f"{name}[l_ + {width}]", self.patterns)
            lines.append(f"EACH_LANE({width}) {name}[l_] = {text};")
        result, type_ = statement.name, c_type(scalar)
        lines.append(f"{type_} {result} = {name}{'[0]' if variable.type.width > 1 else ''};")
        if statement.array is not None and statement.threads != ir.Const(1):
            text = combine(operation, scalar, result, "other_", self.patterns)
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
        text = combine(statement.operation, ir.Type(kind.dtype), target, other, self.patterns)
        return [
            f"{each}{mine} = {target};",
            f"for (int half_ = {half}; half_ > 0; half_ /= 2) {{",
            "    BARRIER;",
            f"    if (THREAD < half_ * {stride}) {{ {each}{mine} = {target} = {text}; }}",
            "}",
        ]


def _each(kind: ir.Type) -> str:
    return f"EACH_LANE({kind.width}) " if kind.width > 1 else ""


def _moved(index: str, step: int) -> str:
    """An index, or its value in lane `l_`."""
    return index if not step else f"{index} + l_" if step == 1 else f"{index} + l_ * {step}"


def _size(stored: str) -> int:
    return 2 if stored == "bfloat16" else int(np.dtype(stored).itemsize)


def _accesses(access: ir.Load | ir.Store) -> list[tuple[int, int, int]]:
    """The accesses that read or write all lanes: the first word of each, how many, and the first item.

    There are none where items lie apart, or not so that words would hold them.
    """
    size, width, aligned = _size(access.stored), access.type.width, access.aligned
    together = isinstance(access, ir.Store) or access.step == 1
    if width == 1 or not together or not ir.is_buffer(access.buffer) or aligned * size < _WORD:
        return []
    words = min(aligned * size, _ACCESS) // _WORD
    return [(at, words, at * _WORD // size) for at in range(0, width * size // _WORD, words)]


def _calls(word: str, access: ir.Load | ir.Store, index: str, words: str) -> str:
    """The text of all accesses."""
    return " ".join(
        f"{word}_{width}({words}, {at}, {access.buffer} + {index} + {item})"
        for at, width, item in _accesses(access)
    )
