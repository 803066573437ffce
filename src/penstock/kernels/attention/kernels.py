"""What computes a group of attention on a CUDA device: its launches, with sizes and strides as constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.fusion.groups import Group
from penstock.fusion.views import base, rows_index
from penstock.graph.attention import ATTENTION, GRADIENT_PARTS
from penstock.graph.dtypes import float16
from penstock.graph.node import Node, Shape
from penstock.kernels.attention.source import ATTENTION_PASSES
from penstock.kernels.attention.tensor_tiles import TENSOR_TILES
from penstock.kernels.source import KernelSource, head
from penstock.kernels.templates.launches import Launch, TemplateLaunches

ATTENTION_PRELUDE = TENSOR_TILES + ATTENTION_PASSES
_BLOCK_ROWS, _BLOCK_THREADS = 64, 128  # of a group: four warps with 16 rows each


@dataclass(frozen=True)
class Tiling:
    """How a pass goes over the other side."""

    tile: int  # rows at a time
    groups: int  # that a multiprocessor should have registers for
    stages: int  # tiles that are in shared memory: one is used while the others are copied


def forward_tiling(width: int) -> Tiling:
    """Of the pass forward."""
    return Tiling(64, 4, 3) if width <= 64 else Tiling(32, 2, 3)


def key_tiling(width: int) -> Tiling:
    """Of the gradients of keys and values, which want the most registers."""
    return Tiling(32, 3, 4) if width <= 64 else Tiling(16, 2, 4)


def query_tiling(width: int) -> Tiling:
    """Of the gradients of queries."""
    return Tiling(64, 3, 3) if width <= 64 else Tiling(32, 2, 3)


@dataclass(frozen=True)
class _Parameter:
    """A buffer of a kernel: its name there, and its number among those of the group."""

    name: str
    number: int
    dtype: str = "uint16"  # float16 or bfloat16, as bits

    @property
    def declared(self) -> tuple[str, str]:
        """Dtype and name."""
        return self.dtype, self.name


def attention_kernels(group: Group, ending: str) -> TemplateLaunches:
    """The launches of a group, in kernels with names of this ending; what is not wanted goes to scratch."""
    writer = _Writer(group, ending)
    return writer.forward() if writer.primitive is ATTENTION else writer.backward()


class _Writer:
    """Writes the launches of one group."""

    def __init__(self, group: Group, ending: str) -> None:
        self._group = group
        self._ending = ending
        node = group.outputs[0]
        self.primitive = node.primitive
        self._operands = node.inputs
        self._query, self._key, self._value = node.inputs[:3]
        self._batch, self._queries, self._heads, self._width = self._query.shape
        self._keys = self._key.shape[1]
        self._half = "true" if self._query.dtype == float16 else "false"
        self._causal = "true" if node.attributes["causal"] else "false"
        self._scale = f"(float){node.attributes['scale']!r}"
        self._parts = {one.attributes["part"]: number for number, one in enumerate(group.outputs)}
        self._scratch: list[int] = []

    # The passes

    def forward(self) -> TemplateLaunches:
        """One launch: the results, and the logarithm of the sum of each row."""
        result = self._output("result", "result", self._query)
        lse = _Parameter("lse", self._number("lse", self._rows * 4), "float32")
        inputs = [self._input(name, one) for name, one in zip("qkv", self._operands, strict=True)]
        tiling = forward_tiling(self._width)
        arguments = [
            *self._target(result, "result", self._query.shape),
            f"lse + {self._row_place}",
            *(self._matrix(one.name, operand) for one, operand in zip(inputs, self._operands, strict=True)),
        ]
        # The blocks with the most keys come first, so that the last ones to run are short.
        launch = self._launch("forward", [result, lse], inputs, tiling, self._queries, arguments, True)
        return TemplateLaunches((launch,), tuple(self._scratch))

    def backward(self) -> TemplateLaunches:
        """Two launches: gradients of queries, and what is needed of each row; those of keys and values."""
        result, lse, slope = self._operands[3:]
        operands = (self._query, self._key, self._value, slope)
        inputs = [self._input(name, one) for name, one in zip("qkvg", operands, strict=True)]
        matrices = [self._matrix(name, one) for name, one in zip("qkvg", operands, strict=True)]
        rows = _Parameter("rows", self._more(self._rows * 8), "float32")
        row = f"(float2 *)rows + {self._row_place}"
        dq = self._output("dq", "query", self._query)
        dk = self._output("dk", "key", self._key)
        dv = self._output("dv", "value", self._value)
        to_query = self._target(dq, "query", self._query.shape)
        of_rows = [row, f"lse + {self._row_place}", *matrices, self._matrix("result", result)]
        more = [self._input("lse", lse, "float32"), self._input("result", result)]
        queries = self._launch(
            "query_gradients",
            [dq, rows],
            [*inputs, *more],
            query_tiling(self._width),
            self._queries,
            [*to_query, *of_rows],
            True,
        )
        to_keys = [*self._target(dk, "key", self._key.shape), *self._target(dv, "value", self._key.shape)]
        keys = self._launch(
            "key_gradients",
            [dk, dv],
            [*inputs, rows],
            key_tiling(self._width),
            self._keys,
            [*to_keys, *matrices, row],
            False,
        )
        return TemplateLaunches((queries, keys), tuple(self._scratch))

    # Their launches

    def _launch(
        self,
        name: str,
        outputs: Sequence[_Parameter],
        inputs: Sequence[_Parameter],
        tiling: Tiling,
        rows: int,
        arguments: Sequence[str],
        backwards: bool,
    ) -> Launch:
        """A pass over all heads and blocks of rows."""
        blocks = -(-rows // _BLOCK_ROWS)
        kind = f"{self._half}, {self._width}, {tiling.tile}, {tiling.stages}, {self._causal}"
        kind += f", {self._queries}, {self._keys}"
        block = f"{blocks - 1} - block" if backwards else "block"
        body = (
            f"    int block = GROUP(0) % {blocks}, head = GROUP(0) / {blocks} % {self._heads};\n"
            f"    long batch = GROUP(0) / {blocks * self._heads};\n"
            f"    attention_{name}<{kind}>({', '.join(arguments)}, {block}, {self._scale});\n"
        )
        name = f"attention_{name}_{self._ending}"
        parameters = (*outputs, *inputs)
        text = head(name, [one.declared for one in outputs], [one.declared for one in inputs])
        bounds = f"__launch_bounds__({_BLOCK_THREADS}, {tiling.groups}) "
        text = text.replace(f"KERNEL {name}(", f"KERNEL {bounds}{name}(") + body + "}\n"
        dtypes = tuple(one.dtype for one in parameters)
        grid = (blocks * self._heads * self._batch,)
        source = KernelSource(name, text, dtypes, (), grid, (_BLOCK_THREADS,))
        return Launch(source, tuple(one.number for one in parameters))

    # Buffers, and where a head's matrices begin in them

    @property
    def _rows(self) -> int:
        return self._batch * self._heads * self._queries

    @property
    def _row_place(self) -> str:
        return f"(batch * {self._heads} + head) * {self._queries}"

    def _output(self, name: str, part: str, like: Node) -> _Parameter:
        number = self._parts["packed"] if "packed" in self._parts else self._number(part, like.nbytes)
        return _Parameter(name, number)

    def _number(self, part: str, nbytes: int) -> int:
        return self._parts[part] if part in self._parts else self._more(nbytes)

    def _more(self, nbytes: int) -> int:
        """The number of one more scratch buffer."""
        self._scratch.append(nbytes)
        return len(self._group.outputs) + len(self._group.inputs) + len(self._scratch) - 1

    def _input(self, name: str, operand: Node, dtype: str = "uint16") -> _Parameter:
        found = rows_index(operand, self._group.inputs)
        source = base(operand) if found is None else found[0]
        return _Parameter(name, len(self._group.outputs) + self._group.inputs.index(source), dtype)

    def _target(self, parameter: _Parameter, part: str, shape: Shape) -> list[str]:
        """The matrix of a head in an output, as two arguments."""
        offset, stride = _contiguous(shape)
        if "packed" in self._parts:
            width = self._heads * self._width
            factors = {"batch": 3 * self._queries * width, "head": self._width}
            offset, stride = _sum(GRADIENT_PARTS.index(part) * width, **factors), 3 * width
        return [f"{parameter.name} + {offset}", str(stride)]

    def _matrix(self, name: str, operand: Node) -> str:
        """The matrix of a head in an input, as one argument."""
        offset, stride = self._place(operand)
        return f"Matrix{{{name} + {offset}, {stride}}}"

    def _place(self, operand: Node) -> tuple[str, int]:
        found = rows_index(operand, self._group.inputs)
        if found is None:
            return _contiguous(operand.shape)
        _, index = found
        return _sum(index.constant, batch=index.factor("b0"), head=index.factor("i")), index.factor("b1")


def _contiguous(shape: Shape) -> tuple[str, int]:
    """Where the matrix of a head begins in a contiguous value, and how far its rows are apart."""
    _, length, heads, width = shape
    return _sum(0, batch=length * heads * width, head=width), heads * width


def _sum(constant: int, **factors: int) -> str:
    parts = [str(constant)] if constant else []
    parts += [f"{name} * {factor}l" for name, factor in factors.items() if factor]
    return " + ".join(parts) or "0"
