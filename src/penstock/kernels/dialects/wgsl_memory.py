"""Memory in WGSL: every buffer is an array of words of 4 bytes, whatever its items are.

Items of 8 bytes are two words, of which the low one comes first; smaller ones share a word. A word that is
not written whole is changed bit by bit in atomic steps, because its other items may be written at the same
time. Where a kernel has to do so, all its buffers are of atomic words: any two of them may be one memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.kernels.dialects.wgsl_expressions import wgsl_type
from penstock.kernels.source import ALIGNMENT

WORD = 4  # bytes
_SCALARS = {"bool": "uint32", "int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}


def item_size(dtype: str) -> int:
    """The bytes of an item."""
    return 2 if dtype == "bfloat16" else int(np.dtype(dtype).itemsize)


def scalar_dtypes(dtypes: Sequence[str]) -> tuple[str, ...]:
    """The dtypes in which scalars are passed to a kernel: none is smaller than a word."""
    return tuple(_SCALARS.get(dtype, dtype) for dtype in dtypes)


class Words:
    """How the buffers of one kernel are read and written."""

    def __init__(self, atomic: bool = False) -> None:
        self._atomic = atomic

    def opening(self, name: str, buffers: Sequence[str], scalars: Sequence[tuple[str, str]] = ()) -> str:
        """The first lines of a kernel, up to the places of its buffers. Scalars are (dtype, name)."""
        kind = "array<atomic<u32>>" if self._atomic else "array<u32>"
        parameters = [f"{one}: {kind}" for one in buffers]
        parameters += [f"{one}_place: i32" for one in buffers]
        lines = [f"    let {one}_at = {one}_place * {ALIGNMENT // WORD};" for one in buffers]
        # Places are not negative, which no compiler knows.
        lines.append(f"    let ONE = f32(1 - ({buffers[0]}_place >> 31u));")
        for dtype, given in scalars:
            if dtype == "bool":  # which none can be
                parameters.append(f"{given}_word: u32")
                lines.append(f"    let {given} = {given}_word != 0u;")
            else:
                parameters.append(f"{given}: {wgsl_type(dtype)}")
        lines = [f"kernel {name}({', '.join(parameters)}) {{", *lines]
        return "\n".join(lines) + "\n"

    def word(self, buffer: str, place: str) -> str:
        """A word, by its number after the buffer's place."""
        found = f"{buffer}[{buffer}_at + {place}]"
        return f"atomicLoad(&{found})" if self._atomic else found

    def put_word(self, buffer: str, place: str, bits: str) -> str:
        """The statement that writes a word."""
        target = f"{buffer}[{buffer}_at + {place}]"
        return f"atomicStore(&{target}, {bits});" if self._atomic else f"{target} = {bits};"

    def put_wide(self, buffer: str, index: str, value: str) -> str:
        """The statements that write an integer of 32 bits as an item of 64."""
        low = self.put_word(buffer, f"2 * ({index})", "bitcast<u32>(wide_)")
        high = self.put_word(buffer, f"2 * ({index}) + 1", "bitcast<u32>(wide_ >> 31u)")
        return f"{{ let wide_ = {value}; {low} {high} }}"

    def index(self, buffer: str, dtype: str, index: str, length: str) -> str:
        """An item of whole numbers as one of 32 bits from 0 to before `length`; -1 if it is none of them."""
        if item_size(dtype) == 8:
            low, high = (self.word(buffer, f"2 * ({index})"), self.word(buffer, f"2 * ({index}) + 1"))
            return f"index_of({low}, {high}, u32({length}))"
        item = self.item(buffer, dtype, index)
        return (
            f"index_of({item if wgsl_type(dtype) == 'u32' else f'bitcast<u32>({item})'}, 0u, u32({length}))"
        )

    def item(self, buffer: str, dtype: str, index: str) -> str:
        """One item, in the type that it is computed in."""
        size = item_size(dtype)
        if size == 8:
            words = (self.word(buffer, f"2 * ({index})"), self.word(buffer, f"2 * ({index}) + 1"))
            return from_bits(dtype, f"long_bits({', '.join(words)})")
        if size == 4:
            return from_bits(dtype, self.word(buffer, f"({index})"))
        shift = 1 if size == 2 else 2
        word = self.word(buffer, f"(({index}) >> {shift}u)")
        return from_bits(dtype, f"part_{8 * size}({word}, u32({index}))")

    def put(self, buffer: str, dtype: str, index: str, value: str) -> str:
        """The statements that write one item."""
        size, bits = item_size(dtype), to_bits(dtype, value)
        if size == 8:
            low = self.put_word(buffer, f"2 * ({index})", "u32(bits_)")
            high = self.put_word(buffer, f"2 * ({index}) + 1", "u32(bits_ >> 32u)")
            return f"{{ let bits_ = {bits}; {low} {high} }}"
        if size == 4:
            return self.put_word(buffer, f"({index})", bits)
        assert self._atomic, f"{buffer} is written in parts of words"
        shift, mask = (1, "0xffffu") if size == 2 else (2, "0xffu")
        target = f"&{buffer}[{buffer}_at + (({index}) >> {shift}u)]"
        return (
            f"{{ let by_ = {8 * size}u * (u32({index}) & {WORD // size - 1}u); let bits_ = {bits}; "
            f"atomicAnd({target}, ~({mask} << by_)); atomicOr({target}, bits_ << by_); }}"
        )


