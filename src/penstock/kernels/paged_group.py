"""A step of attention to pages, with what computes its queries, keys and values from the group's inputs."""

from __future__ import annotations

from typing import Literal

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import ZERO, Variables, variable
from penstock.fusion.views import base
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import MANY_STEPS
from penstock.kernels.lowering.emitter import Emitter
from penstock.kernels.templates.launches import Launch, Lowering
from penstock.kernels.templates.paged_attention import on_gpu
from penstock.kernels.templates.paged_units import Sizes, Unit, combined, combining, sizes_of
from penstock.kernels.templates.update import copying

_NAMES = ("own_row", "own_head", "own_item")  # the variables of an operand's items


def paged_group(group: Group, capabilities: Capabilities) -> Lowering:
    """The kernels of a step: its splits, which also put the new positions, and what combines them.

    Unless the pages after the step lie where those before it did, they are copied, by a kernel of its own
    where the steps of a kernel are bounded.
    """
    parts = {node.attributes["part"]: at for at, node in enumerate(group.outputs)}
    node = group.outputs[0]
    query, _, _, pages, table, positions, slots, *counters = node.inputs
    sizes = sizes_of(query, pages, table, node.attributes, capabilities)
    kernel = Emitter(group, Variables({})).kernel
    counts = [node for node in counters if node.size >= sizes.units and sizes.stores_splits]
    counts = counts if dialect_of(capabilities).device_atomics else []
    results = [sizes.type] * 2 if sizes.stores_splits else [sizes.dtype]
    outputs = [*results, *[sizes.dtype] * (("pages" in parts) + len(counts))]
    k = KernelBuilder("step_over_pages", capabilities, outputs, kernel.inputs, kernel.scalars)
    numbers = [group.inputs.index(base(operand)) for operand in (pages, table, positions, slots)]
    *memories, own_slots = (k.inputs[number] for number in numbers)
    target = k.outputs[len(results)] if "pages" in parts else None
    copies = target is not None and dialect_of(capabilities).most_steps(capabilities) == MANY_STEPS
    known = [group.inputs.index(base(counter)) for counter in counts]
    counter = k.inputs[known[0]] if known else None
    step = _Operands(group, node, (*memories, own_slots), target, copies, counter)
    source = on_gpu(k, sizes, capabilities, memories, step)
    inputs = [len(group.outputs) + at for at in range(len(group.inputs))]
    first_scratch = len(group.outputs) + len(group.inputs)
    scratch = list(sizes.scratch)
    if "result" not in parts:
        scratch.append(query.nbytes)
    result = parts.get("result", first_scratch + len(scratch) - 1)
    written = [first_scratch, first_scratch + 1] if sizes.stores_splits else [result]
    launches = []
    may_alias: list[tuple[int, ...]] = [() for _ in group.outputs]
    if "pages" in parts:
        may_alias[parts["pages"]] = (numbers[0],)
        written.append(parts["pages"])
        if not copies:
            copy = copying(pages, capabilities, kernel.scalars)
            launches.append(Launch(copy, (parts["pages"], inputs[numbers[0]]), operations=0))
    launches.append(Launch(source, (*written, *[result] * len(known), *inputs)))
    if sizes.stores_splits and not known:
        launches.append(
            Launch(
                combining(sizes, capabilities, kernel.scalars),
                (result, first_scratch, first_scratch + 1),
                operations=0,
            )
        )
    return Lowering(tuple(launches), tuple(scratch), may_alias=tuple(may_alias), restores=tuple(known))


