"""Statements in WGSL.

A wide value is a name per lane, and an operation on it is a statement per lane. Loops over the steps of a
thread are unrolled, so that every index of its arrays is a constant, and they are in registers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.kernels import ir
from penstock.kernels.dialects import wgsl_expressions as wgsl
from penstock.kernels.dialects.dialect import UNROLLED
from penstock.kernels.dialects.printer import Printer, Text, fills_words
from penstock.kernels.dialects.wgsl_memory import Words, from_shared, packed, part, shared_type, to_shared
from penstock.kernels.source import WORD, item_size

_AT_ONCE = 8  # values that a thread combines between two barriers
_MOST_LINES = 3000  # of an unrolled loop; compilers take long for more


def writes_parts(body: Sequence[ir.Statement]) -> bool:
    """Whether any word is written in part."""
    stores = (statement for statement in ir.walk(body) if isinstance(statement, ir.Store))
    return any(
        ir.is_buffer(store.buffer) and item_size(store.stored) < WORD and not fills_words(store)
        for store in stores
    )


class WgslPrinter(Printer):
    """Prints lanes; knows what local memory holds, and which names are constants."""

    integer, variable = "let", "var"
    barriers = ("workgroupBarrier();", "storageBarrier();")
    atomic_add = "atomicAdd(&"

    def __init__(self, words: Words, arrays: Sequence[ir.LocalArray] = ()) -> None:
        super().__init__()
        self._words = words
        self._arrays = {array.name: array for array in arrays}
        self._shared: dict[str, ir.LocalArray] = {}  # the arrays in use, and those of reductions
        self._reductions = 0
        self._constants: set[str] = set()  # integers with constant values

    def declared(self) -> list[str]:
        """The declarations of local memory, before the kernel."""
        return [
            f"var<workgroup> {array.name}: array<{_item_type(array)}, {array.length // array.width}>;"
            for array in self._shared.values()
        ]

    # Expressions

    def workgroup(self, axis: int) -> str:
        return f"GROUP_{axis}"

    def constant(self, value: float, type: ir.Type) -> str:
        kind = wgsl.type_name(type.dtype)
        if kind == "f32":
            if math.isfinite(value):
                return repr(float(value))
            return f"bits_float({struct.unpack('I', struct.pack('f', value))[0]:#x}u)"
        return str(int(value)) if type == ir.INT else wgsl.number(type.dtype, int(value))

    def name(self, var: ir.Var, lane: int | None) -> str:
        return f"{var.name}_{lane or 0}" if var.type.width > 1 else var.name

    def expression(self, operation: str, result: ir.Type, of: ir.Type, inputs: Sequence[str]) -> str | None:
        return wgsl.expression(operation, result.dtype, of.dtype, inputs)

    def combine(self, reduction: str, type: ir.Type, left: str, right: str) -> str:
        if reduction == "sum" and wgsl.type_name(type.dtype) == "f32":
            return f"({left} + {right})"  # in any order
        return super().combine(reduction, type, left, right)

    def neutral(self, reduction: str, type: ir.Type) -> str:
        return wgsl.neutral(reduction, type.dtype)

    def value(self, expr: ir.Expr, lane: int | None) -> str:
        match expr:
            case ir.Select(_, condition, yes, no):
                return f"select({self.expr(no, lane)}, {self.expr(yes, lane)}, {self.expr(condition)})"
            case ir.Cast():
                return self._cast(expr, lane)
            case ir.Clamp():
                return self._clamped(expr)
            case ir.Broadcast() if expr.value.type.dtype == expr.type.dtype != "int32":
                return self.expr(expr.value, lane)
            case ir.Broadcast(type, value, step):
                return wgsl.converted(type.dtype, _moved(self.addend(value), step, lane))
            case ir.Vector():
                return self.expr(expr.items[lane or 0])
            case ir.Random(_, state, index, step):
                return f"philox({', '.join(map(self.expr, state))}, {_moved(self.addend(index), step, lane)})"
            case ir.Load():
                return self._item(expr, lane)
            case ir.LoadIndex(buffer, stored, index, length):
                return self._words.index(buffer, stored, self.expr(index), self.expr(length))
            case ir.SameMemory(left, right):
                return f"(same_binding({left}, {right}) && {left}_place == {right}_place)"
            case _:
                raise AssertionError(f"{expr} has no text in WGSL")

    def _cast(self, expr: ir.Cast, lane: int | None) -> str:
        target, source = (wgsl.type_name(type.dtype) for type in (expr.type, expr.value.type))
        value = self.expr(expr.value, lane)
        if {target, source} <= {"i32", "u32", "f32"}:
            return f"{target}({value})"
        text = wgsl.cast(expr.type.dtype, expr.value.type.dtype, self.operand(expr.value, lane))
        return f"{target}({value})" if text is None else text

    def _clamped(self, expr: ir.Clamp) -> str:
        value, dtype, last = self.operand(expr.value), expr.value.type.dtype, self.expr(expr.last)
        kind = wgsl.type_name(dtype)
        if kind[0] == "u":
            return f"select(i32({value}), {last}, {value} > {self._typed(expr.last, kind)})"
        return f"i32(clamp({value}, {wgsl.number(dtype, 0)}, {self._typed(expr.last, kind)}))"

    def _typed(self, expr: ir.Expr, kind: str) -> str:
        """An integer converted to a type of WGSL."""
        text = self.expr(expr)
        return f"{text}{wgsl.SUFFIXES[kind]}" if isinstance(expr, ir.Const) else f"{kind}({text})"

    def _item(self, load: ir.Load, lane: int | None) -> str:
        """An item of memory."""
        if load.buffer in self.packed:
            word, half = divmod(lane or 0, 2)
            return part(load.stored, f"{load.buffer}[{self.operand(load.index)} / 2 + {word}]", half)
        index = _moved(self.addend(load.index), load.step, lane)
        if ir.is_buffer(load.buffer):
            return self._words.item(load.buffer, load.stored, index)
        item, array = self.shared_item(load.buffer, index), self._arrays.get(load.buffer)
        if array is None:
            return item
        return f"atomicLoad(&{item})" if array.atomic else from_shared(load.stored, item)

    # Statements

    def each(self, type: ir.Type, text: Text) -> list[str]:
        return [text(lane) for lane in range(type.width)]

    def special(self, statement: ir.Statement) -> list[str]:
        match statement:
            case ir.Forget():
                return []
            case ir.UnknownOne(name):
                return [f"let {name} = 1;"]
            case ir.BlockReduce():
                return self._block_reduce(statement)
            case ir.StridedReduce():
                return self._strided_reduce(statement)
            case ir.UniformLoad(name, array, index):
                return [f"let {name} = workgroupUniformLoad(&{self.shared_item(array, self.expr(index))});"]
            case _:
                raise AssertionError(f"{statement} needs pointers into buffers, which WGSL has not")

    def define(self, statement: ir.Let | ir.Declare) -> list[str]:
        name, value, type = statement.name, statement.value, statement.type
        if isinstance(statement, ir.Declare):
            return self._names(name, type, lambda lane: self.named(value, lane), "var")
        if isinstance(value, ir.Load) and ir.is_buffer(value.buffer):
            return self._load(name, value)
        if isinstance(value, ir.Load) and (array := self._vectors(value.buffer)):
            item = f"{array.name}[{self._vector_index(value.index, array.width)}]"
            return [f"let {name}_all = {item};", *self._names(name, type, lambda lane: f"{name}_all[{lane}]")]
        if type == ir.INT:
            if self._is_known(value):
                self._constants.add(name)
                return [f"const {name} = {self.expr(value)};"]
            self._constants.discard(name)
        return self._names(name, type, lambda lane: self.named(value, lane))

    def _names(self, name: str, type: ir.Type, text: Text, word: str = "let") -> list[str]:
        """The definitions of all lanes."""
        variable = ir.Var(name, type)
        return self.each(type, lambda lane: f"{word} {self.name(variable, lane)} = {text(lane)};")

    def _is_known(self, expr: ir.Expr) -> bool:
        """Whether an integer is a constant expression."""
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

    # Memory

    def registers(self, name: str, dtype: str, length: int) -> str:
        return f"var {name}: array<{wgsl.type_name(dtype)}, {length}>;"

    def _load(self, name: str, load: ir.Load) -> list[str]:
        """Load all lanes from a buffer."""
        if item_size(load.stored) < WORD and fills_words(load):
            return self._load_words(name, load)
        if load.mask is None:
            return self._names(name, load.type, lambda lane: self._item(load, lane))
        variable = ir.Var(name, load.type)
        items = self.each(
            load.type, lambda lane: f"    {self.name(variable, lane)} = {self._item(load, lane)};"
        )
        zeros = self._names(name, load.type, lambda _: wgsl.number(load.type.dtype, 0), "var")
        return [*zeros, f"if ({self.expr(load.mask)}) {{", *items, "}"]

    def _load_words(self, name: str, load: ir.Load) -> list[str]:
        """Load lanes that fill whole words."""
        each, index = WORD // item_size(load.stored), self.operand(load.index)
        names = [f"{name}_word{at}" for at in range(load.type.width // each)]
        words = [
            f"{word} = {self._words.word(load.buffer, f'({index} / {each} + {at})')};"
            for at, word in enumerate(names)
        ]
        if load.mask is None:
            lines = [f"let {word}" for word in words]
        else:
            lines = [f"var {word} = 0u;" for word in names]
            lines.append(f"if ({self.expr(load.mask)}) {{ {' '.join(words)} }}")

        def item(lane: int | None) -> str:
            word, number = divmod(lane or 0, each)
            return part(load.stored, names[word], number)

        return lines + self._names(name, load.type, item)

    def store(self, store: ir.Store) -> list[str]:
        lanes, index, buffer = range(store.type.width), self.addend(store.index), store.buffer
        values = [self.expr(store.value, lane) for lane in lanes]
        if array := self._vectors(buffer):
            vector = self._vector_index(store.index, array.width)
            return [f"{buffer}[{vector}] = {_item_type(array)}({', '.join(values)});"]
        each = WORD // item_size(store.stored)
        if buffer in self.packed or (ir.is_buffer(buffer) and each > 1 and fills_words(store)):
            words = [packed(store.stored, values[first:][:each]) for first in lanes[::each]]
            indices = [f"{self.operand(store.index)} / {each} + {at}" for at in range(len(words))]
            if buffer in self.packed:
                return [f"{buffer}[{at}] = {word};" for at, word in zip(indices, words, strict=True)]
            put_word = self._words.put_word
            return [put_word(buffer, f"({at})", word) for at, word in zip(indices, words, strict=True)]
        if store.stored == "int64" and store.value.type == ir.INT and ir.is_buffer(buffer):
            return [self._words.put_wide(buffer, index, values[0])]  # which needs no 64-bit integers
        return [self._put(store, _moved(index, 1, lane), values[lane]) for lane in lanes]

    def _put(self, store: ir.Store, index: str, value: str) -> str:
        """Write an item of a buffer or an array."""
        if ir.is_buffer(store.buffer):
            return self._words.put(store.buffer, store.stored, index, value)
        item, array = self.shared_item(store.buffer, index), self._arrays.get(store.buffer)
        if array is None:
            return f"{item} = {value};"
        if array.atomic:
            return f"atomicStore(&{item}, {value});"
        return f"{item} = {to_shared(store.stored, value)};"

    def shared_item(self, array: str, index: str) -> str:
        """An item of local memory or of a private array."""
        if shared := self._arrays.get(array):
            self._share(shared)
        return f"{array}[{index}]"

    # What threads do together

    def _block_reduce(self, statement: ir.BlockReduce) -> list[str]:
        variable, operation, name = statement.variable, statement.operation, statement.name
        type, width, threads = variable.type, variable.type.width, _number(statement.threads)
        lines = []
        while width > 1:
            width //= 2
            for lane in range(width):
                target, other = (self.name(variable, at) for at in (lane, lane + width))
                lines.append(f"{target} = {self.combine(operation, type, target, other)};")
        lines.append(f"var {name} = {self.expr(variable)};")
        if threads > 1:
            assert statement.array is not None
            # Two arrays alternate: the barriers in between make sure that all threads have read an array
            # before it is overwritten.
            array = f"fold_{shared_type(type.dtype)}_{self._reductions % 2}"
            self._reductions += 1
            self._share(ir.LocalArray(array, type.dtype, self._arrays[statement.array].length))
            lines += self._tree(operation, type, {name: f"{array}[%s]"}, 1, threads, f" % {threads}")
            first = f"{array}[THREAD / {threads} * {threads}]"
            lines += ["workgroupBarrier();", f"{name} = {from_shared(type.dtype, first)};"]
        return lines

    def _strided_reduce(self, statement: ir.StridedReduce) -> list[str]:
        target, array, type = statement.target, statement.array, statement.target.type
        threads, stride = _number(statement.threads), _number(statement.stride)
        self._share(replace(self._arrays[array], dtype=type.dtype))
        items = {
            self.name(target, lane): f"{array}[%s{f' + {lane * threads}' if lane else ''}]"
            for lane in range(type.width)
        }
        return self._tree(statement.operation, type, items, stride, threads // stride, "")

    def _tree(
        self, operation: str, type: ir.Type, items: Mapping[str, str], stride: int, count: int, rank: str
    ) -> list[str]:
        """Combine values of `count` threads, `stride` apart, into those of the first thread, by its `rank`.

        `items`: by the names of the values, their items in local memory, a format of the thread's index.
        """
        lines = [f"{item % 'THREAD'} = {to_shared(type.dtype, name)};" for name, item in items.items()]
        while count > 1:
            parts = min(_AT_ONCE, count)
            count //= parts
            lines += ["workgroupBarrier();", f"if (THREAD{rank} < {count * stride}) {{"]
            for name, item in items.items():
                for other in range(1, parts):
                    value = from_shared(type.dtype, item % f"THREAD + {other * count * stride}")
                    lines.append(f"    {name} = {self.combine(operation, type, name, value)};")
                lines.append(f"    {item % 'THREAD'} = {to_shared(type.dtype, name)};")
            lines.append("}")
        return lines

    def _vectors(self, name: str) -> ir.LocalArray | None:
        """A local array by its name, if its items are vectors."""
        array = self._arrays.get(name)
        if array is None or array.width == 1:
            return None
        self._share(array)
        return array

    def _vector_index(self, index: ir.Expr, width: int) -> str:
        """The index of the vector that an item begins."""
        if isinstance(index, ir.Binary) and (index.operator, index.right) == ("*", ir.Const(width)):
            return self.expr(index.left)
        return f"{self.operand(index)} / {width}"

    def _share(self, array: ir.LocalArray) -> None:
        """Declare a local array, as long as its longest use."""
        known = self._shared.get(array.name, array)
        self._shared[array.name] = replace(array, length=max(known.length, array.length))

    # Loops

    def loop(self, loop: ir.For) -> list[str]:
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
        count = min(loop.unrolled, UNROLLED)
        if count > 1:
            first, step = f"{loop.name}_first", self.operand(loop.step)
            unrolled = _unrolled(loop, first, stop, step, count, body)
            return [self.opening(first, start, stop, f"{count} * {step}"), *unrolled, "}"]
        return [self.opening(loop.name, start, stop, step), *body, "}"]


def _unrolled(loop: ir.For, first: str, stop: str, step: str, count: int, body: list[str]) -> list[str]:
    """The body of a loop `count` times, up to the end of the loop."""
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


def _item_type(array: ir.LocalArray) -> str:
    type = shared_type(array.dtype)
    if array.width > 1:
        return f"vec{array.width}<{type}>"
    return f"atomic<{type}>" if array.atomic else type


def _number(expr: ir.Expr) -> int:
    """A constant that the text depends on."""
    assert isinstance(expr, ir.Const)
    return int(expr.value)


def _moved(index: str, step: ir.Steps, lane: int | None) -> str:
    """An index in a lane."""
    assert isinstance(step, int)
    return f"{index} + {lane * step}" if lane and step else index
