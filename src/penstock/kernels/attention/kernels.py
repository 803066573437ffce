"""The launches of attention on a CUDA device, with sizes and strides as constants, but for the batch.

Kernels are named by their text: those of one batch serve another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.fusion.groups import Group
from penstock.fusion.views import operand_source, rows_index, whole_index
from penstock.graph.attention import ATTENTION, GRADIENT_PARTS
from penstock.graph.dtypes import HALF_PRECISION, float16
from penstock.graph.node import Node, Shape
from penstock.graph.paged_attention import PROMPT_ATTENTION
from penstock.kernels.source import KernelSource, digest, head
from penstock.kernels.templates.launches import Launch, Lowering, one_launch

_BLOCK_ROWS, _BLOCK_THREADS = 64, 128  # of a workgroup: four warps with 16 rows each


@dataclass(frozen=True)
class _Tiling:
    """How a pass tiles the other side."""

    tile: int  # rows at a time
    groups: int  # workgroups that a multiprocessor should have registers for
    stages: int  # tiles in shared memory: one is used while the others are copied


@dataclass(frozen=True)
class _Pass:
    """A kernel of attention or of its gradient."""

    name: str
    products: int  # of matrices: each pass of the gradients recomputes the scores
    narrow: _Tiling  # for heads up to 64 columns wide
    wide: _Tiling


_FORWARD = _Pass("forward", 2, _Tiling(64, 4, 3), _Tiling(32, 2, 3))
_QUERY_GRADIENTS = _Pass("query_gradients", 3, _Tiling(64, 3, 3), _Tiling(32, 2, 3))
_KEY_GRADIENTS = _Pass("key_gradients", 4, _Tiling(32, 3, 4), _Tiling(16, 2, 4))  # needs the most registers


@dataclass(frozen=True)
class _Parameter:
    """A buffer of a kernel: its name, and its index among the buffers of the group."""

    name: str
    number: int
    argument: str  # of the pass: where the rows of a head begin, and their stride
    dtype: str = "uint16"  # float16 or bfloat16, as bits


def attention_kernels(group: Group) -> Lowering:
    """The launches of a group; unused results go to scratch."""
    if group.outputs[0].primitive is PROMPT_ATTENTION:
        return one_launch(_prompt_source(group))
    writer = _Writer(group)
    return writer.forward() if writer.primitive is ATTENTION else writer.backward()


class _Writer:
    """Writes the launches of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        node = group.outputs[0]
        self.primitive = node.primitive
        self._operands = node.inputs
        self._query, self._key, self._value = node.inputs[:3]
        self._batch, self._queries, self._heads, self._width = self._query.shape
        self._keys = self._key.shape[1]
        self._half = "true" if self._query.dtype == float16 else "false"
        self._causal = "true" if node.attributes["causal"] else "false"
        self._scale = f"(float){node.attributes['scale']!r}"
        self._parts = {output.attributes["part"]: number for number, output in enumerate(group.outputs)}
        self._scratch: list[int] = []

    # The passes

    def forward(self) -> Lowering:
        """A launch that computes the results, and the logarithm of the sum of each row."""
        lse = self._number("lse", self._rows * 4)
        outputs = [self._output("result", "result", self._query), self._of_rows("lse", lse)]
        launch = self._launch(_FORWARD, outputs, self._inputs(self._operands))
        return Lowering((launch,), tuple(self._scratch))

    def backward(self) -> Lowering:
        """Two launches: the gradients of queries with values for each row, and those of keys and values."""
        result, lse, slope = self._operands[3:]
        inputs = self._inputs((self._query, self._key, self._value, slope))
        rows = self._of_rows("rows", self._more(self._rows * 8), "(float2 *)rows")
        dq = self._output("dq", "query", self._query)
        dk = self._output("dk", "key", self._key)
        dv = self._output("dv", "value", self._value)
        of_queries = [self._of_rows("lse", self._input_number(lse)), self._input("result", result)]
        queries = self._launch(_QUERY_GRADIENTS, [dq, rows], [*inputs, *of_queries])
        keys = self._launch(_KEY_GRADIENTS, [dk, dv], [*inputs, rows])
        return Lowering((queries, keys), tuple(self._scratch))

    def _launch(self, kernel: _Pass, outputs: Sequence[_Parameter], inputs: Sequence[_Parameter]) -> Launch:
        """A pass over all heads and blocks of rows."""
        over_keys = kernel is _KEY_GRADIENTS
        tiling = kernel.narrow if self._width <= 64 else kernel.wide
        blocks = -(-(self._keys if over_keys else self._queries) // _BLOCK_ROWS)
        kind = f"{self._half}, {self._width}, {tiling.tile}, {tiling.stages}, {self._causal}"
        kind += f", {self._queries}, {self._keys}"
        # The blocks with the most keys come first, so that the last blocks to run are short.
        block = "block" if over_keys else f"{blocks - 1} - block"
        parameters = (*outputs, *inputs)
        arguments = ", ".join(parameter.argument for parameter in parameters)
        body = (
            f"    int block = GROUP(0) % {blocks}, head = GROUP(0) / {blocks} % {self._heads};\n"
            f"    long batch = GROUP(0) / {blocks * self._heads};\n"
            f"    attention_{kernel.name}<{kind}>({arguments}, {block}, {self._scale});\n"
        )
        declared_outputs, declared_inputs = (
            [(parameter.dtype, parameter.name) for parameter in side] for side in (outputs, inputs)
        )
        grid = blocks * self._heads * self._batch
        source = _source(kernel.name, body, declared_outputs, declared_inputs, grid, tiling)
        buffers = tuple(parameter.number for parameter in parameters)
        # For each product, the pairs of a query and a visible key, times the width.
        unseen = self._queries * (self._queries - 1) // 2 if self._causal == "true" else 0
        pairs = self._batch * self._heads * (self._queries * self._keys - unseen)
        return Launch(source, buffers, operations=2 * kernel.products * pairs * self._width)

    # Buffers, and where a head's matrices begin in them

    @property
    def _rows(self) -> int:
        return self._batch * self._heads * self._queries

    def _of_rows(self, name: str, number: int, pointer: str = "") -> _Parameter:
        """A buffer with values for each row."""
        first_row = f"(batch * {self._heads} + head) * {self._queries}"
        return _Parameter(name, number, f"{pointer or name} + {first_row}", "float32")

    def _output(self, name: str, part: str, like: Node) -> _Parameter:
        """An output of matrices; all outputs may be parts of a packed array."""
        if "packed" not in self._parts:
            offset, stride = _contiguous(like.shape)
            return _Parameter(name, self._number(part, like.nbytes), f"{name} + {offset}, {stride}")
        width = self._heads * self._width
        factors = {"batch": 3 * self._queries * width, "head": self._width}
        offset = _sum(GRADIENT_PARTS.index(part) * width, **factors)
        return _Parameter(name, self._parts["packed"], f"{name} + {offset}, {3 * width}")

    def _number(self, part: str, nbytes: int) -> int:
        return self._parts[part] if part in self._parts else self._more(nbytes)

    def _more(self, nbytes: int) -> int:
        """The index of a new scratch buffer."""
        self._scratch.append(nbytes)
        return len(self._group.outputs) + len(self._group.inputs) + len(self._scratch) - 1

    def _inputs(self, operands: Sequence[Node]) -> list[_Parameter]:
        """Queries, keys, values and perhaps gradients."""
        return [self._input(name, operand) for name, operand in zip("qkvg", operands, strict=False)]

    def _input(self, name: str, operand: Node) -> _Parameter:
        """An input of matrices."""
        if in_place := rows_index(operand, self._group.inputs):
            index = in_place[1]
            offset = _sum(index.constant, batch=index.factor("b0"), head=index.factor("i"))
            stride = index.factor("b1")
        else:
            offset, stride = _contiguous(operand.shape)
        return _Parameter(name, self._input_number(operand), f"Matrix{{{name} + {offset}, {stride}}}")

    def _input_number(self, operand: Node) -> int:
        source = operand_source(operand, self._group.inputs, rows_index)
        return len(self._group.outputs) + self._group.inputs.index(source)


# Prompts over pages


def _prompt_source(group: Group) -> KernelSource:
    """The kernel of queries that see the keys and values in pages up to positions of their own."""
    (node,) = group.outputs
    query, pages, table, positions = (_Operand(operand, group) for operand in node.inputs)
    rows, length, heads, width = node.shape
    _, count, key_heads, page, _ = pages.shape
    blocks, tiling = -(-length // _BLOCK_ROWS), _FORWARD.narrow if width <= 64 else _FORWARD.wide
    window, softcap, scale = (node.attributes[each] for each in ("window", "softcap", "scale"))
    half, capped = ("true" if each else "false" for each in (query.node.dtype == float16, softcap))
    keys = f"{pages.at(b2=f'(head / {heads // key_heads})')}, {table.at(i='batch')}"
    keys += f", {pages.stride('b1')}l, {pages.stride('i')}l, {pages.stride('b0')}l, {count}"
    offset, stride = _contiguous(node.shape)
    arguments = (
        f"out + {offset}, {stride}",
        f"Matrix{{{query.at(b0='batch', i='head')}, {query.stride('b1')}}}",
        f"Pages{{{keys}}}",
        positions.at(i="batch"),
        f"{blocks - 1} - block, (float){scale!r}, (float){softcap!r}",  # the longest come first, as above
    )
    kind = f"{half}, {width}, {tiling.tile}, {tiling.stages}, {length}, {page}, {window}, {capped}"
    body = (
        f"    int block = GROUP(0) % {blocks}, head = GROUP(0) / {blocks} % {heads};\n"
        f"    long batch = GROUP(0) / {blocks * heads};\n"
        f"    attention_from_prompt<{kind}>({', '.join(arguments)});\n"
    )
    inputs = [_bits(each) for each in group.inputs]
    named = [(dtype, f"in{number}") for number, dtype in enumerate(inputs)]
    return _source("from_prompt", body, [("uint16", "out")], named, blocks * heads * rows, tiling)


def _source(
    name: str,
    body: str,
    outputs: Sequence[tuple[str, str]],
    inputs: Sequence[tuple[str, str]],
    grid: int,
    tiling: _Tiling,
) -> KernelSource:
    """A kernel with this body and these buffers, given as (dtype, name)."""
    name = f"attention_{name}_{digest(f'{outputs} {inputs} {body} {tiling.groups}')}"
    text = f"{head(name, outputs, inputs)}{body}}}\n"
    dtypes = tuple(dtype for dtype, _ in (*outputs, *inputs))
    return KernelSource(name, text, dtypes, (), (grid,), (_BLOCK_THREADS,), resident=tiling.groups)


class _Operand:
    """Where a kernel finds the items of an operand: by views of an input of its group, or in an input."""

    def __init__(self, node: Node, group: Group) -> None:
        self.node, self.shape = node, node.shape
        source = operand_source(node, group.inputs, rows_index)
        self._name = f"in{group.inputs.index(source)}"
        in_place = rows_index(node, group.inputs)
        self._index = whole_index(node.shape) if in_place is None else in_place[1]

    def at(self, **digits: str) -> str:
        """The address of the first item, or of that at an index along some axes."""
        factors = {digit: self.stride(axis) for axis, digit in digits.items()}
        return f"{self._name} + {_sum(self._index.constant, **factors)}"

    def stride(self, axis: str) -> int:
        """The items from one to the next along an axis."""
        return self._index.factor(axis)


def _bits(node: Node) -> str:
    """The dtype in which a kernel has the items of an input."""
    return "uint16" if node.dtype in HALF_PRECISION else str(node.dtype)


def _contiguous(shape: Shape) -> tuple[str, int]:
    """Where the matrix of a head begins in a contiguous value, and the stride of its rows."""
    _, length, heads, width = shape
    return _sum(0, batch=length * heads * width, head=width), heads * width


def _sum(constant: int, **factors: int) -> str:
    parts = [str(constant)] if constant else []
    parts += [f"{name} * {factor}l" for name, factor in factors.items() if factor]
    return " + ".join(parts) or "0"