class _Operands:
    """Queries, keys and values that each workgroup computes in its local memory."""

    def __init__(
        self,
        group: Group,
        node: Node,
        memories: tuple[Memory, ...],
        target: Memory | None,
        copies: bool,
        counter: Memory | None,
    ) -> None:
        """`memories` are those of pages, table, positions and slots; `copies`: `put` copies other rows.

        With a `counter`, the last workgroup of a unit combines its splits.
        """
        self._counter = counter
        self._group, self._node, self._target, self._copies = group, node, target, copies
        self._pages, self._table, self._positions, self._slots = memories

    def wait(self, k: KernelBuilder) -> None:
        """See `Step`. Who writes pages meanwhile is the kernel itself, at positions that it does not read."""
        k.wait_for_earlier((self._pages, self._table, self._positions, self._slots))

    def begin(self, k: KernelBuilder, sizes: Sizes, unit: Unit, threads: int, padded: int) -> None:
        """See `Step`."""
        self._sizes, self._threads, self._padded = sizes, threads, padded
        # Each warp waits for as few of them as possible.
        self._queries = self._filled(k, "queries", 0, unit.row, unit.head, sizes.together, 0)
        self._key = self._filled(k, "key", 1, unit.row, unit.key_head, 1, threads // 2)
        self._value = self._filled(k, "value", 2, unit.row, unit.key_head, 1, threads // 4)
        k.barrier()

    def _filled(
        self, k: KernelBuilder, name: str, operand: int, row: ir.Expr, head: ir.Expr, heads: int, before: int
    ) -> Memory:
        """Some heads of an operand, from `head` on, in local memory; the last `before` threads come first."""
        size, padded = self._sizes.size, self._padded
        memory = k.shared(f"own_{name}", self._sizes.type, heads * padded)
        start = (k.thread + before) % self._threads if before else k.thread
        with k.loop(f"item_of_{name}", start, heads * padded, self._threads) as item:
            column = k.let(f"column_of_{name}", item % padded)
            if padded > size:
                k.store(memory, item, 0.0)
            with k.when(column < size):
                statements, value = self._item(operand, row, head + item // padded, column)
                k.splice(statements)
                k.store(memory, item, value)
        return memory

    def _item(
        self, operand: int, row: ir.Expr, head: ir.Expr, column: ir.Expr
    ) -> tuple[list[ir.Statement], ir.Expr]:
        """What computes an item of an operand, rounded to its dtype as it would be in memory."""
        node, dtype = self._node.inputs[operand], self._sizes.dtype
        lengths = (node.shape[0], node.shape[2], node.shape[3])
        variables = Variables(dict(zip(_NAMES, lengths, strict=True)), splittable=False)
        emitter = Emitter(self._group, variables, vectors=False)
        emitter.depth_of = dict.fromkeys(_NAMES, 1)
        at_row, at_head, at_item = map(variable, _NAMES)
        value = emitter.value(node, (at_row, ZERO, at_head, at_item)).var
        counts = [ir.Let(name, at) for name, at in zip(_NAMES, (row, head, column), strict=True)]
        if dtype in ir.HALF_PRECISION:
            value = ir.Call(value.type, f"round_{dtype}", (value,), value.type)
        return [*counts, *emitter.bodies[0], *emitter.bodies[1]], value

    def _read(self, k: KernelBuilder, name: str, memory: Memory, index: ir.Expr, width: int) -> ir.Var:
        return k.let(name, k.vector([k.load(memory, index + lane) for lane in range(width)]))

    def query(self, k: KernelBuilder, head: int, column: ir.Expr, width: int) -> ir.Var:
        """See `Step`."""
        return self._read(k, f"query{head}", self._queries, column + head * self._padded, width)

    def item(
        self, k: KernelBuilder, name: Literal["queries", "key", "value"], head: ir.Expr, column: ir.Expr
    ) -> ir.Expr:
        """See `Step`."""
        memory = {"queries": self._queries, "key": self._key, "value": self._value}[name]
        return k.load(memory, head * self._padded + column)

    def puts(self, k: KernelBuilder, unit: Unit) -> ir.Expr:
        """See `Step`."""
        return k.select(k.load(self._slots, unit.row) >= 0, 1, 0)

    def pair(self, k: KernelBuilder, column: ir.Expr, width: int) -> tuple[ir.Var, ir.Var]:
        """See `Step`."""
        key = self._read(k, "new_key", self._key, column, width)
        return key, self._read(k, "new_value", self._value, column, width)

    def put(self, k: KernelBuilder, unit: Unit, last: ir.Expr, condition: ir.Expr) -> None:
        """See `Step`. Of several workgroups with the same head of keys, the first puts it."""
        sizes = self._sizes
        if self._target is None:
            return
        first = (unit.head % (sizes.heads // sizes.key_heads)).eq(0)
        known = k.load_index(self._table, unit.row * sizes.width + last // sizes.page, sizes.pages) >= 0
        with k.when(condition & first & known):
            place = k.let("new_place", unit.place(last))
            with k.loop("put", k.thread, sizes.size, self._threads) as item:
                k.store(self._target, place + item, k.load(self._key, item))
                k.store(self._target, place + (item + unit.values), k.load(self._value, item))

        if self._copies:
            with k.when(~k.same_memory(self._target, self._pages)):
                self._copy_others(k, self._target)

    def finish(self, k: KernelBuilder, unit: Unit) -> None:
        """See `Step`."""
        sizes = self._sizes
        if self._counter is None:
            return
        last = k.comes_last("comes_last", self._counter, unit.number, sizes.splits)
        with (
            k.when(last.ne(0)),
            k.loop("combined", k.thread, sizes.together * sizes.size, self._threads) as item,
        ):
            task = k.let("combined_item", unit.head_row(0) * sizes.size + item)
            k.store(k.outputs[-1], task, combined(k, sizes, task, *k.outputs[:2]))

    def _copy_others(self, k: KernelBuilder, target: Memory) -> None:
        """Copy the rows of all pages that no sequence puts; all workgroups together."""
        sizes = self._sizes
        rows, threads = (
            2 * sizes.pages * sizes.key_heads * sizes.page,
            sizes.units * sizes.splits * self._threads,
        )
        with k.loop("copied", k.group() * self._threads + k.thread, rows, threads) as copied:
            page = k.let("copied_page", copied // (sizes.key_heads * sizes.page) % sizes.pages)
            stays = k.variable("stays", 1)
            with k.loop("other", 0, sizes.rows) as other:
                position = k.let("put_position", k.load(self._positions, other))
                at = other * sizes.width + position // sizes.page
                own = k.let("put_page", k.load_index(self._table, at, sizes.pages))
                same = own.eq(page) & (position % sizes.page).eq(copied % sizes.page)
                puts = k.load(self._slots, other) >= 0
                k.assign(stays, k.select(same & puts, 0, stays))
            with k.when(stays.ne(0)), k.loop("copied_item", 0, sizes.size) as item:
                place = k.let("copied_place", copied * sizes.size + item)
                k.store(target, place, k.load(self._pages, place))
