"""What OpenCL and CUDA share: kernels in C, with macros where the two languages differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.kernels import ir
from penstock.kernels.dialects.c import CPrinter
from penstock.kernels.dialects.c_expressions import CPU_SCALAR_PATTERNS, expression
from penstock.kernels.dialects.c_threads import ThreadPrinter
from penstock.kernels.dialects.c_vectors import VectorPrinter
from penstock.kernels.dialects.dialect import Dialect, RawKernel
from penstock.kernels.dialects.philox import PHILOX
from penstock.kernels.source import ALIGNMENT, C_TYPES, KernelSource, head, item_size

_MOST_INT = (1 << 31) - 1
_WORKGROUP = "workgroup"  # the parameter of a function with its workgroup's index


def _printer(kernel: ir.KernelIR, private: bool = False) -> CPrinter:
    return VectorPrinter(private) if kernel.vectors else ThreadPrinter(kernel.quick)


def _array(array: ir.LocalArray) -> str:
    """The declaration of an array."""
    aligned = f" __attribute__((aligned({array.width * item_size(array.dtype)})))" if array.width > 1 else ""
    return f"{C_TYPES[array.dtype]} {array.name}[{array.length}]{aligned};"


def _function(function: ir.Function, name: str) -> str:
    """A kernel as a function of its workgroup's index, its local arrays, and its parameters."""
    kernel, linkage = function.kernel, f"{function.linkage} void"
    leading = [f"int {_WORKGROUP}"]
    if not function.private:
        leading += [f"LOCAL_AT {C_TYPES[array.dtype]} *{array.name}" for array in kernel.arrays]
    arrays = [*map(_array, kernel.arrays)] if function.private else []
    printer = _printer(kernel, function.private)
    printer.workgroup_name = _WORKGROUP
    opening = head(name, *kernel.parameters, linkage, leading, arrays)
    return "\n".join([opening.rstrip(), *printer.statements(kernel.body), "}"]) + "\n"


class CDialect(Dialect):
    """A dialect of C."""

    passed_as: Mapping[str, str] = {"bool": "uint8"}
    prelude: str
    optional_preludes: Mapping[str, str] = {"philox(": PHILOX}  # by a word of the text that needs it

    def has_operation(self, operation: str, result: str, of: str, inputs: int, vectors: bool) -> bool:
        first = CPU_SCALAR_PATTERNS if vectors else None
        return expression(operation, ir.Type(result), ir.Type(of), ("x",) * inputs, first) is not None

    def print(self, kernel: ir.KernelIR, name: str) -> str:
        printer = _printer(kernel)
        printer.kernel_name, printer.tables = name, frozenset(table.name for table in kernel.tables)
        arrays = [f"LOCAL {_array(array)}" for array in kernel.arrays]
        opening = head(name, *kernel.parameters, arrays=arrays)
        lines = [opening.rstrip(), *printer.statements(kernel.body), "}"]
        tables = [
            f"CONSTANT int {name}_{table.name}[] = {{{', '.join(map(str, table.values))}}};\n"
            for table in kernel.tables
        ]
        if kernel.counters:
            tables.append(f"COUNTERS int {name}_{ir.COUNTERS}[{kernel.counters}];\n")
        functions = [_function(function, f"{name}_{function.name}") for function in kernel.functions]
        return "\n".join([*functions, *tables, "\n".join(lines) + "\n"])

    # For users' own kernels, which need no other prelude.
    raw_words: str
    raw_global: str  # before a pointer's type
    raw_restrict: str
    raw_opening: str  # a format of the workgroup size

    def raw_text(self, kernel: RawKernel) -> str:
        arrays = (*kernel.outputs, *kernel.inputs)
        constness = [""] * len(kernel.outputs) + ["const "] * len(kernel.inputs)
        parameters = [
            f"{self.raw_global}{const}{word} *{self.raw_restrict} {array}"
            for (array, word, _), const in zip(arrays, constness, strict=True)
        ]
        parameters += [f"int {array}_place" for array, _, _ in arrays]
        parameters += [f"{word} {scalar}" for scalar, word in kernel.scalars]
        sizes = ", ".join(f"{constant} = {size}" for constant, size in kernel.constants)
        lines = [
            self.raw_words,
            f"#define THREADS {kernel.threads}",
            f"enum {{ {sizes} }};",
            *(f"typedef {word} {array}_type;" for array, word, _ in arrays),
            *([f'#line 1 "header of {kernel.label}"', kernel.header] if kernel.header else []),
            f"{self.raw_opening.format(kernel.threads)} {kernel.name}({', '.join(parameters)}) {{",
            *(f"{array} += (size_t){array}_place * {ALIGNMENT // size};" for array, _, size in arrays),
        ]
        if kernel.count is not None:
            word = "int" if kernel.count <= _MOST_INT - kernel.threads else self.raw_types["int64"]
            lines.append(f"const {word} i = ({word})GROUP_0 * THREADS + THREAD;")
            lines.append(f"if (i >= {kernel.count}) return;")
        return "\n".join([*lines, f'#line 1 "{kernel.label}"', kernel.body, "}", ""])

    def text(self, source: KernelSource) -> str:
        """A kernel's text."""
        return source.text

    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        text = "\n".join(map(self.text, sources))
        optional = {**self.optional_preludes, **preludes}
        used = dict.fromkeys(part for word, part in optional.items() if word in text)
        return "\n".join([self.prelude, *used, text])
