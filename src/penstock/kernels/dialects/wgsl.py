"""WGSL, which has no pointers into buffers, no items smaller than a word, and no precise functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.drivers.driver import Capabilities
from penstock.fusion.views import trailing
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Kind, Node
from penstock.kernels import ir
from penstock.kernels.dialects.dialect import MANY_STEPS, Dialect, RawKernel
from penstock.kernels.dialects.wgsl_expressions import expression, type_name
from penstock.kernels.dialects.wgsl_memory import Words
from penstock.kernels.dialects.wgsl_prelude import functions_for
from penstock.kernels.dialects.wgsl_printer import WgslPrinter, writes_parts
from penstock.kernels.source import KernelSource

# Mesa's software Vulkan silently ends the loops of a thread after 65535 iterations.
_SOFTWARE_STEPS = 60_000
# Items of a reduction along rows: at least a few threads of a workgroup share a row, in a few passes.
_ROW_ITEMS = 1 << 22
# Items per iteration of a reduction along columns, and of a product without tiles.
_COLUMN_ITEMS, _PRODUCT_ITEMS = 12, 2


class Wgsl(Dialect):
    """WGSL, the language of WebGPU."""

    name = "wgsl"
    label = "WGSL"
    pointers = False
    word_access = True
    one_kernel_modules = True
    fixed_nodes = (ir.BlockReduce, ir.StridedReduce)
    moves_buffers = False
    raw_types: Mapping[str, str] = {
        dtype: type_name(dtype) for dtype in ("int32", "uint32", "int64", "uint64", "float32")
    }
    # No scalar is smaller than a word.
    passed_as: Mapping[str, str] = {
        **dict.fromkeys(("int8", "int16"), "int32"),
        **dict.fromkeys(("bool", "uint8", "uint16"), "uint32"),
    }

    def most_steps(self, capabilities: Capabilities) -> int:
        return _SOFTWARE_STEPS if capabilities.kind == "cpu" else MANY_STEPS

    def has_short_loops(self, node: Node, capabilities: Capabilities) -> bool:
        steps = self.most_steps(capabilities)
        if steps == MANY_STEPS:
            return True
        if node.primitive.kind is Kind.REDUCTION:
            source = node.inputs[0]
            along_rows = trailing(source.shape, node.attributes["axes"])
            return source.size // node.size <= (_ROW_ITEMS if along_rows else _COLUMN_ITEMS * steps)
        return node.primitive is not MATMUL or node.inputs[0].shape[-1] <= _PRODUCT_ITEMS * steps

    def raw_text(self, kernel: RawKernel) -> str:
        arrays = (*kernel.outputs, *kernel.inputs)
        parameters = [f"{array}: array<{word}>" for array, word, _ in arrays]
        parameters += [f"{scalar}: {word}" for scalar, word in kernel.scalars]
        lines = [
            *(f"const {constant} = {size};" for constant, size in kernel.constants),
            *(f"alias {array}_type = {word};" for array, word, _ in arrays),
            kernel.header,
            f"kernel {kernel.name}({', '.join(parameters)}) {{",
        ]
        if kernel.count is not None:
            lines.append("let i = GROUP_0 * THREADS + THREAD;")
            lines.append(f"if (i >= {kernel.count}) {{ return; }}")
        return "\n".join([*lines, kernel.body, "}", ""])

    def has_operation(self, operation: str, result: str, of: str, inputs: int, vectors: bool) -> bool:
        return expression(operation, result, of, ("x",) * inputs) is not None

    def print(self, kernel: ir.KernelIR, name: str) -> str:
        outputs, inputs, scalars = kernel.parameters
        words = Words(writes_parts(kernel.body))
        printer = WgslPrinter(words, kernel.arrays)
        body = printer.statements(kernel.body)
        opening = words.opening(name, [buffer for _, buffer in (*outputs, *inputs)], scalars)
        return "\n".join([*printer.declared(), *opening, *body, "}", ""])

    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        text = "\n".join(source.text for source in sources)
        return f"{functions_for(text)}\n{text}"
