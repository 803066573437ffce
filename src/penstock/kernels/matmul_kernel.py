"""Matrix products as C: the statements that multiply two matrices and hand every item of the product on.

Sums are always taken in the same order, so a product comes out the same every time.
"""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.kernels.matmul_cpu import cpu_body
from penstock.kernels.matmul_gpu import gpu_body
from penstock.kernels.matmul_problem import Body, Finish, Problem


def matmul_body(problem: Problem, capabilities: Capabilities, finish: Finish) -> Body:
    """The statements between the kernel's braces, and grid and group.

    Every item of the product passes through `finish` once. Of the names that the statements define, `batch`
    is for its use; all others begin with `mm_`. Where they use vectors, they want the prelude for those.
    """
    write = cpu_body if capabilities.vector_width > 1 else gpu_body
    return write(problem, capabilities, finish)
