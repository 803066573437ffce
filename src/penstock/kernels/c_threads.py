"""The loop form in C for the threads of a GPU.

A value with lanes is an array of the thread, and whatever is done to it a loop over the lanes, which the
compiler lays out: then every index is a constant, and the array is in registers. So the same text serves
OpenCL and CUDA, which has no vectors. Single values stand beside arrays as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.kernels.c_expressions import (
    QUICK_PATTERNS,
    THREAD_PATTERNS,
    c_type,
    combine,
    expression,
    neutral,
)
from penstock.kernels.loops import (
    Across,
    Barrier,
    Choose,
    Clip,
    Count,
    Fold,
    Forget,
    Let,
    Load,
    Loop,
    Pick,
    Random,
    Registers,
    Splat,
    Statement,
    Store,
    Truth,
    Type,
    Update,
    Variable,
    When,
)

HALVES = ("bfloat16", "float16")
_WORD = 4  # bytes
_ACCESS = 16  # bytes that a thread reads or writes at once, at most


def thread_statements(body: Sequence[Statement], quick: bool = False) -> list[str]:
    """The lines of a kernel's statements; functions that are `quick` are exact enough for halves."""
    return _Thread(quick).statements(body)


def whole_number(one: Count | Truth | Pick | Clip) -> str:
    """The line that names a whole number; a truth value is 0 or 1."""
    match one:
        case Pick():
            text = f"{one.condition} ? {one.yes} : {one.no}"
        case Clip():
            text = f"{one.value} < 0 ? 0 : {one.value} < {one.length} ? (int){one.value} : {one.length - 1}"
        case _:
            text = one.text
    return f"int {one.name} = {text};"


