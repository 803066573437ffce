"""The kernel IR: what a kernel computes, as typed expressions and statements. A dialect prints it.

Expressions are immutable, typed, and built with Python's operators. Indices and predicates are scalars. A
value of a fused group may have lanes: those of a CPU's vector, or the neighbouring items of a GPU's thread.

Python's `==` compares expressions as data, so a comparison in a kernel is `a.eq(b)` or `a.ne(b)`. `//` is the
language's division, which rounds towards zero: use it for non-negative operands.
"""

from penstock.kernels.ir.expressions import *  # noqa: F403
from penstock.kernels.ir.statements import *  # noqa: F403
