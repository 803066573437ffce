"""A row of 16-bit floats, such as a norm, that a kernel computes before anything else.

Every workgroup has a copy of it in local memory, as words of two items.
"""

from __future__ import annotations

from penstock.fusion.groups import Group
from penstock.fusion.index import Variables, variable
from penstock.graph.node import Kind, Node
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.lowering.emitter import Emitter
from penstock.kernels.lowering.values import Value, computed_dtype
from penstock.kernels.rewriting import divided

_WARP = 32
_AT = "own_item"  # the first item of a thread
_ALIGNED = 4  # words of local memory that are read at once


class RowPrologue:
    """What computes a row of a group in local memory: each thread some neighbouring items."""

    def __init__(self, group: Group, row: Node) -> None:
        self._group, self._row = group, row
        self.reads: set[int] = set()  # inputs of the group, by number

    def emit(self, k: KernelBuilder, threads: int) -> Memory:
        """The row, which all of `threads` see after its statements."""
        lanes = 2
        while lanes * threads < self._row.size:
            lanes *= 2
        emitter = Emitter(self._group, Variables({_AT: self._row.size}, splittable=False), vectors=False)
        emitter.prefix, emitter.depth_of, emitter.lanes = "own_", {_AT: 1}, lanes
        emitter.lane_steps = {_AT: 1} if lanes > 1 else {}
        reductions = self._reductions()
        names = {node: f"whole_row{number}" for number, node in enumerate(reductions)}
        for node, name in names.items():
            emitter.given[node] = Value(ir.Var(name, ir.Type(computed_dtype(node))), 1)
        reduced = [emitter.at_number(node.inputs[0], variable(_AT)) for node in reductions]
        result = emitter.at_number(self._row, variable(_AT)).var
        assert isinstance(result, ir.Var)
        self.reads = set(emitter.loads)
        inside = k.let("has_items", k.thread * lanes < self._row.size)
        at = k.let(_AT, k.call("minimum", k.thread * lanes, self._row.size - lanes))
        later = [*emitter.bodies[0], *emitter.bodies[1]]
        unknown = set(names.values())
        for node, value in zip(reductions, reduced, strict=True):
            # What does not depend on the reduction, such as the weights of a norm, is read before it.
            ready, later = divided(later, unknown)
            k.splice(ready)
            self._reduce(k, node, names[node], value, inside, threads)
            unknown.discard(names[node])
        k.splice(later)
        memory = k.shared("own_row", "uint32", self._row.size // 2, width=_ALIGNED)
        with k.when(inside):
            for lane in range(0, lanes, 2):
                both = k.lane(result, lane), k.lane(result, lane + 1)
                word = k.call(f"paired_{self._row.dtype}", *both, dtype="uint32")
                k.store(memory, at // 2 + lane // 2, word)
        k.barrier()
        return memory

    def _reductions(self) -> list[Node]:
        """The reductions that the row is computed from, in order."""
        needed: set[Node] = set()
        stack = [self._row]
        while stack:
            node = stack.pop()
            if node not in needed and node not in self._group.inputs and node.value is None:
                needed.add(node)
                stack += node.inputs
        return [
            node for node in self._group.nodes if node in needed and node.primitive.kind is Kind.REDUCTION
        ]

    def _reduce(
        self, k: KernelBuilder, node: Node, name: str, value: Value, inside: ir.Expr, threads: int
    ) -> None:
        """Reduce a value of all threads; a workgroup may have any number of warps."""
        operation, dtype, warps = node.primitive.name, value.type.dtype, threads // _WARP
        part = k.variable(f"{name}_part", k.identity(operation, dtype, value.type.width))
        with k.when(inside):
            k.assign(part, value.var)
        own = k.block_reduce(f"{name}_own", operation, part, threads, _WARP)
        parts = k.shared(f"{name}_parts", dtype, warps)
        with k.when((k.thread % _WARP).eq(0)):
            k.store(parts, k.thread // _WARP, own)
        k.barrier()
        whole = k.variable(name, k.identity(operation, dtype))
        with k.loop(f"{name}_warp", 0, warps, unrolled=warps) as warp:
            k.accumulate(whole, operation, k.load(parts, warp))
