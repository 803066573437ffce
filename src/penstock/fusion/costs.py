"""Limits of fusion: how large a kernel may be, and how much is recomputed rather than stored."""

from __future__ import annotations

RECOMPUTED_NODES = 16  # up to so many nodes of the same size are recomputed rather than stored
MAX_NODES = 96  # of a group; a larger kernel takes long to compile and runs out of registers
CHEAP_NODES = 6  # up to so many nodes of a smaller size are recomputed rather than stored
# Items of a value, so that an index into it, and a step beyond the last, fits into a 32-bit integer.
MOST_ITEMS = (1 << 31) - (1 << 20)
# A transposed view with so many items or more is copied before a reduction reads it.
CROSSED_ITEMS = 1 << 16
CROSSED_AXIS = 16  # the least length of both axes for that; with shorter rows, reads stay close together
