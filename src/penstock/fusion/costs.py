"""How much one kernel may hold, and how much is recomputed rather than stored."""

from __future__ import annotations

RECOMPUTED_NODES = 16  # as many are recomputed at the same size, rather than stored
MAX_NODES = 96  # in one group; beyond that a kernel takes long to compile and runs out of registers
CHEAP_NODES = 6  # as many are recomputed at a smaller size, rather than stored
# Items of a value, so that an index into it, and one step beyond, fits into an int.
MOST_ITEMS = (1 << 31) - (1 << 20)
# What is read across its rows by a reduction is written out in the other order first, from so many items on.
CROSSED_ITEMS = 1 << 16
CROSSED_AXIS = 16  # the length of the rows on either side, at least; shorter ones are near one another
