"""From a group to its loop form: which thread computes what, in which loops, and where every item lies."""

from __future__ import annotations

from penstock.device.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.index import SplitNeeded
from penstock.kernels.c_expressions import has_vectors
from penstock.kernels.column_loops import ColumnLoops
from penstock.kernels.loop_nest import LoopNest, Lowered
from penstock.kernels.map_loops import MapLoops
from penstock.kernels.row_loops import RowLoops
from penstock.kernels.scopes import LanesImpossible, computed_dtype

_LANES = 8  # PoCL names 16 on CPUs with registers for 8, and its functions of 16 crash its compiler
_KINDS: dict[str, type[LoopNest]] = {"map": MapLoops, "row": RowLoops, "column": ColumnLoops}


def lower(group: Group, capabilities: Capabilities) -> Lowered:
    """The loop form of a map, row or column group. (A matmul's is made around its template.)"""
    vectors = all(has_vectors(computed_dtype(node)) for node in (*group.nodes, *group.inputs))
    lanes = _LANES if capabilities.vector_width > 1 and vectors else 1
    splits: list[tuple[str, int]] = []
    kind = _KINDS[group.kind]
    while True:
        try:
            trial = kind(group, capabilities, 1, splits, [])
            trial.write()
            final = kind(group, capabilities, lanes, splits, trial.merges())
            return final.write()
        except SplitNeeded as needed:
            splits.append((needed.name, needed.inner))
        except LanesImpossible:
            lanes = 1
