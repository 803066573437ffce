"""Kernels, library calls and copies with their arguments, which can be launched or added to a graph."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import CudaError, checked
from penstock.drivers.cuda.code import SLOT, Function
from penstock.drivers.driver import Grid, Queue
from penstock.errors import DeviceError

_LARGE = 1024  # workgroups of a kernel that runs for longer than the host takes to launch another


class Launch:
    """A kernel with its arguments in a block of memory, from which CUDA copies them at every launch."""

    __slots__ = (
        "_block", "_node", "_params", "_pointers", "_sizes",
        "call", "changes", "early", "function", "pack", "queue",
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        grid: Grid = (),
        group: Grid = (),
        args: Sequence[Any] = (),
        early: bool = True,
    ) -> None:
        self.function = function
        self.early = early and function.waits  # whether it may begin before what it depends on has ended
        count = len(function.formats)
        self._block = (ctypes.c_uint64 * count)()
        start = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_uint64 * count)(*range(start, start + SLOT * count, SLOT))
        self._params = ctypes.addressof(self._pointers)
        self._node: Any = None  # the parameters of its node in a graph
        self.changes: list[Bound] | None = None  # the changed launches of the graph that this belongs to
        self._sizes = (*grid, *(1,) * (3 - len(grid)), *group, *(1,) * (3 - len(group)))
        # Both with the arguments that stay the same, which would take half of the time of a call.
        self.pack = partial(function.format.pack_into, self._block, 0)
        self.call: Callable[[], tuple[Any]]
        self.queue: Queue = None  # where `call` launches
        if args:
            self.set(args)

    def set(self, args: Sequence[Any]) -> None:
        """Set all arguments."""
        try:
            self.pack(*args)
        except (struct.error, OverflowError):
            for position, arg in enumerate(args):
                self._put(position, arg)

    def _put(self, position: int, arg: Any) -> None:
        form = self.function.formats[position]
        try:
            form.pack_into(self._block, SLOT * position, arg)
        except (struct.error, OverflowError):  # a value that NumPy rounds or wraps
            form.pack_into(self._block, SLOT * position, self.function.dtypes[position].type(arg))

    def change(self, position: int, arg: Any) -> None:
        """Set an argument."""
        self._put(position, arg)
        if self.changes is not None:
            self.changes.append(self)

    def aim(self, queue: Queue) -> None:
        """Have `call` launch on a queue.

        A large kernel that waits for those before it by itself is launched while they end.
        """
        native, self.queue = self.function.native, queue
        if self.function.waits_first and math.prod(self._sizes[:3]) >= _LARGE:
            self.call = partial(
                cu.cuLaunchKernelEx, _while_others_end(self._sizes, queue), native, self._params, 0
            )
        else:
            self.call = partial(cu.cuLaunchKernel, native, *self._sizes, 0, queue, self._params, 0)

    def record(self, queue: Queue) -> None:
        """Launch the kernel."""
        try:
            if queue is not self.queue:
                self.aim(queue)
            (code,) = self.call()
        except OverflowError:
            code, self.queue = cu.CUresult.CUDA_ERROR_INVALID_VALUE, None
        if code:
            raise CudaError(code)

    def add_to(self, graph: Any, queue: Queue) -> list[Any]:
        """Add the launch to a graph as a node."""
        self._node = cu.CUDA_KERNEL_NODE_PARAMS()
        self._node.func = self.function.native
        self._node.gridDimX, self._node.gridDimY, self._node.gridDimZ = self._sizes[:3]
        self._node.blockDimX, self._node.blockDimY, self._node.blockDimZ = self._sizes[3:]
        self._node.kernelParams = self._params
        return [checked(cu.cuGraphAddKernelNode(graph, None, 0, self._node))]

    def update(self, graph: Any, nodes: Sequence[Any], queue: Queue) -> None:
        """Copy the arguments to a node of an executable graph."""
        checked(cu.cuGraphExecKernelNodeSetParams(graph, nodes[0], self._node))


def _while_others_end(sizes: Sequence[int], queue: Queue) -> Any:
    """How a kernel is launched before those ahead of it in its queue have ended."""
    early = cu.CUlaunchAttribute()
    early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = sizes[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = sizes[3:]
    config.hStream, config.attrs, config.numAttrs = queue, [early], 1
    return config


class LibraryCall:
    """A library's launch with its arguments."""

    __slots__ = ("_args", "_launch", "changes")

    def __init__(self, launch: Callable[..., None], args: Sequence[Any]) -> None:
        self._launch = launch
        self._args = list(args)
        self.changes: list[Bound] | None = None

    def set(self, args: Sequence[Any]) -> None:
        """Set all arguments."""
        self._args = list(args)

    def change(self, position: int, arg: Any) -> None:
        """Set an argument."""
        self._args[position] = arg
        if self.changes is not None:
            self.changes.append(self)

    def record(self, queue: Queue) -> None:
        """Call the library."""
        try:
            self._launch(int(queue), *self._args)
        except Exception as error:  # any error of a library is a failure of the device
            raise DeviceError(f"{type(error).__name__}: {error}") from error

    def add_to(self, graph: Any, queue: Queue) -> list[Any]:
        """Add what the library launches to a graph: nodes that follow one another.

        Not as a child graph: CUDA takes longer from a kernel to the next across its border.
        """
        inside = self._captured(queue)
        try:
            nodes: list[Any] = []
            for captured in _in_order(inside):
                nodes.append(_copied(graph, captured, nodes[-1:]))
            return nodes
        finally:
            cu.cuGraphDestroy(inside)

    def update(self, graph: Any, nodes: Sequence[Any], queue: Queue) -> None:
        """Replace nodes of an executable graph by what the library launches for the present arguments."""
        inside = self._captured(queue)
        try:
            captured = _in_order(inside)
            if len(captured) != len(nodes):
                raise CudaError(cu.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
            for node, new in zip(nodes, captured, strict=True):
                _set(graph, node, new)
        finally:
            cu.cuGraphDestroy(inside)

    def _captured(self, queue: Queue) -> Any:
        """What the library launches, as a graph."""
        # Relaxed: other threads, or a finalizer in this thread, may allocate and free meanwhile, which does
        # not affect what is captured.
        checked(cu.cuStreamBeginCapture(queue, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            self.record(queue)
        except BaseException:
            cu.cuGraphDestroy(cu.cuStreamEndCapture(queue)[1])
            raise
        return checked(cu.cuStreamEndCapture(queue))


def _in_order(graph: Any) -> list[Any]:
    """The nodes of a graph that was captured from one stream, where each follows the one before."""
    nodes, _ = checked(cu.cuGraphGetNodes(graph, checked(cu.cuGraphGetNodes(graph))[1]))
    ends = checked(cu.cuGraphGetEdges(graph, len(nodes) - 1))
    after = {int(earlier): later for earlier, later in zip(ends[0], ends[1], strict=True)}
    first = {int(node): node for node in nodes}
    for later in after.values():
        del first[int(later)]
    (node,) = first.values()
    ordered = [node]
    while node := after.get(int(node)):
        ordered.append(node)
    return ordered


def _copied(graph: Any, node: Any, before: Sequence[Any]) -> Any:
    """A copy of a captured node in another graph."""
    if _is_kernel(node):
        parameters = checked(cu.cuGraphKernelNodeGetParams(node))
        result = checked(cu.cuGraphAddKernelNode(graph, before, len(before), parameters))
        checked(cu.cuGraphKernelNodeCopyAttributes(result, node))  # such as the sizes of clusters
        return result
    parameters, context = checked(cu.cuGraphMemsetNodeGetParams(node)), checked(cu.cuCtxGetCurrent())
    return checked(cu.cuGraphAddMemsetNode(graph, before, len(before), parameters, context))


def _set(graph: Any, node: Any, captured: Any) -> None:
    """Have a node of an executable graph do what a captured one does."""
    if _is_kernel(captured):
        parameters = checked(cu.cuGraphKernelNodeGetParams(captured))
        checked(cu.cuGraphExecKernelNodeSetParams(graph, node, parameters))
    else:
        parameters, context = checked(cu.cuGraphMemsetNodeGetParams(captured)), checked(cu.cuCtxGetCurrent())
        checked(cu.cuGraphExecMemsetNodeSetParams(graph, node, parameters, context))


def _is_kernel(node: Any) -> bool:
    """Whether a captured node is a kernel; libraries also clear memory, and do nothing else."""
    kind = checked(cu.cuGraphNodeGetType(node))
    if kind not in (
        cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
        cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET,
    ):
        raise DeviceError(f"a library launched what is neither a kernel nor a memset: {kind.name}")
    return bool(kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)


class GraphCopy:
    """A copy between the device and pinned memory, as a node of a graph."""

    __slots__ = ("_context", "_ends", "_nbytes", "_to_device", "changes")

    def __init__(self, target: int, source: int, nbytes: int, to_device: bool, context: Any) -> None:
        self._ends = [target, source]
        self._nbytes, self._to_device, self._context = nbytes, to_device, context
        self.changes: list[Bound] | None = None

    def change(self, position: int, arg: Any) -> None:
        """Set the target (0) or the source (1)."""
        self._ends[position] = arg
        if self.changes is not None:
            self.changes.append(self)

    @property
    def parameters(self) -> Any:
        """The copy as CUDA takes it: one row, between an address of the host and one of the device."""
        result = cu.CUDA_MEMCPY3D()
        target, source = self._ends
        device, host = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, cu.CUmemorytype.CU_MEMORYTYPE_HOST
        if self._to_device:
            result.srcMemoryType, result.srcHost = host, source
            result.dstMemoryType, result.dstDevice = device, cu.CUdeviceptr(target)
        else:
            result.srcMemoryType, result.srcDevice = device, cu.CUdeviceptr(source)
            result.dstMemoryType, result.dstHost = host, target
        result.WidthInBytes, result.Height, result.Depth = self._nbytes, 1, 1
        return result

    def add_to(self, graph: Any, queue: Queue) -> list[Any]:
        """Add the copy to a graph as a node."""
        return [checked(cu.cuGraphAddMemcpyNode(graph, None, 0, self.parameters, self._context))]

    def update(self, graph: Any, nodes: Sequence[Any], queue: Queue) -> None:
        """Set where a node of an executable graph copies from and to."""
        checked(cu.cuGraphExecMemcpyNodeSetParams(graph, nodes[0], self.parameters, self._context))


Bound = Launch | LibraryCall | GraphCopy
