"""WGSL: without pointers, vectors of bytes, or functions that are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.dialects.wgsl_expressions import wgsl_expression
from penstock.kernels.dialects.wgsl_memory import Words, scalar_dtypes
from penstock.kernels.dialects.wgsl_prelude import functions_for
from penstock.kernels.dialects.wgsl_printer import WgslPrinter, writes_parts
from penstock.kernels.ir import KernelIR
from penstock.kernels.source import KernelSource


class Wgsl(Dialect):
    """WGSL, the language of WebGPU."""

    name = "wgsl"
    label = "WGSL"
    pointers = False
    word_access = True
    one_kernel_modules = True

    def has_operation(self, operation: str, result: str, of: str, inputs: int) -> bool:
        return wgsl_expression(operation, result, of, ("x",) * inputs) is not None

    def render(self, kernel: KernelIR, name: str) -> KernelSource:
        outputs, inputs, scalars = kernel.parameters
        words = Words(writes_parts(kernel.body))
        printer = WgslPrinter(words, kernel.arrays)
        body = printer.statements(kernel.body)
        opening = words.opening(name, [buffer for _, buffer in (*outputs, *inputs)], scalars).rstrip()
        lines = [*printer.declared(), opening, *body, "}"]
        return KernelSource(
            name,
            "\n".join(lines) + "\n",
            (*kernel.outputs, *kernel.inputs),
            scalar_dtypes(kernel.scalars),
            kernel.grid,
            kernel.group,
        )

    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        text = "\n".join(source.text for source in sources)
        return f"{functions_for(text)}\n{text}"
