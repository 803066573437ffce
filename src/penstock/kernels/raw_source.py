"""Texts of users' own kernels: what Penstock adds around a body, so that the body stays plain.

These are the parameters, with the types of the tensors, and names that the body may use in every language:
`i`, the index of the thread, where threads are independent; `GROUP_0` to `GROUP_2`, `GROUPS_0`, `THREAD` and
`THREADS`; for each array `x` the constants `x_size`, `x_shape_0` and so on, and the type `x_type`; in C
`LOCAL` and `BARRIER`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.drivers.driver import Capabilities
from penstock.errors import CompileError
from penstock.graph.dtypes import DType
from penstock.graph.node import Node
from penstock.graph.raw import RawLaunch
from penstock.kernels.dialects import DIALECTS, dialect_of
from penstock.kernels.dialects.dialect import RawKernel
from penstock.kernels.source import KernelSource

if TYPE_CHECKING:
    from penstock.fusion.groups import Group

LANGUAGES = {name: dialect.label for name, dialect in DIALECTS.items()}
_SCALARS = ("int32", "uint32", "int64", "uint64", "float32", "float64")
_WORDS = ("i", "GROUP_0", "GROUP_1", "GROUP_2", "GROUPS_0", "THREAD", "THREADS", "LOCAL", "BARRIER")


def taken(arrays: Sequence[str], name: str) -> bool:
    """Whether a name is reserved, besides those of the arrays themselves."""
    ends = ("_size", "_type", "_place", "_shape_")
    return name in _WORDS or any(name.startswith(f"{array}{end}") for array in arrays for end in ends)


def item_type(dtype: DType, capabilities: Capabilities) -> str | None:
    """The type of an array's items in the device's language; None where it lacks the dtype."""
    name = str(dtype)
    if name in ("int64", "uint64") and not capabilities.int64:
        return None
    if name == "float64" and not capabilities.float64:
        return None
    return dialect_of(capabilities).raw_types.get(name)


def scalar_type(dtype: DType, capabilities: Capabilities) -> str | None:
    """The type of a scalar in the device's language; None where it lacks the dtype."""
    return item_type(dtype, capabilities) if str(dtype) in _SCALARS else None


def raw_source(group: Group, capabilities: Capabilities, ending: str) -> KernelSource:
    """The kernel of a raw group."""
    launch: RawLaunch = group.nodes[0].attributes["launch"]
    text, dialect, nodes = launch.text, dialect_of(capabilities), (*group.outputs, *group.inputs)
    header, body = text.of(dialect.name)
    names = (*text.outputs, *text.inputs)
    arrays = tuple(
        (name, _type(node.dtype, capabilities), node.dtype.itemsize)
        for name, node in zip(names, nodes, strict=True)
    )
    kernel = RawKernel(
        name=f"{text.name}_{ending}",
        label=text.name,
        outputs=arrays[: len(text.outputs)],
        inputs=arrays[len(text.outputs) :],
        scalars=tuple((scalar, _type(dtype, capabilities)) for scalar, dtype in text.scalars),
        constants=tuple(_sizes(names, nodes)),
        threads=math.prod(launch.group),
        count=launch.threads,
        header=header,
        body=body,
    )
    return KernelSource(
        kernel.name,
        dialect.raw_text(kernel),
        tuple(str(node.dtype) for node in nodes),
        tuple(str(dtype) for _, dtype in text.scalars),
        launch.grid,
        launch.group,
        complete=True,
        placed=dialect.moves_buffers,
    )


def refused(source: KernelSource, error: CompileError) -> CompileError:
    """A compiler's error, with the user's name of the kernel."""
    return CompileError(f"kernel {source.name.rpartition('_')[0]!r} does not compile. {error}")


def _type(dtype: DType, capabilities: Capabilities) -> str:
    word = item_type(dtype, capabilities)
    assert word is not None, f"no {dtype} in {capabilities.language}"  # refused when it was called
    return word


def _sizes(arrays: Sequence[str], nodes: Sequence[Node]) -> list[tuple[str, int]]:
    """The constants with the sizes of arrays."""
    constants = []
    for array, node in zip(arrays, nodes, strict=True):
        constants.append((f"{array}_size", node.size))
        constants += [(f"{array}_shape_{axis}", length) for axis, length in enumerate(node.shape)]
    return constants
