"""What OpenCL and CUDA share: kernels in a C with the words in which the two differ as macros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.kernels.dialects.c_expressions import expression
from penstock.kernels.dialects.c_threads import ThreadPrinter
from penstock.kernels.dialects.c_vectors import VectorPrinter
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.ir import KernelIR, Type
from penstock.kernels.philox import PHILOX
from penstock.kernels.source import KernelSource, declared, head


class CDialect(Dialect):
    """A dialect of C."""

    prelude: str
    optional_preludes: Mapping[str, str] = {"philox(": PHILOX}  # each by a word that asks for it

    def has_operation(self, operation: str, result: str, of: str, inputs: int) -> bool:
        return expression(operation, Type(result), Type(of), ("x",) * inputs) is not None

    def render(self, kernel: KernelIR, name: str) -> KernelSource:
        printer = VectorPrinter() if kernel.vectors else ThreadPrinter(kernel.quick)
        # Memory of a group has to be named before anything else.
        arrays = tuple((array.dtype, array.name, array.length) for array in kernel.arrays)
        opening, *places = head(name, *kernel.parameters).rstrip().split("\n")
        body = printer.statements(kernel.body)
        lines = [opening, *(declared(*array) for array in arrays), *places, *body, "}"]
        stored = tuple("uint8" if dtype == "bool" else dtype for dtype in kernel.scalars)
        return KernelSource(
            name,
            "\n".join(lines) + "\n",
            (*kernel.outputs, *kernel.inputs),
            stored,
            kernel.grid,
            kernel.group,
            arrays,
            kernel.resident,
        )

    def text(self, source: KernelSource) -> str:
        """A kernel's text."""
        return source.text

    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        # Chains change words of the prelude, so they come last.
        texts = sorted(map(self.text, sources), key=lambda text: "chain_group" in text)
        text = "\n".join(texts)
        optional = {**self.optional_preludes, **preludes}
        used = dict.fromkeys(part for word, part in optional.items() if word in text)
        return "\n".join([self.prelude, *used, text])
