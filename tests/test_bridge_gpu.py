"""The bridge on GPUs: single operations give the bits of fused kernels, and nothing new waits for a compiler.

Bits are those of PoCL with the kernels of a GPU of many compute units, and of WebGPU. What is compiled when,
on CUDA, is told by a device that computes nothing; `test_webgpu` and `test_opencl_programs` have the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_random_graphs
from conftest import DRIVERS, WEBGPU_KINDS, examples, opencl_threads, pause_of_others, until
from test_as_fused import check_constants
from test_bridge import USUAL, Arrays, check_that_the_list_waits
from test_cuda_sources import Imagined
from test_random_graphs import grown
from test_same_bits import EXPRESSIONS

import penstock as ps
from penstock import Device, nn
from penstock.compiler import apart
from penstock.compiler.compilation import Compilation
from penstock.compiler.pipeline import compile_graph
from penstock.config import Settings
from penstock.drivers.cuda import compile_text
from penstock.drivers.driver import NO_CONTRACTION
from penstock.errors import CompileError, OutOfDeviceMemory
from penstock.execution import ahead, ahead_gpu, cache
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.sources import kernel_sources
from penstock.execution.structure import Structure
from penstock.graph.node import Kind, Node, leaf
from penstock.graph.separate import NotSeparable
from penstock.kernels.lower import without_shape

Function = Callable[[ps.Tensor], ps.Tensor]
UNITS = 132


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def over_threads(units: int = UNITS) -> Device:
    driver = opencl_threads()
    driver.capabilities = replace(driver.capabilities, compute_units=units)
    return Device.over(driver, Settings(compile_ahead=False))


@pytest.fixture(scope="module")
def threads() -> Iterator[Device]:
    device = over_threads()
    yield device
    device.close()


@pytest.fixture(
    scope="module", params=["opencl", *WEBGPU_KINDS, *(name for name in DRIVERS if name == "cuda")]
)
def gpu(request: pytest.FixtureRequest, threads: Device) -> Iterator[Device]:
    """A device with the kernels of a GPU."""
    if request.param == "opencl":
        yield threads
        return
    device = Device.over(DRIVERS[request.param](), Settings(compile_ahead=False))
    yield device
    device.close()


def both(device: Device, wanted: list[Node]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The values of nodes by the fused program, and by that of single operations."""
    structure, own = Structure(wanted, device.capabilities), executables(device)
    given = [node.value for node in structure.inputs], structure.constants()
    programs = own.build(structure), Executable(own._separate(structure), device, own.kernels)
    fused, single = (
        [
            device.download(buffer, node.dtype, node.shape).wait()
            for node, buffer in zip(structure.nodes, program.run(*given), strict=False)
        ]
        for program in programs
    )
    return fused, single


def check_bits(device: Device, function: Function, shape: tuple[int, ...], dtype: str = "float32") -> None:
    x = ps.asarray(values(*shape).astype(getattr(ps, dtype)), device=device)
    fused, single = both(device, [function(x)._node])
    assert fused[0].tobytes() == single[0].tobytes()


