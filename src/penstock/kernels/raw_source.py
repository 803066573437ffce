"""Texts of users' own kernels: what Penstock writes around a body, so that the body stays plain.

Around it are the parameters, with the types that the tensors have, and names that it may use in every
language: `i`, the number of the thread, where threads work each by itself; `GROUP_0` to `GROUP_2`,
`GROUPS_0`, `THREAD` and `THREADS`; of each array `x` the constants `x_size`, `x_shape_0` and so on, and the
type `x_type`; `LOCAL` and `BARRIER` in C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.drivers.driver import Capabilities
from penstock.errors import CompileError
from penstock.graph.dtypes import DType, int64
from penstock.graph.node import Node
from penstock.graph.raw import RawLaunch
from penstock.kernels.source import C_TYPES, UNIT, KernelSource

if TYPE_CHECKING:
    from penstock.fusion.groups import Group

LANGUAGES = {"opencl": "OpenCL C", "cuda": "CUDA C", "wgsl": "WGSL"}
_CUDA_TYPES = {
    "char": "signed char",
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "uint": "unsigned int",
    "long": "long long",
    "ulong": "unsigned long long",
    "half": "unsigned short",
}
_WGSL_TYPES = {"int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64", "float32": "f32"}
_SCALARS = ("int32", "uint32", "int64", "uint64", "float32", "float64")
_MOST_INT = (1 << 31) - 1
_WORDS = ("i", "GROUP_0", "GROUP_1", "GROUP_2", "GROUPS_0", "THREAD", "THREADS", "LOCAL", "BARRIER")

_OPENCL_WORDS = """\
#define GROUP_0 ((int)get_group_id(0))
#define GROUP_1 ((int)get_group_id(1))
#define GROUP_2 ((int)get_group_id(2))
#define GROUPS_0 ((int)get_num_groups(0))
#define THREAD \\
    ((int)(get_local_id(0) + get_local_size(0) * (get_local_id(1) + get_local_size(1) * get_local_id(2))))
#define LOCAL __local
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE)
"""
_CUDA_WORDS = """\
#define GROUP_0 ((int)blockIdx.x)
#define GROUP_1 ((int)blockIdx.y)
#define GROUP_2 ((int)blockIdx.z)
#define GROUPS_0 ((int)gridDim.x)
#define THREAD ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)))
#define LOCAL __shared__
#define BARRIER __syncthreads()
"""


def taken(arrays: Sequence[str], name: str) -> bool:
    """Whether a text has a name already, beside the arrays themselves."""
    ends = ("_size", "_type", "_place", "_shape_")
    return name in _WORDS or any(name.startswith(f"{array}{end}") for array in arrays for end in ends)


def item_type(dtype: DType, capabilities: Capabilities) -> str | None:
    """What the items of an array are called in the device's language; None where there are no such arrays."""
    name, language = str(dtype), capabilities.language
    if name in ("int64", "uint64") and not capabilities.int64:
        return None
    if language == "wgsl":
        return _WGSL_TYPES.get(name)
    word = C_TYPES.get(name)
    if word is None or (name == "float64" and not capabilities.float64):
        return None
    return _CUDA_TYPES.get(word, word) if language == "cuda" else word


def scalar_type(dtype: DType, capabilities: Capabilities) -> str | None:
    """The same of a scalar."""
    return item_type(dtype, capabilities) if str(dtype) in _SCALARS else None


def raw_source(group: Group, capabilities: Capabilities, ending: str) -> KernelSource:
    """The whole text of a raw group."""
    launch: RawLaunch = group.nodes[0].attributes["launch"]
    wgsl = capabilities.language == "wgsl"
    name = f"{launch.text.name}_{ending}"
    nodes = (*group.outputs, *group.inputs)
    return KernelSource(
        name,
        (_wgsl if wgsl else _c)(name, launch, nodes, capabilities),
        tuple(str(node.dtype) for node in nodes),
        tuple(str(dtype) for _, dtype in launch.text.scalars),
        launch.grid,
        launch.group,
        complete=True,
        placed=not wgsl,  # WGSL has no pointers that could be moved, and binds parts of a memory
    )