def shared_type(dtype: str) -> str:
    """The type of values in the memory of a group, which holds no truth values."""
    return "u32" if dtype == "bool" else wgsl_type(dtype)


def to_shared(dtype: str, value: str) -> str:
    """A value as it is in the memory of a group."""
    return f"select(0u, 1u, {value})" if dtype == "bool" else value


def from_shared(dtype: str, value: str) -> str:
    """A value from the memory of a group."""
    return f"({value} != 0u)" if dtype == "bool" else value


def part(dtype: str, word: str, number: int) -> str:
    """An item of a word, or of two where it takes them, by its number there."""
    size = item_size(dtype)
    if size == WORD:
        return from_bits(dtype, word)
    bits = word if number == 0 else f"({word} >> {8 * size * number}u)"
    if number < WORD // size - 1:
        bits = f"({bits} & {(1 << 8 * size) - 1:#x}u)"
    return from_bits(dtype, bits)


def packed(dtype: str, values: Sequence[str]) -> str:
    """As many items as a word holds, as that word."""
    size = item_size(dtype)
    parts = [to_bits(dtype, value) for value in values]
    return " | ".join(f"({bits} << {8 * size * at}u)" if at else bits for at, bits in enumerate(parts))


def from_bits(dtype: str, bits: str) -> str:
    """A value from its bits: a word in which all others are 0, or 64 of them."""
    match dtype:
        case "float16":
            return f"half_float({bits})"
        case "bfloat16":
            return f"bfloat_float({bits})"
        case "bool":
            return f"({bits} != 0u)"
        case "int8" | "int16":
            return f"signed_{8 * item_size(dtype)}({bits})"
        case "uint8" | "uint16" | "uint32" | "uint64":
            return bits
        case _:
            return f"bitcast<{wgsl_type(dtype)}>({bits})"


def to_bits(dtype: str, value: str) -> str:
    """The bits of a value: a word in which all others are 0, or 64 of them."""
    match dtype:
        case "float16":
            return f"float_half({value})"
        case "bfloat16":
            return f"float_bfloat({value})"
        case "bool":
            return f"select(0u, 1u, {value})"
        case "int8" | "int16":
            return f"(bitcast<u32>({value}) & {(1 << 8 * item_size(dtype)) - 1:#x}u)"
        case "uint8" | "uint16" | "uint32" | "uint64":
            return value
        case _:
            return f"bitcast<{'u64' if item_size(dtype) == 8 else 'u32'}>({value})"
