"""The kernel IR: what a kernel computes, as typed expressions and statements. A dialect prints it.

Expressions are immutable, have a type and are built with Python's operators. Indices and predicates are
expressions of single integers and truth values; a value of a fused group may have a vector width: that of a
CPU's vectors, or the number of neighbouring items that a thread of a GPU computes.

Python's `==` compares two expressions as data, so a comparison in a kernel is `a.eq(b)` or `a.ne(b)`. `//` is
the language's division: of numbers that are not negative, unless both signs were thought of.
"""

from penstock.kernels.ir.expressions import *  # noqa: F403
from penstock.kernels.ir.statements import *  # noqa: F403
