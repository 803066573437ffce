"""The choice of cuBLASLt's algorithms, measured once and cached on disk.

The library suggests algorithms in the order of its own model. Each is timed on memory of the problem's size.
The same memory is used for all calls, so that small operands come from the cache; in a program they mostly do
too, since the preceding kernel has just written one of them. But where an operand is much larger than all the
rest, as the weights of a product of few rows are, each call has another copy of it, which no cache holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, cycle, islice
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda
from nvmath.bindings import cublasLt

from penstock.drivers.driver import Driver
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory
from penstock.fusion.products import Matrix
from penstock.graph.dtypes import checked as dtype_of
from penstock.graph.node import Array
from penstock.kernels.library.cublaslt import WORKSPACE, LibraryLaunch, Product
from penstock.kernels.source import ALIGNMENT, digest
from penstock.tuning_cache import TuningCache

Call = Callable[[], None]

_ALGORITHM_BYTES = 64  # valid for the same version of the library
_SUGGESTIONS = 8  # algorithms to time
_ROUNDS = 5  # timings of each, of which the median counts
_ROUND_MS = 0.2  # of a timing: events have a resolution of half a microsecond
_MOST_CALLS = 16  # in a timing
_COLD = 1 << 20  # bytes of an operand that is read from memory, if all others have a part of it at most:
_SMALL_PART = 4
_CACHES = 128 << 20  # bytes of copies, more than caches hold
_SAMPLE = 1 << 16  # random items, which are repeated: products of zeros are faster than others


class _Library:
    """The library on a device, for the life of the process."""

    def __init__(self) -> None:
        try:
            self.handle: int = cublasLt.create()
        except Exception as error:  # nvmath has several exceptions for a missing library
            raise CompileError(
                f"cuBLASLt, which NVIDIA's CUDA toolkit has, cannot be used: {error}"
            ) from None
        name = _checked(cuda.cuDeviceGetName(128, _checked(cuda.cuCtxGetDevice())))
        device = name.split(b"\0")[0].decode()
        self.cache = TuningCache(f"{device}, cuBLASLt {cublasLt.get_version()}")


_libraries: dict[int, _Library] = {}  # by context


def tune(launch: LibraryLaunch, driver: Driver) -> int:
    """Set the algorithm of a launch, and run it once, so that its kernels are loaded before any capture.

    Returns the bytes of workspace that the algorithm uses.
    """
    context = int(_checked(cuda.cuCtxGetCurrent()))
    if context not in _libraries:
        _libraries[context] = _Library()
    library = _libraries[context]
    streamed = _streamed(launch.product)
    problem = f"{digest(repr(launch.product))}{' from memory' if streamed else ''}"
    known = _read(library.cache.get(problem))
    if known is not None and not 0 <= needed(launch, library.handle, known) <= WORKSPACE:
        known = None
    algorithms = [known] if known is not None else suggestions(launch, library.handle)
    if not algorithms:
        raise CompileError(f"cuBLASLt has no algorithm for {launch.product}")
    launch.use(library.handle, algorithms[0])
    try:
        timed = streamed if known is None else ""
        with memory(launch, driver, timed, random=known is None) as sets, new_stream() as stream:
            if known is None:
                times = [_milliseconds(launch, library.handle, each, stream, sets) for each in algorithms]
                launch.use(library.handle, algorithms[times.index(min(times))])
            launch(stream, *sets[0])
        if known is None:
            library.cache.put(problem, launch.algorithm.tobytes().hex())
    except OutOfDeviceMemory:
        pass  # the library's first suggestion, or the cached choice, will do
    return needed(launch, library.handle, launch.algorithm)


def _streamed(product: Product) -> str:
    """The operand that a product mostly reads, and from memory; none if there is no such operand."""
    name = max(("left", "right"), key=product.nbytes)
    rest = sum(product.nbytes(other) for other in ("left", "right", "out") if other != name)
    large = product.nbytes(name)
    return name if large >= _COLD and large >= _SMALL_PART * rest else ""


def suggestions(launch: LibraryLaunch, handle: int) -> list[Array]:
    """The algorithms that the library suggests, the best first, each in its 64 bytes."""
    preference = cublasLt.matmul_preference_create()
    try:
        attribute = cublasLt.MatmulPreferenceAttribute
        product, size = launch.product, dtype_of(launch.product.dtype).itemsize
        limits: dict[Any, np.integer[Any]] = {
            attribute.MAX_WORKSPACE_BYTES: np.uint64(WORKSPACE),
            attribute.MIN_ALIGNMENT_A_BYTES: np.uint32(_alignment(product.right, size)),
            attribute.MIN_ALIGNMENT_B_BYTES: np.uint32(_alignment(product.left, size)),
        }
        for which, value in limits.items():
            held = np.atleast_1d(value)
            cublasLt.matmul_preference_set_attribute(preference, int(which), held.ctypes.data, held.nbytes)
        heuristics = np.zeros(_SUGGESTIONS, cublasLt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        of = launch.descriptors
        try:
            layouts, results = (
                (of.right, of.left, of.out, of.out),
                (heuristics.ctypes.data, count.ctypes.data),
            )
            cublasLt.matmul_algo_get_heuristic(
                handle, of.operation, *layouts, preference, _SUGGESTIONS, *results
            )
        except cublasLt.cuBLASLtError:  # there are none
            return []
    finally:
        cublasLt.matmul_preference_destroy(preference)
    return [known["algo"]["data_"].copy() for known in heuristics[: count[0]] if known["state"] == 0]


def _read(choice: str | None) -> Array | None:
    """An algorithm from the cache."""
    try:
        algorithm = np.frombuffer(bytes.fromhex(choice or ""), np.uint64).copy()
    except ValueError:
        return None
    return algorithm if algorithm.nbytes == _ALGORITHM_BYTES else None


def needed(launch: LibraryLaunch, handle: int, algorithm: Array) -> int:
    """The bytes of workspace that an algorithm uses; -1 where the library rejects it."""
    of, result = launch.descriptors, np.zeros(1, cublasLt.matmul_heuristic_result_dtype)
    try:
        cublasLt.matmul_algo_check(
            handle, of.operation, of.right, of.left, of.out, of.out, algorithm.ctypes.data, result.ctypes.data
        )
    except cublasLt.cuBLASLtError:
        return -1
    return int(result["workspace_size"][0])


def _milliseconds(
    launch: LibraryLaunch, handle: int, algorithm: Array, stream: int, sets: Sequence[Sequence[int]]
) -> float:
    """The time of a call with an algorithm, with each set of arguments in turn; infinite if it fails."""
    launch.use(handle, algorithm)
    try:
        launch(stream, *sets[0])  # loads its kernels
        once = _timed(stream, partial(launch, stream, *sets[0]))
    except cublasLt.cuBLASLtError:
        return float("inf")
    calls = max(len(sets), min(_MOST_CALLS, round(_ROUND_MS / once)))
    # In a graph, because Python enqueues more slowly than a GPU computes small products.
    with captured(stream, [partial(launch, stream, *args) for args in islice(cycle(sets), calls)]) as replay:
        replay()
        return statistics.median(_timed(stream, replay) for _ in range(_ROUNDS)) / calls


# CUDA


@contextmanager
def memory(
    launch: LibraryLaunch, driver: Driver, streamed: str = "", random: bool = True
) -> Iterator[list[list[int]]]:
    """Sets of arguments for a launch: new memory, with random items or uninitialised.

    They differ in the operand that is `streamed`, if there is any, and are as many as caches do not hold.
    """
    sizes: dict[int, int] = {}
    for name, at in launch.buffers.items():  # both operands may be the same buffer
        sizes[at] = max(sizes.get(at, 0), -(-launch.product.nbytes(name) // ALIGNMENT))
    other = sizes[launch.buffers[streamed]] if streamed else 0
    copies = -(-_CACHES // (ALIGNMENT * other)) - 1 if streamed else 0  # besides the first
    taken = driver.allocate(ALIGNMENT * (sum(sizes.values()) + copies * other))
    try:
        if random:
            items = np.random.default_rng(0).standard_normal(_SAMPLE)
            sample = items.astype(dtype_of(launch.product.dtype)).view(np.uint8)
            _fill(int(taken.native), taken.nbytes, sample)
        places = list(accumulate((sizes[at] for at in range(len(sizes))), initial=0))[:-1]
        sets = []
        for copy in range(1 + copies):
            own = list(places)
            if copy:
                own[launch.buffers[streamed]] = sum(sizes.values()) + (copy - 1) * other
            sets.append([*(int(taken.native) for _ in own), *own])
        yield sets
    finally:
        driver.free(taken)


def _fill(address: int, nbytes: int, sample: Array) -> None:
    """Fill memory with repeated samples, by copies of doubling size."""
    done = min(nbytes, sample.nbytes)
    _checked(cuda.cuMemcpyHtoD(address, sample.ctypes.data, done))
    while done < nbytes:
        more = min(done, nbytes - done)
        _checked(cuda.cuMemcpyDtoD(address + done, address, more))
        done += more
    _checked(cuda.cuCtxSynchronize())


@contextmanager
def new_stream() -> Iterator[int]:
    """A new stream, which is synchronised at the end."""
    stream = _checked(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
    try:
        yield int(stream)
        _checked(cuda.cuStreamSynchronize(stream))
    finally:
        _checked(cuda.cuStreamDestroy(stream))


@contextmanager
def captured(stream: int, calls: Sequence[Call]) -> Iterator[Call]:
    """The work that calls enqueue, captured as a graph that a call launches."""
    _checked(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        for call in calls:
            call()
    finally:
        graph = _checked(cuda.cuStreamEndCapture(stream))
    ready = _checked(cuda.cuGraphInstantiate(graph, 0))
    try:
        yield lambda: _checked(cuda.cuGraphLaunch(ready, stream))
    finally:
        _checked(cuda.cuGraphExecDestroy(ready))
        _checked(cuda.cuGraphDestroy(graph))


def _timed(stream: int, call: Call) -> float:
    """The milliseconds of the work that a call enqueues."""
    start, end = (_checked(cuda.cuEventCreate(0)) for _ in range(2))
    try:
        _checked(cuda.cuEventRecord(start, stream))
        call()
        _checked(cuda.cuEventRecord(end, stream))
        _checked(cuda.cuEventSynchronize(end))
        return float(_checked(cuda.cuEventElapsedTime(start, end)))
    finally:
        for event in (start, end):
            _checked(cuda.cuEventDestroy(event))


def _alignment(matrix: Matrix, size: int) -> int:
    """The alignment of an operand in bytes, a power of two, if its memory is aligned to `ALIGNMENT`."""
    start = matrix.offset * size
    return min(ALIGNMENT, start & -start) if start else ALIGNMENT


def allocation_of(address: int) -> int:
    """The address of the allocation that has an address."""
    return int(_checked(cuda.cuMemGetAddressRange(address)[:2]))


def _checked(result: tuple[Any, ...]) -> Any:
    """The result of a call of CUDA's driver API; raises its error."""
    status, *values = result
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"CUDA says {status.name}", "measuring a product")
    return values[0] if values else None
