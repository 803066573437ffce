"""Philox4x32-10 in the C that OpenCL and CUDA share; `uint` has 32 bits and `ulong` 64."""

from __future__ import annotations

# `philox` returns a word of a block, as `graph.random.RANDOM_BITS` defines it, with a 64-bit counter. The
# word is selected by comparisons, because an array with a variable index would not be in registers.
PHILOX = """
DEVICE uint philox_128(uint key0, uint key1, uint c0, uint c1, uint c2, uint c3, int word) {
    for (int turn = 0; turn < 10; turn++) {
        ulong p0 = (ulong)c0 * 0xD2511F53u;
        ulong p1 = (ulong)c2 * 0xCD9E8D57u;
        c0 = (uint)(p1 >> 32) ^ c1 ^ key0;
        c1 = (uint)p1;
        c2 = (uint)(p0 >> 32) ^ c3 ^ key1;
        c3 = (uint)p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

DEVICE uint philox(uint key0, uint key1, uint counter_low, uint counter_high, int word) {
    return philox_128(key0, key1, counter_low, counter_high, 0u, 0u, word);
}
"""

# The same for a vector of indices: words are in lanes of 64 bits, of which products read the lower 32.
_OF_VECTORS = """
static inline uintWIDTH philox_WIDTH(uint key0, uint key1, uint low, uint high, intWIDTH index) {
    ulongWIDTH block = (((ulong)high << 32) | low) + __builtin_convertvector(index >> 2, ulongWIDTH);
    ulongWIDTH c0 = block, c1 = block >> 32, c2 = 0, c3 = 0;
    for (int turn = 0; turn < 10; turn++) {
        ulongWIDTH p0 = (c0 & 0xffffffffu) * 0xD2511F53u;
        ulongWIDTH p1 = (c2 & 0xffffffffu) * 0xCD9E8D57u;
        c0 = (p1 >> 32) ^ c1 ^ (ulong)key0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ (ulong)key1;
        c3 = p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    longWIDTH place = __builtin_convertvector(index & 3, longWIDTH);
    ulongWIDTH even = place == 0 ? c0 : c2, odd = place == 1 ? c1 : c3;
    return __builtin_convertvector((place & 1) == 0 ? even : odd, uintWIDTH);
}
"""


def philox_of_vectors(width: int) -> dict[str, str]:
    """The text of the function for vectors of so many lanes, by the call that needs it."""
    return {f"philox_{width}(": _OF_VECTORS.replace("WIDTH", str(width))}
