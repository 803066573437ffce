"""The loop form in WGSL.

A value with lanes is as many names, and whatever is done to it stands there once for each lane. Loops over
the turns of a thread are laid out, so that what it keeps between them is in registers: every index is a
constant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from penstock.kernels.loops import (
    Across,
    Array,
    Barrier,
    Choose,
    Clip,
    Count,
    Fold,
    Forget,
    Let,
    Load,
    Loop,
    LoopForm,
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
from penstock.kernels.source import KernelSource
from penstock.kernels.wgsl_expressions import (
    SUFFIXES,
    converted,
    number,
    wgsl_combine,
    wgsl_expression,
    wgsl_neutral,
    wgsl_type,
)
from penstock.kernels.wgsl_memory import (
    WORD,
    Words,
    from_shared,
    item_size,
    packed,
    part,
    scalar_dtypes,
    shared_type,
    to_shared,
)

_HALVES = ("bfloat16", "float16")
_AT_ONCE = 8  # values that one thread adds up between two barriers
_MOST_LINES = 3000  # of a loop that is laid out; compilers take long for more


def render_wgsl(form: LoopForm, name: str) -> KernelSource:
    """The text of a kernel."""
    buffers = [f"out{k}" for k in range(len(form.outputs))] + [f"in{k}" for k in range(len(form.inputs))]
    scalars = [(dtype, f"c{k}") for k, dtype in enumerate(form.scalars)]
    words = Words(writes_parts(form.body))
    thread = Thread(words, form.arrays)
    body = thread.statements(form.body)
    lines = [*thread.declared(), words.opening(name, buffers, scalars).rstrip(), *body, "}"]
    return KernelSource(
        name,
        "\n".join(lines) + "\n",
        (*form.outputs, *form.inputs),
        scalar_dtypes(form.scalars),
        form.grid,
        form.group,
    )


def writes_parts(body: Sequence[Statement]) -> bool:
    """Whether any item is written without all others of its word."""
    for one in body:
        if isinstance(one, Loop | When) and writes_parts(one.body):
            return True
        if isinstance(one, Store) and _is_buffer(one.buffer) and _in_parts(one):
            return True
    return False


class Thread:
    """Writes the statements of a thread; knows which names have lanes, and what a group's memory holds."""

    def __init__(self, words: Words, arrays: Sequence[Array] = (), wide: Sequence[str] = ()) -> None:
        """`wide`: names with lanes that are there already."""
        self._words = words
        self._lengths = {array.name: array.length for array in arrays}
        self._shared: dict[str, tuple[str, int]] = {}  # memory of the group: types and lengths
        self._folds = 0
        self._wide = set(wide)  # names with lanes
        self._packed: set[str] = set()  # arrays of halves, two in a word
        self._constants: set[str] = set()  # whole numbers that are known

    def declared(self) -> list[str]:
        """The lines that name the memory of the group, before the kernel."""
        return [
            f"var<workgroup> {name}: array<{kind}, {length}>;"
            for name, (kind, length) in self._shared.items()
        ]

    def statements(self, body: Sequence[Statement]) -> list[str]:
        """The lines of statements, set in by a step."""
        return ["    " + line for one in body for line in self._lines(one)]

    def _lines(self, one: Statement) -> list[str]:
        match one:
            case Count():
                return [self._count(one)]
            case Truth():
                return [f"let {one.name} = {_words(one.text)};"]
            case Pick():
                yes, no, condition = (_words(text) for text in (one.yes, one.no, one.condition))
                return [f"let {one.name} = select({no}, {yes}, {condition});"]
            case Clip():
                return [f"let {one.name} = {_clipped(one)};"]
            case Let():
                return self._named(one.name, one.type, lambda lane: self._expression(one, lane))
            case Splat():
                return self._named(
                    one.name,
                    one.type,
                    lambda lane: converted(one.type.dtype, _moved(one.value, one.step, lane)),
                )
            case Choose():
                return self._named(
                    one.name,
                    one.type,
                    lambda lane: (
                        f"select({self.lane(one.no, lane)}, {self.lane(one.yes, lane)}, {one.condition})"
                    ),
                )
            case Random():
                state = ", ".join(one.state)
                return self._named(
                    one.name, one.type, lambda lane: f"philox({state}, {_moved(one.index, one.step, lane)})"
                )
            case Load():
                return self._load(one)
            case Store():
                return self._store(one)
            case Registers():
                return [self._registers(one)]
            case Forget():
                return []
            case Variable():
                start = wgsl_neutral(one.operation, one.type.dtype)
                return self._named(one.name, one.type, lambda lane: start, "var")
            case Update():
                return self._update(one)
            case Fold():
                return self._fold(one)
            case Across():
                return self._across(one)
            case Loop():
                return self._loop(one)
            case When():
                return [f"if ({_words(one.condition)}) {{", *self.statements(one.body), "}"]
            case Barrier():
                return ["storageBarrier();" if one.device_memory else "workgroupBarrier();"]

    # Names

    def lane(self, name: str, lane: int) -> str:
        """A value's name in a lane."""
        return f"{name}_{lane}" if name in self._wide else name

    def _named(self, name: str, kind: Type, text: Callable[[int], str], word: str = "let") -> list[str]:
        """Names for the values of all lanes."""
        if kind.lanes == 1:
            return [f"{word} {name} = {text(0)};"]
        lines = [f"{word} {name}_{lane} = {text(lane)};" for lane in range(kind.lanes)]
        self._wide.add(name)
        return lines

    def _count(self, one: Count) -> str:
        text = _words(one.text)
        if self._constants.issuperset(re.findall(r"[A-Za-z_]\w*", text)):
            self._constants.add(one.name)
            return f"const {one.name} = {text};"
        self._constants.discard(one.name)
        return f"let {one.name} = {text};"

    def _expression(self, one: Let, lane: int) -> str:
        inputs = tuple(self.lane(name, lane) for name in one.inputs)
        text = wgsl_expression(one.operation, one.type.dtype, one.of.dtype, inputs)
        assert text is not None, one
        return text

    def _update(self, one: Update) -> list[str]:
        lines = []
        for lane in range(one.type.lanes):
            target, value = self.lane(one.target, lane), self.lane(one.value, lane)
            lines.append(f"{target} = {wgsl_combine(one.operation, one.type.dtype, target, value)};")
        return lines

    # Memory

    def _registers(self, one: Registers) -> str:
        if one.dtype not in _HALVES:
            return f"var {one.name}: array<{wgsl_type(one.dtype)}, {one.length}>;"
        self._packed.add(one.name)
        return f"var {one.name}: array<u32, {one.length // 2}>;"

    def _load(self, one: Load) -> list[str]:
        kind = one.type
        if one.buffer in self._packed:
            return self._named(
                one.name,
                kind,
                lambda lane: part(one.stored, f"{one.buffer}[{one.index} / 2 + {lane // 2}]", lane % 2),
            )
        if not _is_buffer(one.buffer):
            return self._named(
                one.name, kind, lambda lane: f"{one.buffer}[{_moved(one.index, one.step, lane)}]"
            )
        if item_size(one.stored) < WORD and _in_words(one):
            return self._load_words(one)
        texts = [
            self._words.item(one.buffer, one.stored, _moved(one.index, one.step, lane))
            for lane in range(kind.lanes)
        ]
        if not one.condition:
            return self._named(one.name, kind, texts.__getitem__)
        lines = self._named(one.name, kind, lambda lane: number(kind.dtype, 0), "var")
        lines.append(f"if ({one.condition}) {{")
        lines += [f"    {self.lane(one.name, lane)} = {text};" for lane, text in enumerate(texts)]
        return [*lines, "}"]

    def _load_words(self, one: Load) -> list[str]:
        """Lanes that lie side by side in whole words."""
        each = WORD // item_size(one.stored)
        places = [f"({one.index} / {each} + {at})" for at in range(one.type.lanes // each)]
        words = [self._words.word(one.buffer, place) for place in places]
        names = [f"{one.name}_word{at}" for at in range(len(words))]
        if one.condition:
            lines = [f"var {name} = 0u;" for name in names]
            taken = " ".join(f"{name} = {word};" for name, word in zip(names, words, strict=True))
            lines.append(f"if ({one.condition}) {{ {taken} }}")
        else:
            lines = [f"let {name} = {word};" for name, word in zip(names, words, strict=True)]
        return lines + self._named(
            one.name, one.type, lambda lane: part(one.stored, names[lane // each], lane % each)
        )

    def _store(self, one: Store) -> list[str]:
        lanes = range(one.type.lanes)
        values = [self.lane(one.value, lane) for lane in lanes]
        if one.buffer in self._packed:
            return [
                f"{one.buffer}[{one.index} / 2 + {at}] = {packed(one.stored, values[2 * at : 2 * at + 2])};"
                for at in range(len(values) // 2)
            ]
        if not _is_buffer(one.buffer):
            return [f"{one.buffer}[{_moved(one.index, 1, lane)}] = {values[lane]};" for lane in lanes]
        each = WORD // item_size(one.stored)
        if each > 1 and _in_words(one):
            return [
                self._words.put_word(
                    one.buffer,
                    f"({one.index} / {each} + {first // each})",
                    packed(one.stored, values[first:][:each]),
                )
                for first in lanes[::each]
            ]
        return [
            self._words.put(one.buffer, one.stored, _moved(one.index, 1, lane), values[lane])
            for lane in lanes
        ]

    # What threads do together

    def _fold(self, one: Fold) -> list[str]:
        dtype, lanes = one.type.dtype, one.type.lanes
        lines = []
        while lanes > 1:
            lanes //= 2
            for lane in range(lanes):
                target, other = (self.lane(one.variable, at) for at in (lane, lane + lanes))
                lines.append(f"{target} = {wgsl_combine(one.operation, dtype, target, other)};")
        lines.append(f"var {one.name} = {self.lane(one.variable, 0)};")
        if one.threads > 1:
            assert one.array is not None
            # Two arrays take turns: when one is written again, all have read it before the barriers between.
            array = f"fold_{shared_type(dtype)}_{self._folds % 2}"
            self._folds += 1
            self._share(array, dtype, self._lengths[one.array])
            lines += self._tree(
                one.operation, dtype, [one.name], [f"{array}[%s]"], 1, one.threads, f" % {one.threads}"
            )
            first = f"{array}[THREAD / {one.threads} * {one.threads}]"
            lines += ["workgroupBarrier();", f"{one.name} = {from_shared(dtype, first)};"]
        return lines

    def _across(self, one: Across) -> list[str]:
        lanes = range(one.type.lanes)
        self._share(one.array, one.type.dtype, self._lengths[one.array])
        names = [self.lane(one.target, lane) for lane in lanes]
        places = [f"{one.array}[%s{f' + {lane * one.threads}' if lane else ''}]" for lane in lanes]
        return self._tree(
            one.operation, one.type.dtype, names, places, one.stride, one.threads // one.stride, ""
        )

    def _tree(
        self,
        operation: str,
        dtype: str,
        names: Sequence[str],
        places: Sequence[str],
        stride: int,
        count: int,
        rank: str,
    ) -> list[str]:
        """Combine values of `count` threads, `stride` apart, into those of the first, which `rank` tells."""
        both = list(zip(names, places, strict=True))
        lines = [f"{place % 'THREAD'} = {to_shared(dtype, name)};" for name, place in both]
        while count > 1:
            parts = min(_AT_ONCE, count)
            count //= parts
            lines += ["workgroupBarrier();", f"if (THREAD{rank} < {count * stride}) {{"]
            for name, place in both:
                for other in range(1, parts):
                    value = from_shared(dtype, place % f"THREAD + {other * count * stride}")
                    lines.append(f"    {name} = {wgsl_combine(operation, dtype, name, value)};")
                lines.append(f"    {place % 'THREAD'} = {to_shared(dtype, name)};")
            lines.append("}")
        return lines

    def _share(self, name: str, dtype: str, length: int) -> None:
        _, known = self._shared.get(name, ("", 0))
        self._shared[name] = shared_type(dtype), max(known, length)

    # Loops

    def _loop(self, one: Loop) -> list[str]:
        known = set(self._constants)
        if one.unrolled and one.start == "0" and one.stop == str(one.unrolled):
            self._constants = known | {one.name}
            turns = [self.statements(one.body) for _ in range(one.unrolled)]
            self._constants = known
            if sum(map(len, turns)) <= _MOST_LINES:
                numbered = [["{", f"    const {one.name} = {k};", *body, "}"] for k, body in enumerate(turns)]
                return [line for lines in numbered for line in lines]
        self._constants = known - {one.name}
        start, stop, step = (_words(text) for text in (one.start, one.stop, one.step))
        opening = f"for (var {one.name} = {start}; {one.name} < {stop}; {one.name} += {step}) {{"
        lines = [opening, *self.statements(one.body), "}"]
        self._constants = known
        return lines


def _words(text: str) -> str:
    """A text of whole numbers, in which two words are C's."""
    return re.sub(r"\(uint\)(\w+)", r"u32(\1)", re.sub(r"GROUP\((\d)\)", r"GROUP_\1", text))


def _moved(index: str, step: int, lane: int) -> str:
    """An index in a lane."""
    return f"{index} + {lane * step}" if lane * step else index


def _is_buffer(name: str) -> bool:
    return name.startswith(("in", "out"))


def _in_words(one: Load | Store) -> bool:
    """Whether all lanes together fill whole words."""
    together = isinstance(one, Store) or one.step == 1
    return together and one.type.lanes > 1 and one.aligned * item_size(one.stored) >= WORD


def _in_parts(one: Store) -> bool:
    return item_size(one.stored) < WORD and not _in_words(one)


def _clipped(one: Clip) -> str:
    kind, last = wgsl_type(one.dtype), one.length - 1
    if kind[0] == "u":
        return f"select(i32({one.value}), {last}, {one.value} > {last}{SUFFIXES[kind]})"
    # Compared without a sign: Mesa's software Vulkan takes `i64(x) > 15li` for true, whatever the i32 `x` is.
    wide = {"i32": "u32", "i64": "u64"}[kind]
    outside = f"bitcast<{wide}>({one.value}) > {last}{SUFFIXES[wide]}"
    return f"select(i32({one.value}), select({last}, 0, {one.value} < {number(one.dtype, 0)}), {outside})"
