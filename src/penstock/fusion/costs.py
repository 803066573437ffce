"""What computing costs, and how much of it one kernel may hold."""

from __future__ import annotations

from penstock.graph.elementwise import PRIMITIVES

# What takes many instructions, so that it is not done twice for nothing.
_COSTLY_NAMES = """exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh pow atan2 hypot logaddexp divide remainder floor_divide"""
COSTLY = frozenset(PRIMITIVES[name] for name in _COSTLY_NAMES.split())
LONG = COSTLY - {PRIMITIVES["divide"], PRIMITIVES["sqrt"]}  # take longer than reading a value from memory
AGAIN_NODES = 16  # as many are computed again at the same size, rather than stored
MAX_NODES = 96  # in one group; beyond that a kernel takes long to compile and runs out of registers
CHEAP_NODES = 6  # as many are computed again, at a smaller size, rather than stored
MOST_ITEMS = (1 << 31) - (
    1 << 20
)  # of a value; beyond it places leave an int, even one that is a step further
