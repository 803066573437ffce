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
