"""Statements in WGSL.

A value with a width is as many names, and whatever is done to it stands there once for each lane. Loops over
the turns of a thread are laid out, so that what it keeps between them is in registers: every index is a
constant.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from penstock.kernels import ir
from penstock.kernels.dialects.printer import Printer
from penstock.kernels.dialects.wgsl_expressions import (
    SUFFIXES,
    cast,
    converted,
    number,
    wgsl_combine,
    wgsl_expression,
    wgsl_neutral,
    wgsl_type,
)
from penstock.kernels.dialects.wgsl_memory import (
    WORD,
    Words,
    from_shared,
    item_size,
    packed,
    part,
    shared_type,
    to_shared,
)

_HALVES = ("bfloat16", "float16")
_AT_ONCE = 8  # values that one thread adds up between two barriers
_UNROLLED = 4  # iterations of a loop in one step; Mesa's software Vulkan ends a loop after so many steps
_MOST_LINES = 3000  # of a loop that is laid out; compilers take long for more


def writes_parts(body: Sequence[ir.Statement]) -> bool:
    """Whether any item is written without all others of its word."""
    for statement in body:
        if isinstance(statement, ir.For | ir.While | ir.If) and writes_parts(statement.body):
            return True
        if isinstance(statement, ir.If) and writes_parts(statement.otherwise):
            return True
        if isinstance(statement, ir.Store) and ir.is_buffer(statement.buffer) and _in_parts(statement):
            return True
    return False


class WgslPrinter(Printer):
    """Prints the statements of a thread; knows what a group's memory holds, and which names are constants."""

    def __init__(self, words: Words, arrays: Sequence[ir.LocalArray] = ()) -> None:
        self._words = words
        self._lengths = {array.name: array.length for array in arrays}
        self._arrays = {array.name: array for array in arrays}
        self._shared: dict[str, tuple[str, int]] = {}  # memory of the group: types and lengths
        self._reductions = 0
        self._packed: set[str] = set()  # arrays of float16 or bfloat16, two in a word
        self._constants: set[str] = set()  # integers that are known

    def declared(self) -> list[str]:
        """The lines that name the memory of the group, before the kernel."""
        return [
            f"var<workgroup> {name}: array<{kind}, {length}>;"
            for name, (kind, length) in self._shared.items()
        ]

    # Expressions

    def workgroup(self, axis: int) -> str:
        return f"GROUP_{axis}"

    def constant(self, value: float, type: ir.Type) -> str:
        kind = wgsl_type(type.dtype)
        if kind == "f32":
            if math.isfinite(value):
                return repr(float(value))
            return f"bits_float({struct.unpack('I', struct.pack('f', value))[0]:#x}u)"
        if kind == "bool":
            return "true" if value else "false"
        return str(int(value)) if type == ir.INT else f"{int(value)}{SUFFIXES[kind]}"

    def name(self, var: ir.Var, lane: int) -> str:
        return f"{var.name}_{lane}" if var.type.width > 1 else var.name

    def value(self, expr: ir.Expr, lane: int) -> str:
        match expr:
            case ir.Call():
                inputs = tuple(self.operand(value, lane) for value in expr.inputs)
                text = wgsl_expression(expr.operation, expr.type.dtype, expr.of.dtype, inputs)
                assert text is not None, expr
                return text
            case ir.Select():
                no, yes = self.expr(expr.no, lane), self.expr(expr.yes, lane)
                return f"select({no}, {yes}, {self.expr(expr.condition)})"
            case ir.Cast():
                return self._cast(expr, lane)
            case ir.Bitcast():
                return f"bitcast<{wgsl_type(expr.type.dtype)}>({self.expr(expr.value, lane)})"
            case ir.Clamp():
                return self._clamped(expr)
            case ir.Combine():
                left, right = self.operand(expr.left, lane), self.operand(expr.right, lane)
                return wgsl_combine(expr.reduction, expr.type.dtype, left, right)
            case ir.Identity():
                return wgsl_neutral(expr.reduction, expr.type.dtype)
            case ir.Broadcast() if expr.value.type.dtype == expr.type.dtype != "int32":
                return self.expr(expr.value, lane)
            case ir.Broadcast():
                return converted(expr.type.dtype, _moved(self.addend(expr.value), expr.step, lane))
            case ir.Vector():
                return self.expr(expr.items[lane])
            case ir.Lane():
                return self.name(expr.variable, expr.number)
            case ir.Random():
                state = ", ".join(self.expr(word) for word in expr.state)
                return f"philox({state}, {_moved(self.addend(expr.index), expr.step, lane)})"
            case ir.Load():
                return self._item(expr, lane)
            case ir.LoadIndex():
                length = self.expr(expr.length)
                return self._words.index(expr.buffer, expr.stored, self.expr(expr.index), length)
            case _:
                raise AssertionError(f"{expr} has no text in WGSL")

    def _cast(self, expr: ir.Cast, lane: int) -> str:
        target, source = (wgsl_type(type.dtype) for type in (expr.type, expr.value.type))
        value = self.expr(expr.value, lane)
        if {target, source} <= {"i32", "u32", "f32"}:
            return f"{target}({value})"
        text = cast(expr.type.dtype, expr.value.type.dtype, self.operand(expr.value, lane))
        return f"{target}({value})" if text is None else text

    def _clamped(self, expr: ir.Clamp) -> str:
        value, dtype, last = self.operand(expr.value), expr.value.type.dtype, self.expr(expr.last)
        kind = wgsl_type(dtype)
        if kind[0] == "u":
            return f"select(i32({value}), {last}, {value} > {self._typed(expr.last, kind)})"
        # Compared without a sign: Mesa's software Vulkan takes `i64(x) > 15li` for true, whatever `x` is.
        wide = {"i32": "u32", "i64": "u64"}[kind]
        outside = f"bitcast<{wide}>({value}) > {self._typed(expr.last, wide)}"
        return f"select(i32({value}), select({last}, 0, {value} < {number(dtype, 0)}), {outside})"

    def _typed(self, expr: ir.Expr, kind: str) -> str:
        """An integer as one of a type of WGSL."""
        text = self.expr(expr)
        return f"{text}{SUFFIXES[kind]}" if isinstance(expr, ir.Const) else f"{kind}({text})"

    def _item(self, load: ir.Load, lane: int) -> str:
        """One item of memory."""
        if load.buffer in self._packed:
            index = self.operand(load.index)
            return part(load.stored, f"{load.buffer}[{index} / 2 + {lane // 2}]", lane % 2)
        place = _moved(self.addend(load.index), load.step, lane)
        if ir.is_buffer(load.buffer):
            return self._words.item(load.buffer, load.stored, place)
        text = f"{load.buffer}[{place}]"
        array = self._share_array(load.buffer)
        if array is None:
            return text
        return f"atomicLoad(&{text})" if array.atomic else from_shared(load.stored, text)

    # Statements

    def lines(self, statement: ir.Statement) -> list[str]:
        match statement:
            case ir.Let():
                return self._let(statement)
            case ir.Declare():
                return self._named(statement, "var")
            case ir.Assign():
                target = ir.Var(statement.name, statement.value.type)
                lanes = range(target.type.width)
                return [f"{self.expr(target, at)} = {self.expr(statement.value, at)};" for at in lanes]
            case ir.Store():
                return self._store(statement)
            case ir.RegisterArray():
                return [self._registers(statement)]
            case ir.Forget():
                return []
            case ir.Accumulate():
                return self._accumulate(statement)
            case ir.MultiplyAdd():
                target, left, right = statement.target, statement.left, statement.right
                return [
                    f"{self.expr(target, at)} += {self.operand(left, at)} * {self.operand(right, at)};"
                    for at in range(target.type.width)
                ]
            case ir.BlockReduce():
                return self._block_reduce(statement)
            case ir.StridedReduce():
                return self._strided_reduce(statement)
            case ir.UniformLoad():
                self._share_array(statement.array)
                item = f"{statement.array}[{self.expr(statement.index)}]"
                return [f"let {statement.name} = workgroupUniformLoad(&{item});"]
            case ir.Pointer() | ir.CallFunction():
                raise AssertionError("WGSL has no pointers into buffers")
            case ir.AtomicAdd():
                return [self._atomic(statement)]
            case ir.For():
                return self._for(statement)
            case ir.While() | ir.If():
                return self.conditional(statement)
            case ir.Barrier():
                return ["storageBarrier();" if statement.device_memory else "workgroupBarrier();"]

    def _named(self, statement: ir.Let | ir.Declare, word: str = "let") -> list[str]:
        """Names for the values of all lanes."""
        width, value = statement.type.width, statement.value
        if width == 1:
            return [f"{word} {statement.name} = {self.named(value)};"]
        return [f"{word} {statement.name}_{lane} = {self.expr(value, lane)};" for lane in range(width)]

    def _let(self, statement: ir.Let) -> list[str]:
        value = statement.value
        if isinstance(value, ir.Load) and ir.is_buffer(value.buffer):
            return self._load(statement.name, value)
        if isinstance(value, ir.Load) and (array := self._vectors(value.buffer)):
            item = f"{array.name}[{self._vector_index(value.index, array.width)}]"
            lanes = _lane_names(statement.name, value.type, lambda lane: f"{statement.name}_all[{lane}]")
            return [f"let {statement.name}_all = {item};", *lanes]
        if statement.type == ir.INT:
            if self._is_known(value):
                self._constants.add(statement.name)
                return [f"const {statement.name} = {self.expr(value)};"]
            self._constants.discard(statement.name)
        return self._named(statement)

    def _is_known(self, expr: ir.Expr) -> bool:
        """Whether an integer is made of constants."""
        match expr:
            case ir.Const():
                return True
            case ir.Var():
                return expr.name in self._constants
            case ir.Binary():
                return self._is_known(expr.left) and self._is_known(expr.right)
            case ir.Unary():
                return self._is_known(expr.operand)
            case ir.Affine():
                parts = [*(part for term in expr.terms for part in term), expr.constant]
                return all(part is None or self._is_known(part) for part in parts)
            case _:
                return False

    def _accumulate(self, statement: ir.Accumulate) -> list[str]:
        lines = []
        for lane in range(statement.type.width):
            target, value = self.expr(statement.target, lane), self.expr(statement.value, lane)
            text = wgsl_combine(statement.operation, statement.type.dtype, target, value)
            lines.append(f"{target} = {text};")
        return lines

    # Memory

    def _registers(self, array: ir.RegisterArray) -> str:
        if array.dtype not in _HALVES:
            return f"var {array.name}: array<{wgsl_type(array.dtype)}, {array.length}>;"
        self._packed.add(array.name)
        return f"var {array.name}: array<u32, {array.length // 2}>;"

    def _load(self, name: str, load: ir.Load) -> list[str]:
        """Items of a buffer."""
        if item_size(load.stored) < WORD and _in_words(load):
            return self._load_words(name, load)
        let = ir.Let(name, load)
        if load.mask is None:
            return self._named(let)
        lanes = range(load.type.width)
        zeros = [number(load.type.dtype, 0)] * len(lanes)
        lines = _lane_names(name, load.type, zeros.__getitem__, "var")
        lines.append(f"if ({self.expr(load.mask)}) {{")
        lines += [
            f"    {self.name(ir.Var(name, load.type), lane)} = {self._item(load, lane)};" for lane in lanes
        ]
        return [*lines, "}"]

    def _load_words(self, name: str, load: ir.Load) -> list[str]:
        """Lanes that lie side by side in whole words."""
        each, index = WORD // item_size(load.stored), self.operand(load.index)
        places = [f"({index} / {each} + {at})" for at in range(load.type.width // each)]
        words = [self._words.word(load.buffer, place) for place in places]
        names = [f"{name}_word{at}" for at in range(len(words))]
        if load.mask is not None:
            lines = [f"var {word} = 0u;" for word in names]
            taken = " ".join(f"{word} = {text};" for word, text in zip(names, words, strict=True))
            lines.append(f"if ({self.expr(load.mask)}) {{ {taken} }}")
        else:
            lines = [f"let {word} = {text};" for word, text in zip(names, words, strict=True)]
        return lines + _lane_names(
            name, load.type, lambda lane: part(load.stored, names[lane // each], lane % each)
        )

    def _store(self, store: ir.Store) -> list[str]:
        lanes, index = range(store.type.width), self.addend(store.index)
        values = [self.expr(store.value, lane) for lane in lanes]
        if store.buffer in self._packed:
            pairs = [packed(store.stored, values[at : at + 2]) for at in lanes[::2]]
            first = f"{store.buffer}[{self.operand(store.index)} / 2"
            return [f"{first} + {at}] = {pair};" for at, pair in enumerate(pairs)]
        if array := self._vectors(store.buffer):
            place = self._vector_index(store.index, array.width)
            return [f"{store.buffer}[{place}] = {_vector_type(array)}({', '.join(values)});"]
        if not ir.is_buffer(store.buffer):
            return [self._store_in_array(store, _moved(index, 1, lane), values[lane]) for lane in lanes]
        each = WORD // item_size(store.stored)
        if each > 1 and _in_words(store):
            return [
                self._words.put_word(
                    store.buffer,
                    f"({self.operand(store.index)} / {each} + {first // each})",
                    packed(store.stored, values[first:][:each]),
                )
                for first in lanes[::each]
            ]
        if store.stored == "int64" and store.value.type == ir.INT:  # which needs no integers of 64 bits
            return [self._words.put_wide(store.buffer, index, values[0])]
        return [
            self._words.put(store.buffer, store.stored, _moved(index, 1, lane), values[lane])
            for lane in lanes
        ]

    def _store_in_array(self, store: ir.Store, index: str, value: str) -> str:
        target, array = f"{store.buffer}[{index}]", self._share_array(store.buffer)
        if array is None:
            return f"{target} = {value};"
        if array.atomic:
            return f"atomicStore(&{target}, {value});"
        return f"{target} = {to_shared(store.stored, value)};"

    def _atomic(self, statement: ir.AtomicAdd) -> str:
        self._share_array(statement.array)
        text = f"atomicAdd(&{statement.array}[{self.expr(statement.index)}], {self.expr(statement.value)});"
        return f"let {statement.name} = {text}" if statement.name else text

    # What threads do together

    def _block_reduce(self, statement: ir.BlockReduce) -> list[str]:
        variable, operation, name = statement.variable, statement.operation, statement.name
        dtype, width, threads = variable.type.dtype, variable.type.width, _number(statement.threads)
        lines = []
        while width > 1:
            width //= 2
            for lane in range(width):
                target, other = (self.expr(variable, at) for at in (lane, lane + width))
                lines.append(f"{target} = {wgsl_combine(operation, dtype, target, other)};")
        lines.append(f"var {name} = {self.expr(variable)};")
        if threads > 1:
            assert statement.array is not None
            # Two arrays take turns: when one is written again, all have read it before the barriers between.
            array = f"fold_{shared_type(dtype)}_{self._reductions % 2}"
            self._reductions += 1
            self._share(array, dtype, self._lengths[statement.array])
            lines += self._tree(operation, dtype, [name], [f"{array}[%s]"], 1, threads, f" % {threads}")
            first = f"{array}[THREAD / {threads} * {threads}]"
            lines += ["workgroupBarrier();", f"{name} = {from_shared(dtype, first)};"]
        return lines

    def _strided_reduce(self, statement: ir.StridedReduce) -> list[str]:
        target, array = statement.target, statement.array
        threads, stride = _number(statement.threads), _number(statement.stride)
        lanes, dtype = range(target.type.width), target.type.dtype
        self._share(array, dtype, self._lengths[array])
        names = [self.expr(target, lane) for lane in lanes]
        places = [f"{array}[%s{f' + {lane * threads}' if lane else ''}]" for lane in lanes]
        return self._tree(statement.operation, dtype, names, places, stride, threads // stride, "")

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

    def _share_array(self, name: str) -> ir.LocalArray | None:
        """Memory of the group by its name; None for an array of the thread."""
        array = self._arrays.get(name)
        if array is not None:
            self._share(array.name, array.dtype, array.length, array.atomic)
        return array

    def _vectors(self, name: str) -> ir.LocalArray | None:
        """Memory of the group by its name if it is vectors."""
        array = self._arrays.get(name)
        if array is None or array.width == 1:
            return None
        self._shared[name] = _vector_type(array), array.length // array.width
        return array

    def _vector_index(self, index: ir.Expr, width: int) -> str:
        """The number of the vector that an item begins."""
        if isinstance(index, ir.Binary) and (index.operator, index.right) == ("*", ir.Const(width)):
            return self.expr(index.left)
        return f"{self.operand(index)} / {width}"

    def _share(self, name: str, dtype: str, length: int, atomic: bool = False) -> None:
        _, known = self._shared.get(name, ("", 0))
        kind = f"atomic<{shared_type(dtype)}>" if atomic else shared_type(dtype)
        self._shared[name] = kind, max(known, length)

    # Loops

    def _for(self, loop: ir.For) -> list[str]:
        known = set(self._constants)
        if loop.unrolled and loop.start == ir.Const(0) and loop.stop == ir.Const(loop.unrolled):
            self._constants = known | {loop.name}
            turns = [self.statements(loop.body) for _ in range(loop.unrolled)]
            self._constants = known
            if sum(map(len, turns)) <= _MOST_LINES:
                numbered = [
                    ["{", f"    const {loop.name} = {k};", *body, "}"] for k, body in enumerate(turns)
                ]
                return [line for lines in numbered for line in lines]
        self._constants = known - {loop.name}
        start, stop, step = (self.expr(bound) for bound in (loop.start, loop.stop, loop.step))
        body = self.statements(loop.body)
        self._constants = known
        count = min(loop.unrolled, _UNROLLED)
        if count > 1:
            first, step = f"{loop.name}_first", self.operand(loop.step)
            laid_out = _laid_out(loop, first, stop, step, count, body)
            return [_opening(first, start, stop, f"{count} * {step}"), *laid_out, "}"]
        return [_opening(loop.name, start, stop, step), *body, "}"]


def _opening(name: str, start: str, stop: str, step: str) -> str:
    return f"for (var {name} = {start}; {name} < {stop}; {name} += {step}) {{"


def _laid_out(loop: ir.For, first: str, stop: str, step: str, count: int, body: list[str]) -> list[str]:
    """The body of a loop so many times, as far as the loop goes."""
    match loop:
        case ir.For(start=ir.Const(begin), stop=ir.Const(end), step=ir.Const(by)):
            whole = (end - begin) % (by * count) == 0
        case _:
            whole = False
    lines: list[str] = []
    for turn in range(count):
        lines.append(f"{{ let {loop.name} = {first}{f' + {turn} * {step}' if turn else ''};")
        lines += body if whole or turn == 0 else [f"if ({loop.name} < {stop}) {{", *body, "}"]
        lines.append("}")
    return lines


def _vector_type(array: ir.LocalArray) -> str:
    return f"vec{array.width}<{shared_type(array.dtype)}>"


def _number(expr: ir.Expr) -> int:
    """A number that the text depends on."""
    assert isinstance(expr, ir.Const)
    return int(expr.value)


def _lane_names(name: str, kind: ir.Type, text: Callable[[int], str], word: str = "let") -> list[str]:
    """Names for texts of all lanes."""
    if kind.width == 1:
        return [f"{word} {name} = {text(0)};"]
    return [f"{word} {name}_{lane} = {text(lane)};" for lane in range(kind.width)]


def _moved(index: str, step: int, lane: int) -> str:
    """An index in a lane."""
    return f"{index} + {lane * step}" if lane * step else index


def _in_words(access: ir.Load | ir.Store) -> bool:
    """Whether all lanes together fill whole words."""
    together = isinstance(access, ir.Store) or access.step == 1
    return together and access.type.width > 1 and access.aligned * item_size(access.stored) >= WORD


def _in_parts(store: ir.Store) -> bool:
    return item_size(store.stored) < WORD and not _in_words(store)