def refused(source: KernelSource, error: CompileError) -> CompileError:
    """A compiler's words, after the name that the user gave the kernel."""
    return CompileError(f"kernel {source.name.rpartition('_')[0]!r} does not compile. {error}")


def _c(name: str, launch: RawLaunch, nodes: Sequence[Node], capabilities: Capabilities) -> str:
    text, cuda = launch.text, capabilities.language == "cuda"
    header, body = text.of(capabilities.language)
    arrays = (*text.outputs, *text.inputs)
    types = [_type(node.dtype, capabilities) for node in nodes]
    before, alone = ("", "__restrict__") if cuda else ("__global ", "restrict")
    constness = [""] * len(text.outputs) + ["const "] * len(text.inputs)
    parameters = [
        f"{before}{const}{word} *{alone} {array}"
        for array, word, const in zip(arrays, types, constness, strict=True)
    ]
    parameters += [f"int {array}_place" for array in arrays]
    parameters += [f"{_type(dtype, capabilities)} {scalar}" for scalar, dtype in text.scalars]
    threads = math.prod(launch.group)
    opening = f'extern "C" __global__ void __launch_bounds__({threads})' if cuda else "__kernel void"
    sizes = ", ".join(f"{constant} = {size}" for constant, size in _sizes(arrays, nodes))
    lines = [
        _CUDA_WORDS if cuda else _OPENCL_WORDS,
        f"#define THREADS {threads}",
        f"enum {{ {sizes} }};",
        *(f"typedef {word} {array}_type;" for array, word in zip(arrays, types, strict=True)),
        *([f'#line 1 "header of {text.name}"', header] if header else []),
        f"{opening} {name}({', '.join(parameters)}) {{",
        *(
            f"{array} += (size_t){array}_place * {UNIT // node.dtype.itemsize};"
            for array, node in zip(arrays, nodes, strict=True)
        ),
    ]
    if launch.threads is not None:
        word = "int" if launch.threads <= _MOST_INT - threads else _type(int64, capabilities)
        lines.append(f"const {word} i = ({word})GROUP_0 * THREADS + THREAD;")
        lines.append(f"if (i >= {launch.threads}) return;")
    return "\n".join([*lines, f'#line 1 "{text.name}"', body, "}", ""])


def _wgsl(name: str, launch: RawLaunch, nodes: Sequence[Node], capabilities: Capabilities) -> str:
    text = launch.text
    header, body = text.of("wgsl")
    arrays = (*text.outputs, *text.inputs)
    types = [_type(node.dtype, capabilities) for node in nodes]
    parameters = [f"{array}: array<{word}>" for array, word in zip(arrays, types, strict=True)]
    parameters += [f"{scalar}: {_type(dtype, capabilities)}" for scalar, dtype in text.scalars]
    lines = [
        *(f"const {constant} = {size};" for constant, size in _sizes(arrays, nodes)),
        *(f"alias {array}_type = {word};" for array, word in zip(arrays, types, strict=True)),
        header,
        f"kernel {name}({', '.join(parameters)}) {{",
    ]
    if launch.threads is not None:
        lines.append("let i = GROUP_0 * THREADS + THREAD;")
        lines.append(f"if (i >= {launch.threads}) {{ return; }}")
    return "\n".join([*lines, body, "}", ""])


def _type(dtype: DType, capabilities: Capabilities) -> str:
    word = item_type(dtype, capabilities)
    assert word is not None, f"no {dtype} in {capabilities.language}"  # refused when it was called
    return word


def _sizes(arrays: Sequence[str], nodes: Sequence[Node]) -> list[tuple[str, int]]:
    """The constants that tell the sizes of arrays."""
    found = []
    for array, node in zip(arrays, nodes, strict=True):
        found.append((f"{array}_size", node.size))
        found += [(f"{array}_shape_{axis}", length) for axis, length in enumerate(node.shape)]
    return found
