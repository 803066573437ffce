"""From a group to the IR of its kernel."""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import SplitNeeded
from penstock.fusion.kinds import GroupKind
from penstock.graph.contraction import GATHER
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.c_expressions import has_vectors
from penstock.kernels.lowering.blocks import LANES
from penstock.kernels.lowering.column_loops import ColumnLoops
from penstock.kernels.lowering.loop_nest import LoopNest, Lowered
from penstock.kernels.lowering.map_loops import MapLoops
from penstock.kernels.lowering.row_loops import RowLoops
from penstock.kernels.lowering.tiled_loops import TiledLoops
from penstock.kernels.lowering.values import BorderCrossed, LanesImpossible, computed_dtype
from penstock.kernels.source import item_size

_ITEM = 4  # bytes of an item, of which a CPU's vector register holds `vector_width`
_ACCESS = 16  # bytes that a thread of a GPU reads or writes at once
_WORD = 4  # the same in WGSL
_FEW_ITEMS = 1 << 14  # that a CPU computes in about the time of a launch
_MOST_BORDERS = 8  # that divide the loop of a CPU's kernel: its code is written out between each two
_BUSY = 512  # threads per compute unit of a GPU; with fewer, it idles while it waits for memory
_FEW_OUTPUTS = 4  # of a group whose results stay in registers until all are computed
LOOPS: dict[GroupKind, type[LoopNest]] = {
    GroupKind.MAP: MapLoops,
    GroupKind.ROW: RowLoops,
    GroupKind.COLUMN: ColumnLoops,
}


def lower(group: Group, capabilities: Capabilities, varied: bool = False, shared: bool = False) -> Lowered:
    """The kernel of a group that has loops, for the shape that it has.

    `varied`: with others of its size in mind, if it takes so little time that a compiler's is more.
    `shared`: of a single operation, one of few for all sizes.
    """
    gpu = capabilities.vector_width == 1
    largest = max(node.size for node in (*group.outputs, *group.inputs))
    any_length = varied and not gpu and not shared and largest <= _FEW_ITEMS
    shared = shared and gpu  # on a CPU, all kernels are alike
    order: tuple[int, ...] = next(
        (node.attributes["order"] for node in group.nodes if "order" in node.attributes), ()
    )
    wanted = lanes = _thread_lanes(group, capabilities) if gpu else _vector_lanes(group, capabilities)
    if shared:
        wanted = lanes = order[1] if len(order) > 1 else 1
    word_access = dialect_of(capabilities).word_access
    splits: list[tuple[str, int]] = []
    borders: set[tuple[str, int]] = set()  # of variables, which vectors must not cross
    loops = LOOPS[group.kind]
    trial: LoopNest | None = None  # of single items, which shows what variables are for
    while True:
        try:
            if trial is None:
                trial = loops(group, capabilities, 1, splits, [])
                trial.shared, trial.order, trial.any_length = shared, order, any_length
                lowered = trial.build()
                merges = trial.merges()
            if group.kind.is_map and (lanes == 1 or not word_access) and not shared:
                tiled = TiledLoops(group, capabilities, 1 if gpu else lanes, splits, merges)
                if tiled.finds_use(trial):
                    return tiled.build()
            by_turns = gpu and group.kind.is_map and not shared
            turns = _turns(group, lanes, wanted, capabilities) if by_turns else 1
            if lanes == turns == 1 and not merges and not borders:
                return lowered  # it would be the same again
            nest = loops(group, capabilities, lanes, splits, merges)
            nest.borders, nest.shared, nest.order, nest.turns = borders, shared, order, turns
            nest.any_length = any_length
            return nest.build()
        except BorderCrossed as crossed:
            known = len(borders)
            borders.update((crossed.name, border) for border in crossed.borders)
            if gpu or not group.kind.is_map or not known < len(borders) <= _MOST_BORDERS:
                lanes = _fewer(lanes, gpu)
                borders.clear()
        except SplitNeeded as needed:
            splits.append((needed.name, needed.inner))
            trial = None
        except LanesImpossible:
            lanes = _fewer(lanes, gpu)
            borders.clear()  # which single items cannot cross


def _vector_lanes(group: Group, capabilities: Capabilities) -> int:
    """The width of a CPU's vectors: twice `LANES` where a register holds as many items of each dtype."""
    dtypes = {computed_dtype(node) for node in (*group.nodes, *group.inputs)}
    if not all(map(has_vectors, dtypes)):
        return 1
    widest = max(map(item_size, dtypes))
    return 2 * LANES if capabilities.vector_width * _ITEM >= 2 * LANES * widest else LANES


def _fewer(lanes: int, gpu: bool) -> int:
    """The next smaller width to try."""
    return lanes // 2 if gpu or lanes > LANES else 1


def _thread_lanes(group: Group, capabilities: Capabilities) -> int:
    """How many neighbours a thread of a GPU computes: as many as it reads at once of the large values."""
    values = (*group.outputs, *group.inputs)
    size = max(node.size for node in values)
    large = [node for node in values if 2 * node.size > size]
    if dialect_of(capabilities).word_access:
        # A word at a time, so that neighbouring threads have neighbouring words, and share none.
        return max(1, *(_WORD // node.dtype.itemsize for node in (*large, *group.outputs)))
    narrow = sum(node.nbytes for node in large if node.dtype.itemsize <= 2)
    wide = sum(node.nbytes for node in large if node.dtype.itemsize == 8)
    total = sum(node.nbytes for node in large)
    lanes = _ACCESS // (2 if 2 * narrow >= total else 8 if 2 * wide > total else 4)
    while group.kind.is_map and lanes > 1 and size // lanes < _BUSY * capabilities.compute_units:
        lanes //= 2
    return lanes


def _turns(group: Group, lanes: int, wanted: int, capabilities: Capabilities) -> int:
    """How many vectors a thread of a GPU computes, each as far from the last as a workgroup is wide.

    Where items are no neighbours in memory, as many as it would have as neighbours. Two where it must wait
    for an index before it can read.
    """
    turns = wanted // lanes
    if turns == 1 and any(node.primitive is GATHER for node in group.nodes):
        turns = 2
    size = max(node.size for node in group.outputs) // lanes
    busy = size // turns >= _BUSY * capabilities.compute_units
    return turns if busy and len(group.outputs) <= _FEW_OUTPUTS else 1