# Bits


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.slow("(300, 130)", "(5, 7)", "sort", "float16")
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("float32", shape) for shape in ((300, 130), (5, 7), (41, 204))),
        *(("bfloat16", shape) for shape in ((5, 7), (41, 204))),
        ("float16", (41, 204)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_single_operations_give_the_bits_of_a_fused_kernel(
    gpu: Device, name: str, dtype: str, shape: tuple[int, int]
) -> None:
    check_bits(gpu, EXPRESSIONS[name], shape, dtype)


def with_sums(x: ps.Tensor) -> ps.Tensor:
    y = ps.tanh(x) * 2
    return y + ps.sum(y, axis=0)


def rows_with_sums(x: ps.Tensor) -> ps.Tensor:
    y = nn.functional.softmax(x, axis=1)
    return y + ps.sum(y, axis=0) + ps.sum(y * x, axis=0)


SUMS: dict[str, tuple[Function, tuple[int, int]]] = {
    "rows read through views": (lambda x: ps.sum(x[:, 1:] * x[:, :-1], axis=1), (30, 501)),
    "rows of an odd length": (lambda x: ps.sum(x * 3, axis=1), (64, 101)),
    "rows of few items": (lambda x: ps.prod(x * 3, axis=1), (1000, 6)),
    "rows of truth values": (lambda x: ps.mean((x > 0).astype(ps.float32), axis=1), (100, 1024)),
    "long rows": (lambda x: ps.sum(ps.exp(x), axis=1), (3, 70_001)),
    "norms of rows": (lambda x: nn.functional.layer_norm(x, (768,)) * 2 + x, (20, 768)),
    "columns": (lambda x: ps.sum(ps.exp(x) * x, axis=0), (1000, 30)),
    "columns beside a map": (with_sums, (2048, 64)),
    "wide columns beside a map": (with_sums, (2048, 1024)),
    "columns beside rows": (rows_with_sums, (2048, 64)),
    "all": (lambda x: ps.sum(x * x), (300, 1000)),
    "two of the same columns": (lambda x: ps.sum(x, axis=0) * ps.sum(x * x, axis=0), (100, 40)),
}


@pytest.mark.slow("float16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_in_the_order_of_the_fused_kernel(gpu: Device, name: str, dtype: str) -> None:
    check_bits(gpu, *SUMS[name], dtype)


@pytest.mark.parametrize("floats", [("float32", "float64"), ("float16", "bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("first", [4000, 4100])
def test_random_graphs_have_the_same_bits(
    gpu: Device, first: int, floats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_random_graphs, "FLOATS", floats)
    checked = 0
    for seed in range(first, first + examples(10, quick=3)):
        _, wanted = grown(seed, 30, 0, lambda array: leaf(gpu.upload(array), array.shape, array.dtype))
        try:
            results = both(gpu, wanted)
        except NotSeparable:
            continue
        for fused, single in zip(*results, strict=True):
            np.testing.assert_array_equal(fused, single, err_msg=f"seed {seed}")
        checked += 1
    assert checked


def test_constants_of_16_bits_keep_their_places(gpu: Device) -> None:
    check_constants(gpu, "bfloat16")


@pytest.mark.parametrize("name", ["softmax", "std", "gelu"])
def test_each_operation_has_a_kernel_and_a_launch_of_its_own(threads: Device, name: str) -> None:
    x = ps.asarray(values(40, 30), device=threads)
    structure = Structure([EXPRESSIONS[name](x)._node, (x + 1)._node], threads.capabilities)
    own = executables(threads)
    schedule = own._separate(structure)
    for step in schedule.groups:
        kinds = [node.primitive.kind for node in step.group.nodes if not node.primitive.same_bytes]
        assert len([kind for kind in kinds if kind is not Kind.CREATION]) == 1, step
    assert all(source.alone for source in kernel_sources(schedule, threads, own.kernels))
    assert len({step.turn for step in schedule.steps}) == len(schedule.steps)


def test_what_only_a_fused_kernel_adds_up_is_not_separable() -> None:
    device = over_threads(units=1)
    x = ps.asarray(values(2608, 600), device=device)  # parts of 1304 rows, one after the other
    structure = Structure([with_sums(x)._node], device.capabilities)
    with pytest.raises(NotSeparable, match="only a fused kernel"):
        executables(device)._separate(structure)
    device.close()


def test_maps_of_one_size_share_what_was_lowered(threads: Device) -> None:
    own = executables(threads)

    def groups(*shape: int) -> Any:
        x = ps.asarray(values(*shape), device=threads)
        structure = Structure([(ps.exp(x) * 2 - x)._node], threads.capabilities)
        schedule = own._separate(structure)
        calls = [call for step in schedule.groups for call in step.calls]
        return [step.group for step in schedule.groups], calls

    groups(7, 9), groups(11, 13)
    (first, first_calls), (second, second_calls) = groups(20, 30), groups(5, 6, 7)
    assert [*map(without_shape, first)] == [*map(without_shape, second)]
    for call, other in zip(first_calls, second_calls, strict=True):
        assert call.source.name == other.source.name
        assert (call.scalars, other.scalars) == ((600,), (210,))
    fused, single = both(threads, [(ps.exp(ps.asarray(values(1, 500), device=threads)) * 2)._node])
    assert fused[0].tobytes() == single[0].tobytes()


# Contraction


def test_nothing_of_float32_is_contracted() -> None:
    product = 'extern "C" __global__ void k(float *x) { x[0] = x[1] * x[2] + x[3]; }'
    explicit = product.replace("x[1] * x[2] + x[3]", "fmaf(x[1], x[2], x[3])")
    assert compile_text(product, "sm_90") == compile_text(explicit, "sm_90")
    assert compile_text(NO_CONTRACTION + product, "sm_90") != compile_text(NO_CONTRACTION + explicit, "sm_90")


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_compiler_contracts_what_is_fused(dtype: str) -> None:
    device = Device.over(Imagined(), Settings(compile_ahead=False))
    own, x = executables(device), ps.asarray(values(64, 64), device=device)
    x = x.astype(getattr(ps, dtype)).realize()
    schedule = own.schedule(Structure([(x * 2 + 1)._node], device.capabilities))
    (part,) = own.kernels._parts(kernel_sources(schedule, device, own.kernels))
    assert own.kernels._text(part).startswith(NO_CONTRACTION)
    device.close()


def test_quick_functions_do_not_depend_on_what_is_fused() -> None:
    """CUDA's: where the fused kernel has them, so have the kernels of single operations, and nowhere else."""
    device = Device.over(Imagined(), Settings(compile_ahead=False))
    own, x = executables(device), ps.asarray(values(40, 30), device=device)
    for dtype in DTYPES:
        given = x.astype(getattr(ps, dtype)).realize()
        structure = Structure([(ps.exp(given) / (given + 1) - given)._node], device.capabilities)
        for schedule in (own.schedule(structure), own._separate(structure)):
            text = "".join(source.text for source in kernel_sources(schedule, device, own.kernels))
            for function in ("QUICK_EXP(", "QUICK_DIVIDE("):
                assert (function in text) == (dtype != "float32"), (dtype, function)
    device.close()


# The bridge


class Compiled(Imagined):
    """A CUDA device that keeps what it compiles, and knows which texts it was given."""

    keeps_compiled = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.on_disk: set[str] = set()
        self.late: list[str] = []  # texts that somebody had to wait for

    def has_compiled(self, source: str) -> bool:
        return source in self.on_disk

    def compile(self, source: Any, signatures: Any) -> Any:
        if isinstance(source, str) and source not in self.on_disk:
            self.late.append(source)
        return super().compile(source, signatures)

    def compile_ahead(self, source: str, signatures: Any, groups: Any) -> None:
        self.on_disk.add(source)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(ahead.Ahead, "_is_done", lambda self: True)  # only the wanted kernels are compiled
    made = Device.over(Compiled(), Settings(compile_ahead=True))
    yield made
    made.close()


def compile_single_operations(device: Device, tensor: ps.Tensor) -> None:
    own, driver = executables(device), device.driver
    assert isinstance(driver, Compiled)
    schedule = own._separate(Structure([tensor._node], device.capabilities))
    for source in kernel_sources(schedule, device, own.kernels):
        driver.on_disk.add(own.kernels._text([source]))


BRIDGED: dict[str, Function] = {
    "a row kernel": lambda x: nn.functional.softmax(ps.exp(x) * 0.7 - x, axis=1),
    "kernels that share a launch": lambda x: ps.mean(x, axis=1).sum() + ps.max(x, axis=0).sum(),
    "a product": lambda x: ps.tanh(x @ x.T),
    "integers": lambda x: ps.sum(ps.where(x > 0, 1, 2), axis=0) % 3,
    "16 bits": lambda x: nn.functional.softmax(x.astype(ps.bfloat16) * 0.7, axis=1).astype(ps.float16),
}


@pytest.mark.parametrize("name", BRIDGED)
def test_a_new_expression_waits_for_no_compiler(cuda: Device, name: str) -> None:
    driver, own, function = cuda.driver, executables(cuda), BRIDGED[name]
    assert isinstance(driver, Compiled)
    x = ps.asarray(values(40, 30), device=cuda)
    compile_single_operations(cuda, function(x))
    function(x).realize()
    assert len(own._bridges) == 1

    def has_program() -> bool:
        function(x).realize()
        return len(own._programs) == 1

    until(has_program)
    assert not own._bridges
    assert not driver.late


class Plans:
    """Whether the calling thread made each plan of fused kernels; other threads wait until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[bool] = []
        self.go_on, self.refused = threading.Event(), False
        monkeypatch.setattr(cache, "compile_graph", self._compile)

    def _compile(self, *given: Any) -> Any:
        if given[3].fuses:
            is_main = threading.current_thread() is threading.main_thread()
            assert is_main or self.go_on.wait(60)
            self.made.append(is_main)
            if self.refused:
                raise CompileError("no such thing")
        return compile_graph(*given)


def end_of_bridge(device: Device) -> BaseException | None:
    """Wait for the thread that builds the only program under way; its error, if any."""
    (bridge,) = executables(device)._bridges.values()
    assert bridge.compiled is not None
    return bridge.compiled.exception(60)


def new_expression(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    name: str = "a row kernel",
    shape: tuple[int, int] = (40, 30),
) -> tuple[Callable[[], ps.Tensor], Plans]:
    """What computes an expression whose single operations are compiled, and the plans that it takes."""
    function, x = BRIDGED[name], ps.asarray(values(*shape), device=device)
    compile_single_operations(device, function(x))
    return lambda: function(x).realize(), Plans(monkeypatch)


@pytest.mark.parametrize("name", BRIDGED)
def test_a_new_expression_waits_for_no_plan_of_fused_kernels(
    cuda: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, plans = new_expression(cuda, monkeypatch, name)
    compute()
    (bridge,) = executables(cuda)._bridges.values()
    assert bridge.compiled is None, "it may never come again"
    compute()  # would hang here
    plans.go_on.set()
    assert end_of_bridge(cuda) is None
    compute()
    assert len(executables(cuda)._programs) == 1
    assert plans.made == [False]


def test_what_cannot_be_planned_is_told_where_it_is_computed(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, plans = new_expression(cuda, monkeypatch)
    plans.refused = True
    compute()
    compute()
    plans.go_on.set()
    assert isinstance(end_of_bridge(cuda), CompileError)
    with pytest.raises(CompileError, match="no such thing"):
        compute()
    plans.refused = False
    compute()
    assert plans.made == [False, True]


def test_under_a_limit_what_does_not_fit_is_refused_at_once(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, plans = new_expression(cuda, monkeypatch, shape=(400, 300))
    cuda.limit_bytes = cuda.held_bytes() + 1000
    with pytest.raises(OutOfDeviceMemory):
        compute()
    assert plans.made
    assert all(plans.made)


def test_other_problems_for_a_library_are_not_separable(threads: Device) -> None:
    """Whose algorithms may differ."""

    def lowered(*products: str) -> list[Any]:
        return [SimpleNamespace(function=SimpleNamespace(product=product)) for product in products]

    target = executables(threads)._target(fuses=False)
    state = Compilation([], [], {}, lowered=[], products=apart._products(lowered("a", "b")))
    with pytest.raises(NotSeparable, match="library"):
        apart.check_apart(state, target)
    assert apart.check_apart(replace(state, products={}), target).products == {}


def test_threads_lower_side_by_side(cuda: Device) -> None:
    """Each family of kernels is whole, whoever extends it."""
    own = executables(cuda)
    structures = [
        Structure(
            [BRIDGED[name](ps.asarray(values(20 + size, 30 + 3 * size), device=cuda))._node],
            cuda.capabilities,
        )
        for name in ("a row kernel", "integers")
        for size in range(6)
    ]
    plans = [own._building(cache._Bridge(None, None), structure) for structure in structures]  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(plan) for plan in plans]:
            done.result(60)
    for structure in structures:
        assert not own._missing(own.schedule(structure), own._serves_anywhere(structure))


def test_a_step_that_ends_at_once_does_not_put_the_thread_to_sleep(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = executables(cuda)._ahead
    assert own is not None

    def submit(step: Callable[[], None]) -> None:
        threading.Thread(target=step).start()
        time.sleep(0.02)  # in which it ends, but for what comes next

    monkeypatch.setattr(own, "_thread", type("Threads", (), {"submit": staticmethod(submit)}))
    for _ in range(3):
        own.compile(lambda: None).result(10)


def test_the_list_waits_while_the_gpu_has_work(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_the_list_waits(cuda, monkeypatch)


def test_python_goes_on_while_nvrtc_compiles() -> None:
    steps = " ".join(f"y = sinf(y) * expf(y) + tanhf(y) * {k}.5f;" for k in range(20))
    compile_text('extern "C" __global__ void k() {}', "sm_90")  # which imports the compiler
    source = f'extern "C" __global__ void k(float *x) {{ float y = x[0]; {steps} x[0] = y; }}'
    taken, longest = pause_of_others(lambda: compile_text(source, "sm_90"))
    assert longest < taken / 3


@pytest.mark.slow
def test_the_list_has_kernels_for_all_sizes_of_an_expression(
    cuda: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # which knows of no sizes yet
    own = executables(cuda)._ahead
    assert own is not None
    for _ in own._listed():
        pass
    assert isinstance(cuda.driver, Compiled)
    assert len(cuda.driver.on_disk) < 450
    expressions = [
        BRIDGED["a product"],
        *(BRIDGED[name] for name in BRIDGED if name != "a product"),
        *(EXPRESSIONS[name] for name in ("std", "gelu", "columns", "gradient", "moves")),
        lambda x: nn.functional.layer_norm(x[1:, ::2], (x[1:, ::2].shape[1],)).T,
    ]
    for shape in ((40, 30), (57, 61), (301, 8), (5, 1000), (700, 77), (64, 64)):
        large = shape[0] ** 2 * shape[1] > 1 << 21  # a library would multiply it
        for function in expressions if not large else expressions[1:]:
            tensor = function(ps.asarray(values(*shape), device=cuda))
            schedule = executables(cuda)._separate(Structure([tensor._node], cuda.capabilities))
            assert not executables(cuda)._missing(schedule), (shape, tensor)
    for dtype in DTYPES:
        array = Arrays(cuda, dtype)
        for name, usual in USUAL.items():
            for n, m in ((345, 219), (128, 512), (77, 64), (600, 101)):
                schedule = executables(cuda)._separate(
                    Structure([usual(array, n, m)._node], cuda.capabilities)
                )
                assert not executables(cuda)._missing(schedule), (dtype, name, n, m)


def test_operations_that_are_listed_together_are_alike() -> None:
    for nodes in ahead_gpu.gpu_operations():
        assert len({(node.primitive.name, str(node.dtype)) for node in nodes}) == 1
        assert len(nodes) > 1