class _Thread:
    """Writes statements; knows which names are arrays, and which values were rounded to halves."""

    def __init__(self, quick: bool) -> None:
        self._quick = quick
        self._patterns = QUICK_PATTERNS if quick else THREAD_PATTERNS
        self._arrays: set[str] = set()
        self._packed: set[str] = set()  # arrays of halves, two in a word
        self._rounded: dict[tuple[str, str], str] = {}  # by name and dtype: what it was before
        self._differences: dict[str, tuple[str, str]] = {}  # from numbers that all lanes share
        self._words: dict[tuple[str, str], str] = {}  # by name and dtype: the words that it was taken from

    def statements(self, body: Sequence[Statement]) -> list[str]:
        """The lines of statements, set in by a step."""
        return ["    " + line for one in body for line in self._lines(one)]

    def _lines(self, one: Statement) -> list[str]:
        match one:
            case Count() | Truth() | Pick() | Clip():
                return [whole_number(one)]
            case Let():
                inputs = tuple(map(self._item, one.inputs))
                kinds = Type(one.type.dtype), Type(one.of.dtype)
                text = expression(one.operation, *kinds, inputs, self._patterns)
                assert text is not None, one
                if self._quick and one.type.dtype == "float32":
                    if one.operation == "subtract" and one.inputs[1] not in self._arrays:
                        self._differences[one.name] = inputs[0], inputs[1]
                    if one.operation == "exp" and one.inputs[0] in self._differences:
                        text = "QUICK_EXP_LESS({}, {})".format(*self._differences[one.inputs[0]])
                if one.type.dtype in ("int8", "int16") and one.operation in ("negative", "abs"):
                    negated = f"NEGATE_{one.type.dtype.upper()}({inputs[0]})"
                    is_abs = one.operation == "abs"
                    text = f"({inputs[0]} < 0 ? {negated} : {inputs[0]})" if is_abs else negated
                if one.operation.startswith("round_"):
                    self._rounded[one.name, one.operation.removeprefix("round_")] = one.inputs[0]
                return [self._named(one.type, one.name, text)]
            case Splat():
                return [self._named(one.type, one.name, _moved(one.value, one.step))]
            case Choose():
                text = f"{one.condition} ? {self._item(one.yes)} : {self._item(one.no)}"
                return [self._named(one.type, one.name, text)]
            case Random():
                return [self._named(one.type, one.name, _random(one))]
            case Load():
                return self._load(one)
            case Store():
                return self._store(one)
            case Registers():
                return [self._registers(one)]
            case Forget():
                return (
                    [f"EACH_LANE({one.length // 2}) FORGET({one.name}[l_]);"]
                    if one.name in self._packed
                    else []
                )
            case Variable():
                return [self._named(one.type, one.name, neutral(one.operation, Type(one.type.dtype)))]
            case Update():
                target, value = self._item(one.target), self._item(one.value)
                if one.first:
                    target = f"{one.target}[{_moved(one.first, int(one.type.lanes > 1))}]"
                text = combine(one.operation, Type(one.type.dtype), target, value, self._patterns)
                return [f"{_each(one.type)}{target} = {text};"]
            case Fold():
                return self._fold(one)
            case Across():
                return self._across(one)
            case Loop():
                unroll = f'_Pragma("unroll {one.unrolled}") ' if one.unrolled else ""
                opening = (
                    f"{unroll}for (int {one.name} = {one.start}; {one.name} < {one.stop}; "
                    f"{one.name} += {one.step}) {{"
                )
                return [opening, *self.statements(one.body), "}"]
            case When():
                return [f"if ({one.condition}) {{", *self.statements(one.body), "}"]
            case Barrier():
                return ["DEVICE_BARRIER;" if one.device_memory else "BARRIER;"]

    def _item(self, name: str) -> str:
        return f"{name}[l_]" if name in self._arrays else name

    def _named(self, kind: Type, name: str, text: str) -> str:
        """A name for a value, or for the values of all lanes."""
        scalar = c_type(Type(kind.dtype))
        if kind.lanes == 1:
            return f"{scalar} {name} = {text};"
        self._arrays.add(name)
        return f"{scalar} {name}[{kind.lanes}]; {_each(kind)}{name}[l_] = {text};"

    def _registers(self, one: Registers) -> str:
        if one.dtype not in HALVES:
            return f"{c_type(Type(one.dtype))} {one.name}[{one.length}];"
        self._packed.add(one.name)
        return f"uint {one.name}[{one.length // 2}];"

    def _load(self, one: Load) -> list[str]:
        if one.buffer in self._packed:
            text = f"ITEM_{one.stored.upper()}({one.buffer}, {_moved(one.index, one.step)})"
            return [self._named(one.type, one.name, text)]
        accesses = _accesses(one)
        if not accesses:
            text = _loaded(one, _moved(one.index, one.step if one.type.lanes > 1 else 0))
            if one.condition:
                text = f"{one.condition} ? {text} : 0"
            return [self._named(one.type, one.name, text)]
        words = f"{one.name}_words"
        count = sum(width for _, width, _ in accesses)
        loads = _calls("LOAD", one, words)
        if one.condition:
            loads = f"EACH_LANE({count}) {words}[l_] = 0; if ({one.condition}) {{ {loads} }}"
        self._words[one.name, one.stored] = words
        value = f"ITEM_{one.stored.upper()}({words}, l_)"
        return [f"uint {words}[{count}]; {loads}", self._named(one.type, one.name, value)]

    def _store(self, one: Store) -> list[str]:
        # Storing rounds, too.
        one = replace(one, value=self._rounded.get((one.value, one.stored), one.value))
        if one.buffer in self._packed:
            words = self._words.get((one.value, one.stored))
            word = self._word(one) if words is None else f"{words}[l_]"
            return [f"EACH_LANE({one.type.lanes // 2}) {one.buffer}[{one.index} / 2 + l_] = {word};"]
        value, lanes = self._item(one.value), one.type.lanes
        accesses = _accesses(one)
        if not accesses:
            return [f"{_each(one.type)}{_stored(one, _moved(one.index, int(lanes > 1)), value)}"]
        words = f"{one.value}_words_{one.buffer}"
        count = sum(width for _, width, _ in accesses)
        stores = _calls("STORE", one, words)
        return [f"uint {words}[{count}]; EACH_LANE({count}) {words}[l_] = {self._word(one)}; {stores}"]

    def _word(self, one: Store) -> str:
        """Word number `l_` of the values that are stored."""
        size = _size(one.stored)

        def item(number: str) -> str:
            return f"{one.value}[{number}]" if one.value in self._arrays else one.value

        if size == 8:
            bits = f"DOUBLE_BITS({item('l_ / 2')})" if one.stored == "float64" else f"(ulong){item('l_ / 2')}"
            return f"(uint)({bits} >> 32 * (l_ % 2))"
        if size == 4:
            return f"FLOAT_BITS({item('l_')})" if one.stored == "float32" else f"(uint){item('l_')}"
        count = _WORD // size
        items = ", ".join(item(f"{count} * l_ + {k}") for k in range(count))
        packed = {"bfloat16": "BFLOAT16_PAIR", "float16": "FLOAT16_PAIR"}
        return f"{packed.get(one.stored, 'TWO_SHORTS' if size == 2 else 'FOUR_BYTES')}({items})"

    def _fold(self, one: Fold) -> list[str]:
        scalar, lanes, name = Type(one.type.dtype), one.type.lanes, one.variable
        lines = []
        while lanes > 1:
            lanes //= 2
            text = combine(one.operation, scalar, f"{name}[l_]", f"{name}[l_ + {lanes}]", self._patterns)
            lines.append(f"EACH_LANE({lanes}) {name}[l_] = {text};")
        lines.append(f"{c_type(scalar)} {one.name} = {name}{'[0]' if one.type.lanes > 1 else ''};")
        if one.threads > 1:
            text = combine(one.operation, scalar, one.name, "other_", self._patterns)
            lines.append(f"FOLD_THREADS({c_type(scalar)}, {one.name}, {text}, {one.array}, {one.threads})")
        return lines

    def _across(self, one: Across) -> list[str]:
        each, target = _each(one.type), self._item(one.target)
        mine = f"{one.array}[THREAD{f' + l_ * {one.threads}' if one.type.lanes > 1 else ''}]"
        other = mine.replace("THREAD", f"THREAD + half_ * {one.stride}")
        text = combine(one.operation, Type(one.type.dtype), target, other, self._patterns)
        half = one.threads // one.stride // 2
        return [
            f"{each}{mine} = {target};",
            f"for (int half_ = {half}; half_ > 0; half_ /= 2) {{",
            "    BARRIER;",
            f"    if (THREAD < half_ * {one.stride}) {{ {each}{mine} = {target} = {text}; }}",
            "}",
        ]


