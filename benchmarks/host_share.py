"""What a step of tokens, or an operation, takes the host on CUDA, on a machine without a GPU.

    python benchmarks/host_share.py --model gpt2 --batch 1 32
    python benchmarks/host_share.py --model gpt2 --batch 32 --ragged    # prompts of different lengths
    python benchmarks/host_share.py --operations    # those of eager.py on 8 x 8

The calls of CUDA's driver API are replaced by functions that compute nothing: all commands are done at once,
and every token is 0. All else is Penstock's own way to an H200. Printed are CPU seconds of the thread that
generates or computes, the least of several runs, and the calls of CUDA in a step.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

_OK = cu.CUresult.CUDA_SUCCESS
_BYTES = 139 << 30
_ATTRIBUTES = {
    cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
    cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
    cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: 48 << 10,
    cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
}
_GIVE_NOTHING = (
    "cuInit cuCtxSetCurrent cuMemFree cuMemFreeHost cuModuleUnload cuLaunchKernel cuLaunchKernelEx "
    "cuGraphAddDependencies cuGraphDestroy cuGraphExecDestroy cuGraphLaunch cuGraphExecKernelNodeSetParams "
    "cuMemcpyAsync cuEventRecord cuEventQuery cuEventSynchronize cuEventDestroy cuStreamWaitEvent "
    "cuStreamSynchronize cuStreamDestroy"
)
_GIVE_HANDLES = (
    "cuDevicePrimaryCtxRetain cuStreamCreate cuModuleLoadData cuGraphCreate cuGraphInstantiate "
    "cuGraphAddKernelNode cuEventCreate"
)
calls: Counter[str] = Counter()


class _Memory:
    """Addresses: of nothing on the device, of arrays on the host."""

    def __init__(self) -> None:
        self._next, self._arrays = 1 << 40, list[Any]()

    def device(self, nbytes: int) -> tuple[Any, int]:
        address, self._next = self._next, self._next + (nbytes + 65535) // 65536 * 65536
        return _OK, address

    def host(self, nbytes: int, flags: int) -> tuple[Any, int]:
        self._arrays.append(np.zeros(nbytes, np.uint8))
        return _OK, self._arrays[-1].ctypes.data


def simulate() -> None:
    """Replace CUDA. Before any device is looked for."""
    handles, memory, sizes = itertools.count(1), _Memory(), dict[str, list[int]]()

    def parameter(function: str, position: int) -> tuple[Any, ...]:
        known = sizes[function]
        return (_OK, 0, known[position]) if position < len(known) else (1,)

    functions: dict[str, Callable[..., tuple[Any, ...]]] = {
        **{name: lambda *_: (_OK,) for name in _GIVE_NOTHING.split()},
        **{name: lambda *_: (_OK, next(handles)) for name in _GIVE_HANDLES.split()},
        "cuDeviceGetCount": lambda: (_OK, 1),
        "cuDeviceGet": lambda number: (_OK, number),
        "cuDeviceTotalMem": lambda device: (_OK, _BYTES),
        "cuDriverGetVersion": lambda: (_OK, 13000),
        "cuDeviceGetName": lambda length, device: (_OK, b"H200, simulated\0"),
        "cuDeviceGetAttribute": lambda which, device: (_OK, _ATTRIBUTES.get(which, 0)),
        "cuMemAlloc": memory.device,
        "cuMemHostAlloc": memory.host,
        "cuModuleGetFunction": lambda module, name: (_OK, name.decode()),
        "cuFuncGetParamInfo": parameter,
        "cuEventElapsedTime": lambda first, last: (_OK, 1e-3),
    }
    for name, function in functions.items():
        setattr(cu, name, _counted(name, function))

    from penstock.drivers.cuda import code, launches

    def compiled(self: Any, text: str, signatures: Any, dtypes: Any) -> Any:
        for name, kinds in signatures.items():
            pairs = zip(kinds, dtypes[name], strict=True)
            sizes[name] = [8 if kind.endswith("*") else dtype.itemsize for kind, dtype in pairs]
        return functions_of(self, text, signatures, dtypes)

    functions_of: Any = code.Compiler.functions
    code.Compiler.functions = compiled  # type: ignore[method-assign]
    code.Compiler._code = lambda self, text: text.encode()  # type: ignore[method-assign]
    # Nodes take the handles of functions, which are names here.
    names = {name: getattr(cu, name) for name in dir(cu) if name.startswith(("cu", "CU"))}
    launches.cu = SimpleNamespace(**{**names, "CUDA_KERNEL_NODE_PARAMS": SimpleNamespace})  # type: ignore[attr-defined]


def _counted(name: str, function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any) -> tuple[Any, ...]:
        calls[name] += 1
        return function(*args)

    return call


def operations() -> None:
    """Print what each operation of `eager.py` takes on 8 x 8."""
    import penstock as ps
    from eager import OPERATIONS, arrays

    given = {name: ps.asarray(array) for name, array in arrays(8).items()}
    for operation in OPERATIONS:
        times = []
        for _ in range(300):
            begun = time.thread_time()
            for _ in range(100):  # as many as are submitted together
                operation.ours(given).realize()
            times.append((time.thread_time() - begun) / 100)
        print(f"{operation.name}: {min(times) * 1e6:.2f} µs")


def main() -> None:
    simulate()
    import penstock as ps
    from generate import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--ragged", action="store_true", help="prompts of up to 16 tokens less")
    parser.add_argument("--operations", action="store_true", help="operations in place of a model")
    chosen = parser.parse_args()
    ps.use("cuda:0")
    if chosen.operations:
        operations()
        return
    model = ps.models.build(SHAPES[chosen.model]).to("bfloat16")
    for batch in chosen.batch:
        prompts = [[1] * (chosen.prompt - (at % 16 if chosen.ragged else 0)) for at in range(batch)]
        times = []
        for _ in range(5):
            begun = end = 0.0
            for piece in model.stream(prompts, chosen.tokens, temperature=0, stop_tokens=()):
                if piece.index == batch - 1:
                    end = time.thread_time()
                    if not begun:
                        begun = end
                        calls.clear()
            times.append((end - begun) / (chosen.tokens - 1))
        cuda = calls.total() / (chosen.tokens - 1)
        print(f"{chosen.model}, batch {batch}: {min(times) * 1e6:.0f} µs and {cuda:.1f} calls of CUDA a step")


if __name__ == "__main__":
    main()
