"""What the loops of all kinds of group share: variables, tasks, vectors and stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import ZERO, Coords, Index, Variables, flat, variable
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import CAST
from penstock.graph.node import Shape
from penstock.kernels import ir
from penstock.kernels.lowering.blocks import LANES
from penstock.kernels.lowering.emitter import Emitter
from penstock.kernels.lowering.values import LanesImpossible, Merge, Value, merged

GROUP_THREADS = 256  # of a workgroup on a GPU
_TASKS = 4  # per compute unit of a CPU, so that none waits long for the last
_MIN_TASK = 4096  # items; less is not worth a thread of its own
_KEPT_BYTES = 1 << 15  # of a row, which should stay in a CPU's first-level cache
_UNROLLED = 4  # vectors of a map with few operations: more of its loads are under way at once
_MOST_UNROLLED = 8  # statements of the loop's body
_MANY_ITEMS = 128  # of an axis: those after its last vector, one by one, take little of the time


@dataclass(frozen=True)
class Lowered:
    """A group's kernel in the IR, and for each output the inputs that it may overwrite.

    `order` is that of a GPU's sums: how many threads share a row, the neighbours that each takes, and the
    rows that are processed at a time; or the threads that share a column, and 1 if their sums are added up
    one after the other, rather than in pairs.
    """

    kernel: ir.KernelIR
    may_alias: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] = ()


class LoopNest:
    """The base of the loops of each kind of group."""

    def __init__(
        self,
        group: Group,
        capabilities: Capabilities,
        lanes: int,
        splits: Sequence[tuple[str, int]],
        merges: list[Merge],
    ) -> None:
        self.group = group
        self.gpu = capabilities.vector_width == 1
        self.units = capabilities.compute_units
        self.max_threads = capabilities.max_group_size
        self.cache_bytes = capabilities.cache_bytes
        self.local_bytes = min(capabilities.local_bytes, _KEPT_BYTES)
        self.lanes = lanes
        self.turns = 1  # of a GPU's thread of a map: items, or vectors of neighbours, that it computes
        self.any_length = False  # whether a CPU's kernel has the loops that other lengths need, too
        self.streams = False  # whether a CPU writes whole vectors past its caches
        self.borders: Set[tuple[str, int]] = set()  # of variables, which vectors must not cross
        self.shared = False  # whether a GPU's kernel should be one of few, for all sizes
        self.order: tuple[int, ...] = ()  # of sums, where it is given: see `Lowered`
        self._splits = splits
        self._lengths: dict[str, int] = {}
        self._axes: list[list[str]] = []  # the variables of each call of `axes`
        self._stores: dict[int, tuple[int, Index]] = {}  # of each output: (stage, index)
        self.space()
        self.emitter = Emitter(group, Variables(self._lengths), vectors=not self.gpu)
        self.emitter.merges = merges
        self.emitter.kernel.quick = self.gpu and is_quick(group)
        for merge in merges:
            length = self._lengths[merge.outer] * merge.length
            self._lengths[merge.name] = self.emitter.variables.lengths[merge.name] = length

    def space(self) -> None:
        """Create the variables."""
        raise NotImplementedError

    def build(self) -> Lowered:
        """Build the kernel."""
        raise NotImplementedError

    # Variables

    def axes(self, prefix: str, lengths: Sequence[int]) -> tuple[list[str], Coords]:
        """Variables for axes, and the index along each; an axis that must be split has several variables."""
        names: list[str] = []
        indices: list[Index] = []
        for axis, length in enumerate(lengths):
            pieces = [(f"{prefix}{axis}_", length)] if length > 1 else []
            for name, inner in self._splits:
                for at, (piece, n) in enumerate(pieces):
                    if piece == name:
                        pieces[at : at + 1] = [(f"{name}o", n // inner), (f"{name}i", inner)]
            index, stride = ZERO, 1
            for name, n in reversed(pieces):
                index += variable(name) * stride
                stride *= n
            self._lengths.update(pieces)
            names += [name for name, _ in pieces]
            indices.append(index)
        self._axes.append(names)
        return names, tuple(indices)

    def reduction_axes(
        self, shape: Shape, axes: tuple[int, ...]
    ) -> tuple[list[str], list[str], Index, Index, Coords]:
        """Variables for the axes that a reduction keeps and for those that it reduces.

        Also the flat index of the result, that among the reduced items, and the coordinates of the item.
        """
        kept = tuple(1 if axis in axes else length for axis, length in enumerate(shape))
        reduced = tuple(length if axis in axes else 1 for axis, length in enumerate(shape))
        rows, row = self.axes("r", kept)
        columns, column = self.axes("c", reduced)
        coords = tuple(outer + inner for outer, inner in zip(row, column, strict=True))
        return rows, columns, flat(row, kept), flat(column, reduced), coords

    def merges(self) -> list[Merge]:
        """The neighbouring variables to merge, once everything was built without merging."""
        result: list[Merge] = []
        lengths = dict(self._lengths)
        for names in map(list, self._axes):
            at = len(names) - 2
            while at >= 0:
                outer, inner = names[at], names[at + 1]
                indices = [merged(index, result) for index in self.emitter.used]
                if all(index.factor(outer) == index.factor(inner) * lengths[inner] for index in indices):
                    merge = Merge(f"{outer}{inner}", outer, inner, lengths[inner])
                    lengths[merge.name] = lengths[outer] * lengths[inner]
                    names[at : at + 2] = [merge.name]
                    result.append(merge)
                at -= 1
        return result

    def joined(self, names: list[str]) -> list[str]:
        """Variables after merging."""
        result = list(names)
        for merge in self.emitter.merges:
            if merge.outer in result:
                at = result.index(merge.outer)
                result[at : at + 2] = [merge.name]
        return result

    def count(self, names: Sequence[str]) -> int:
        """How many combinations the variables have."""
        return math.prod(self._lengths[name] for name in names)

    def unpack(self, number: str, names: Sequence[str], depth: int) -> list[ir.Statement]:
        """Compute variables from their flat index."""
        self.emitter.depth_of.update(dict.fromkeys(names, depth))
        return unflattened(ir.Var(number), [(name, self._lengths[name], 1) for name in names])

    # Loops of a GPU

    def take_lanes(self, names: Sequence[str]) -> None:
        """Let a thread compute neighbours along the last variable, whose length must be a multiple."""
        if self.lanes > 1:
            if not names or self._lengths[names[-1]] % self.lanes:
                raise LanesImpossible
            self.emitter.lanes, self.emitter.lane_steps = self.lanes, {names[-1]: 1}

    # Loops of a CPU

    def tasks(self, count: int, items: int) -> int:
        """How many tasks share `count` equal parts with `items` items in total."""
        return max(1, min(count, self.units * _TASKS, items // _MIN_TASK))

    def fitting_lanes(self, length: int) -> int:
        """The widest vectors worth it along an axis: an item after the last may take as long as one."""
        divides = length % self.lanes == 0 and not self.any_length
        if self.lanes <= LANES or divides or length >= _MANY_ITEMS:
            return self.lanes
        return LANES

    def check_lanes(self, length: int) -> None:
        """Refuse vectors that are too wide for an axis."""
        if self.fitting_lanes(length) < self.lanes:
            raise LanesImpossible

    def vector_loops(
        self, name: str, first: ir.Operand, last: ir.Operand, exact: bool, body: Callable[[], None]
    ) -> list[ir.For]:
        """A loop over vectors of neighbouring items, and unless it is `exact`, a loop over the remainder."""
        emitter, lanes, exact = self.emitter, self.lanes, exact and not self.any_length
        emitter.depth_of[name] = 1
        result: list[ir.For] = []
        trips = last if isinstance(last, int) else 1
        start, stop = ir.integer(first), ir.integer(last)
        if lanes > 1:
            emitter.lanes, emitter.lane_steps = lanes, {name: 1}
            body()
            end, vectors = stop if exact else stop - (lanes - 1), emitter.leave()
            unrolled = self._unrolled(vectors)
            result.append(ir.loop(name, start, end, vectors, lanes, unrolled, trips // lanes))
            if exact:
                return result
            start, trips = start + (stop - start) // lanes * lanes, trips % lanes
        emitter.lanes, emitter.lane_steps = 1, {}
        body()
        result.append(ir.loop(name, start, stop, emitter.leave(), trips=trips))
        return result

    def _unrolled(self, body: Sequence[ir.Statement]) -> int:
        """The unroll factor of a loop over vectors."""
        costly = any(node.primitive.costly for node in self.group.nodes)
        few = self.group.kind.is_map and len(body) <= _MOST_UNROLLED and not costly
        return _UNROLLED if few else 0

    def together(self, names: Sequence[str]) -> list[str]:
        """The last variables whose items together fill vectors: as few as possible; none if they cannot."""
        inner = 1
        for at in reversed(range(len(names))):
            length = self._lengths[names[at]]
            if self.lanes % inner:
                break
            if inner * length % self.lanes == 0:
                return list(names[at:])
            inner *= length
        return []

    def lane_steps(self, names: Sequence[str]) -> dict[str, ir.Steps]:
        """How the variables that fill vectors together differ between lanes."""
        steps: dict[str, ir.Steps] = {}
        inner = 1
        for name in reversed(names):
            steps[name] = tuple(lane // inner % self._lengths[name] for lane in range(self.lanes))
            inner *= self._lengths[name]
        return steps

    def chunk(self, count: int, tasks: int, multiple: int = 1) -> list[ir.Statement]:
        """The range of a task: variables `begin` and `end`."""
        size = -(-count // (tasks * multiple)) * multiple
        self.emitter.kernel.grid = (-(-count // size),)
        return [
            ir.Let("begin", ir.WORKGROUP * size),
            ir.Let("end", at_most(ir.Var("begin"), size, ir.Const(count))),
        ]

    # Results

    def store(self, results: Sequence[tuple[int, Value, Index]]) -> None:
        """Write values to outputs; last in a body, so that nothing is read after it was overwritten."""
        emitter = self.emitter
        for number, value, index in results:
            place, depth, step = emitter.index(index)
            lanes = emitter.lanes if step else 1
            wide = emitter.widened(value, lanes)
            stored = str(self.group.outputs[number].dtype)
            aligned = emitter.aligned(index) if self.gpu and step == 1 else 1
            streamed = self.streams and lanes > 1 and emitter.aligned(index) == lanes
            emitter.bodies[max(depth, wide.depth)].append(
                ir.Store(wide.var, f"out{number}", stored, place, aligned, lanes, streamed)
            )
            self.note_store(number, index)

    def note_store(self, number: int, index: Index) -> None:
        """Note where an output is written, and in which stage."""
        self._stores[number] = (self.emitter.stage, index)

    def may_alias(self) -> tuple[tuple[int, ...], ...]:
        """For each output the inputs that it may overwrite, once everything is built."""
        return overwritable(self.group, self.emitter.loads, self._stores)

    def lowered(self) -> Lowered:
        """The result, once everything is built."""
        return Lowered(self.emitter.kernel, self.may_alias(), self.order)


def at_most(begin: ir.Expr, size: int, limit: ir.Expr) -> ir.Expr:
    """The end of a part of `size` items, at most the limit."""
    return ir.Select(ir.INT, limit - begin < size, limit, begin + size)


def unflattened(number: ir.Expr, variables: Sequence[tuple[str, int, int]]) -> list[ir.Statement]:
    """Compute variables, (name, length, step), from their flat index; the last changes fastest."""
    result: list[ir.Statement] = []
    stride = 1
    for at, (name, length, step) in reversed([*enumerate(variables)]):
        value = number if stride == 1 else number // stride
        value = value if at == 0 else value % length
        result.append(ir.Let(name, value if step == 1 else value * step))
        stride *= length
    return result


def is_quick(group: Group) -> bool:
    """Whether all large inputs are float16 and bfloat16, so that quick functions are precise enough.

    A single operation in the place of such a kernel says so.
    """
    if any("quick" in node.attributes for node in group.nodes):
        return True
    if any(node.primitive is CAST and node.inputs[0].dtype.kind in "iu" for node in group.nodes):
        return False
    size = max((node.size for node in group.inputs), default=0)
    large = [node for node in group.inputs if 2 * node.size > size and node.dtype.kind == "f"]
    return bool(large) and all(node.dtype in HALF_PRECISION for node in large)


def overwritable(
    group: Group, loads: Mapping[int, set[tuple[int, Index]]], stores: Mapping[int, tuple[int, Index]]
) -> tuple[tuple[int, ...], ...]:
    """For each output the inputs that it may overwrite: each item is read only where it is written.

    Loads and stores are given as (stage, index).
    """

    def may_alias(output: int, given: int) -> bool:
        (stage, index), node, source = stores[output], group.outputs[output], group.inputs[given]
        # Of the same dtype, since a compiler may assume that others do not alias, and reorder their accesses.
        alike = source.dtype == node.dtype and source.size == node.size
        return alike and all(read == index and when <= stage for when, read in loads.get(given, ()))

    outputs, inputs = range(len(group.outputs)), range(len(group.inputs))
    return tuple(tuple(given for given in inputs if may_alias(output, given)) for output in outputs)