def _each(kind: Type) -> str:
    return f"EACH_LANE({kind.lanes}) " if kind.lanes > 1 else ""


def _moved(index: str, step: int) -> str:
    """An index, or its value in lane `l_`."""
    return index if not step else f"{index} + l_" if step == 1 else f"{index} + l_ * {step}"


def _size(stored: str) -> int:
    return 2 if stored == "bfloat16" else int(np.dtype(stored).itemsize)


def _accesses(one: Load | Store) -> list[tuple[int, int, int]]:
    """The accesses that read or write all lanes: the first word of each, how many, and the first item.

    There are none where items lie apart, or not so that words would hold them.
    """
    size, lanes = _size(one.stored), one.type.lanes
    together = isinstance(one, Store) or one.step == 1
    if lanes == 1 or not together or not one.buffer.startswith(("in", "out")) or one.aligned * size < _WORD:
        return []
    width = min(one.aligned * size, _ACCESS) // _WORD
    return [(at, width, at * _WORD // size) for at in range(0, lanes * size // _WORD, width)]


def _calls(word: str, one: Load | Store, words: str) -> str:
    """The text of all accesses."""
    return " ".join(
        f"{word}_{width}({words}, {at}, {one.buffer} + {one.index} + {item})"
        for at, width, item in _accesses(one)
    )


def _loaded(one: Load, index: str) -> str:
    if one.stored == "float16":
        return f"vload_half({index}, {one.buffer})"
    value = f"{one.buffer}[{index}]"
    return f"FROM_BFLOAT16({value})" if one.stored == "bfloat16" else value


def _stored(one: Store, index: str, value: str) -> str:
    if one.stored == "float16":
        return f"vstore_half({value}, {index}, {one.buffer});"
    return f"{one.buffer}[{index}] = {f'TO_BFLOAT16({value})' if one.stored == 'bfloat16' else value};"


def _random(one: Random) -> str:
    index = f"({_moved(one.index, one.step)})" if one.type.lanes > 1 else one.index
    block = f"((((ulong){one.state[3]} << 32) | {one.state[2]}) + (ulong)({index} / 4))"
    return f"philox({one.state[0]}, {one.state[1]}, (uint){block}, (uint)({block} >> 32), {index} % 4)"
