"""Memory in WGSL: every buffer is an array of words of 4 bytes, whatever its items are.

Items of 8 bytes are two words, the low word first; smaller items share a word. A word that is not written
whole is changed by atomic bit operations, because its other items may be written at the same time. A kernel
that does so has atomic words in all its buffers, since any two of them may be the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels.dialects.wgsl_expressions import type_name
from penstock.kernels.source import ALIGNMENT, WORD, item_size

_SHIFTS = {1: 2, 2: 1}  # from the index of an item to that of its word, by item size
_UNSIGNED = dict.fromkeys(("uint8", "uint16", "uint32", "uint64"), "{}")
# For dtypes that take more than a bitcast.
_FROM_BITS = {
    **_UNSIGNED,
    "bool": "({} != 0u)",
    "int8": "signed_8({})",
    "int16": "signed_16({})",
    "float16": "half_float({})",
    "bfloat16": "bfloat_float({})",
}
_TO_BITS = {
    **_UNSIGNED,
    "bool": "select(0u, 1u, {})",
    "int8": "(bitcast<u32>({}) & 0xffu)",
    "int16": "(bitcast<u32>({}) & 0xffffu)",
    "float16": "float_half({})",
    "bfloat16": "float_bfloat({})",
}


class Words:
    """How the buffers of one kernel are read and written."""

    def __init__(self, atomic: bool = False) -> None:
        self._atomic = atomic

    def opening(self, name: str, buffers: Sequence[str], scalars: Sequence[tuple[str, str]]) -> list[str]:
        """The first lines of a kernel, with the offsets of its buffers. Scalars are (dtype, name)."""
        kind = "array<atomic<u32>>" if self._atomic else "array<u32>"
        parameters = [f"{buffer}: {kind}" for buffer in buffers]
        parameters += [f"{buffer}_place: i32" for buffer in buffers]
        lines = [f"    let {buffer}_at = {buffer}_place * {ALIGNMENT // WORD};" for buffer in buffers]
        # Offsets are not negative, but no compiler knows that.
        lines.append(f"    let ZERO = u32({buffers[0]}_place) >> 31u; let ONE = f32(1u - ZERO);")
        for dtype, given in scalars:
            if dtype == "bool":  # which a parameter cannot be
                parameters.append(f"{given}_word: u32")
                lines.append(f"    let {given} = {given}_word != 0u;")
            else:
                parameters.append(f"{given}: {type_name(dtype)}")
        return [f"kernel {name}({', '.join(parameters)}) {{", *lines]

    def word(self, buffer: str, number: str) -> str:
        """A word, by its index after the buffer's offset."""
        word = f"{buffer}[{buffer}_at + {number}]"
        return f"atomicLoad(&{word})" if self._atomic else word

    def put_word(self, buffer: str, number: str, bits: str) -> str:
        """The statement that writes a word."""
        word = f"{buffer}[{buffer}_at + {number}]"
        return f"atomicStore(&{word}, {bits});" if self._atomic else f"{word} = {bits};"

    def put_wide(self, buffer: str, index: str, value: str) -> str:
        """The statements that write an int32 as an item of 64 bits."""
        low, high = "bitcast<u32>(wide_)", "bitcast<u32>(wide_ >> 31u)"
        return self._put_words(buffer, index, f"wide_ = {value}", low, high)

    def index(self, buffer: str, dtype: str, index: str, length: str) -> str:
        """An integer item as an index below `length`; -1 if it is out of range."""
        if item_size(dtype) == 8:
            return f"index_of({self._words(buffer, index)}, u32({length}))"
        item = self.item(buffer, dtype, index)
        item = item if type_name(dtype) == "u32" else f"bitcast<u32>({item})"
        return f"index_of({item}, 0u, u32({length}))"

    def item(self, buffer: str, dtype: str, index: str) -> str:
        """An item, in the type that it is computed in."""
        size = item_size(dtype)
        if size == 8:
            return from_bits(dtype, f"long_bits({self._words(buffer, index)})")
        if size == 4:
            return from_bits(dtype, self.word(buffer, f"({index})"))
        word = self.word(buffer, f"(({index}) >> {_SHIFTS[size]}u)")
        return from_bits(dtype, f"part_{8 * size}({word}, u32({index}))")

    def put(self, buffer: str, dtype: str, index: str, value: str) -> str:
        """The statements that write an item."""
        size, bits = item_size(dtype), to_bits(dtype, value)
        if size == 8:
            return self._put_words(buffer, index, f"bits_ = {bits}", "u32(bits_)", "u32(bits_ >> 32u)")
        if size == 4:
            return self.put_word(buffer, f"({index})", bits)
        assert self._atomic, f"{buffer} is written in parts of words"
        word = f"&{buffer}[{buffer}_at + (({index}) >> {_SHIFTS[size]}u)]"
        return (
            f"{{ let by_ = {8 * size}u * (u32({index}) & {WORD // size - 1}u); let bits_ = {bits}; "
            f"atomicAnd({word}, ~({_mask(size)} << by_)); atomicOr({word}, bits_ << by_); }}"
        )

    def _words(self, buffer: str, index: str) -> str:
        """Both words of an item of 8 bytes."""
        return f"{self.word(buffer, f'2 * ({index})')}, {self.word(buffer, f'2 * ({index}) + 1')}"

    def _put_words(self, buffer: str, index: str, given: str, low: str, high: str) -> str:
        """The statements that write both words of an item of 8 bytes, after the definition `given`."""
        first = self.put_word(buffer, f"2 * ({index})", low)
        return f"{{ let {given}; {first} {self.put_word(buffer, f'2 * ({index}) + 1', high)} }}"


def shared_type(dtype: str) -> str:
    """The type of values in local memory, which cannot hold booleans."""
    return "u32" if dtype == "bool" else type_name(dtype)


def to_shared(dtype: str, value: str) -> str:
    """A value as it is stored in local memory."""
    return f"select(0u, 1u, {value})" if dtype == "bool" else value


def from_shared(dtype: str, value: str) -> str:
    """A value loaded from local memory."""
    return f"({value} != 0u)" if dtype == "bool" else value


def part(dtype: str, word: str, number: int) -> str:
    """One of the items that share a word, by its position in the word."""
    size = item_size(dtype)
    bits = word if number == 0 else f"({word} >> {8 * size * number}u)"
    if number < WORD // size - 1:
        bits = f"({bits} & {_mask(size)})"
    return from_bits(dtype, bits)


def packed(dtype: str, values: Sequence[str]) -> str:
    """The word that consists of items."""
    size = item_size(dtype)
    parts = [to_bits(dtype, value) for value in values]
    return " | ".join(f"({bits} << {8 * size * at}u)" if at else bits for at, bits in enumerate(parts))


def from_bits(dtype: str, bits: str) -> str:
    """A value from its bits: a word, zero-extended, or 64 bits."""
    return _FROM_BITS.get(dtype, f"bitcast<{type_name(dtype)}>({{}})").format(bits)


def to_bits(dtype: str, value: str) -> str:
    """The bits of a value: a word, zero-extended, or 64 bits."""
    return _TO_BITS.get(dtype, f"bitcast<u{8 * item_size(dtype)}>({{}})").format(value)


def _mask(size: int) -> str:
    return f"{(1 << 8 * size) - 1:#x}u"
