"""New expressions do not wait for a compiler: kernels of single operations compute them, with the same bits,
until the fused kernels are compiled."""

from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from conftest import DRIVERS, examples, pause_of_others, until
from test_random_graphs import grown
from test_road import Counted
from test_same_bits import EXPRESSIONS

import penstock as ps
from penstock import Device, nn
from penstock.compiler.pipeline import compile_graph, prepare
from penstock.compiler.target import Target
from penstock.config import Settings
from penstock.errors import CompileError
from penstock.execution import ahead, ahead_cpu, ahead_operations, numpy_or_launch
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.sources import kernel_sources
from penstock.execution.structure import Structure
from penstock.graph.node import Kind, Node, leaf, topological
from penstock.kernels.cache import KernelCache
from penstock.lru import LRU

USUAL, OF_IMAGES, Arrays = itemgetter("USUAL", "OF_IMAGES", "Arrays")(
    runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "usual.py"))
)
OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))


def separate(device: Device, structure: Structure) -> Executable:
    """The program of single operations."""
    own = executables(device)
    return Executable(own._separate(structure), device, own.kernels)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(ahead.Ahead, "_is_done", lambda self: True)  # only the wanted kernels are compiled
    made = Device.over(DRIVERS[OPENCL](), Settings(compile_ahead=True))
    yield made
    made.close()


@pytest.fixture
def on_disk(device: Device, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The sources that count as compiled already."""
    texts: set[str] = set()
    monkeypatch.setattr(device.driver, "has_compiled", texts.__contains__)
    return texts


def compiled_ahead(device: Device, on_disk: set[str], tensor: ps.Tensor) -> None:
    """Compile the kernels of the single operations of an expression, but not its fused kernels."""
    kernels = KernelCache(device)
    target = Target(device.name, device.capabilities, kernels.lowering, apart=kernels.shared_lowering)
    structure = Structure([tensor._node], device.capabilities)
    schedule = compile_graph(*prepare(structure.wanted, structure.inputs), structure.numbers, target)
    for step in schedule.groups:
        on_disk.update(kernels._text([call.source]) for call in step.calls)


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def expression(x: ps.Tensor) -> ps.Tensor:
    return nn.functional.softmax(ps.exp(x) * 0.7 - x, axis=1)


# Bits


@pytest.mark.slow("(300, 130)", "(5, 7)")
@pytest.mark.parametrize("shape", [(300, 130), (5, 7), (41, 203)], ids=str)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_single_operations_give_the_bits_of_a_fused_program(
    device: Device, name: str, shape: tuple[int, int]
) -> None:
    x = ps.asarray(values(*shape), device=device)
    expected = ps.jit(EXPRESSIONS[name])(x).numpy()
    result = EXPRESSIONS[name](x)
    structure = Structure([result._node], device.capabilities)
    (buffer,) = separate(device, structure).run(
        [node.value for node in structure.inputs], structure.constants()
    )
    actual = device.download(buffer, result.dtype, result.shape).wait()
    assert actual.tobytes() == expected.tobytes()


def bits(program: Executable, structure: Structure) -> bytes:
    """The bits of the only result of a program."""
    (buffer,) = program.run([node.value for node in structure.inputs], structure.constants())
    return program.device.download(buffer).wait().tobytes()


@pytest.mark.slow("(3, 700, 90)", "(90, 700, 3)", "(40, 2100, 20)")
@pytest.mark.parametrize(
    "sizes", [(9, 70, 20), (130, 3001, 9), (3, 700, 90), (90, 700, 3), (40, 2100, 20)], ids=str
)
@pytest.mark.parametrize("transposed", ["", "left", "right"])
def test_products_that_exist_before_have_the_bits_of_the_best(
    device: Device, sizes: tuple[int, int, int], transposed: str
) -> None:
    """However the best kernel divides the sums: in spans of K, in blocks, and in vectors along K."""
    rows, steps, columns = sizes
    left, right = values(rows, steps), values(steps, columns)
    x = ps.asarray(left.T.copy() if transposed == "left" else left, device=device)
    y = ps.asarray(right.T.copy() if transposed == "right" else right, device=device)
    x, y = x.T if transposed == "left" else x, y.T if transposed == "right" else y
    structure, own = Structure([(x @ y)._node], device.capabilities), executables(device)
    best = Executable(own.schedule(structure), device, own.kernels)
    assert bits(separate(device, structure), structure) == bits(best, structure)


@pytest.mark.slow
def test_few_kernels_serve_products_of_all_sizes(device: Device) -> None:
    kernels = KernelCache(device)
    target = Target(device.name, device.capabilities, kernels.lowering, apart=kernels.shared_lowering)

    def name(node: Node) -> str:
        inputs = [leaf for leaf in topological([node]) if leaf.value is not None]
        schedule = compile_graph([node], inputs, {}, target)
        return kernel_sources(schedule, device, kernels)[0].name

    for sizes in itertools.product(*ahead_cpu.PRODUCTS):
        for node in ahead_cpu.products(*sizes):
            name(node)
    sizes = [(64, 128, 10), (100, 784, 32), (7, 9, 11), (512, 2048, 3), (1, 33, 90), (2, 5, 4)]
    names = [name(node) for shape in sizes for node in ahead_cpu.products(*shape)]
    assert [name(node) for shape in sizes for node in ahead_cpu.products(*shape)] == names
    assert len(set(names)) <= 12


@pytest.mark.slow("2004")
@pytest.mark.parametrize("first", [2000, 2004])
def test_so_do_those_of_random_graphs(device: Device, first: int) -> None:
    for seed in range(first, first + 4):
        _, wanted = grown(seed, 50, 0, lambda array: leaf(device.upload(array), array.shape, array.dtype))
        structure = Structure(wanted, device.capabilities)
        inputs, constants = [node.value for node in structure.inputs], structure.constants()
        fused = executables(device).build(structure).run(inputs, constants)
        single = separate(device, structure).run(inputs, constants)
        for node, value, other in zip(structure.nodes, fused, single, strict=False):
            np.testing.assert_array_equal(
                device.download(value, node.dtype, node.shape).wait(),
                device.download(other, node.dtype, node.shape).wait(),
                err_msg=f"seed {seed}, {node}",
            )


def test_each_operation_has_a_kernel_of_its_own(device: Device) -> None:
    x = ps.asarray(values(40, 30), device=device)
    structure = Structure([expression(x)._node], device.capabilities)
    schedule = executables(device)._separate(structure)
    for step in schedule.groups:
        kinds = [node.primitive.kind for node in step.group.nodes if not node.primitive.same_bytes]
        assert len([kind for kind in kinds if kind is not Kind.CREATION]) == 1, step
    assert len(schedule.groups) > len(executables(device).schedule(structure).groups)


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("kind", [OPENCL, "host"])
def test_small_expressions_have_the_bits_of_a_jitted_function(kind: str, name: str) -> None:
    device = Device.over(DRIVERS[kind]())
    x = ps.asarray(values(4, 9), device=device)
    results = [EXPRESSIONS[name](x).numpy().tobytes() for _ in range(3)]
    assert {*results} == {ps.jit(EXPRESSIONS[name])(x).numpy().tobytes()}
    device.close()


# The bridge


def test_a_new_expression_is_computed_while_its_kernels_are_compiled(
    device: Device, on_disk: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ps.asarray(values(40, 30), device=device)
    compiled_ahead(device, on_disk, expression(x))
    goes_on, compile_, compile_ahead = threading.Event(), device.compile, device.driver.compile_ahead

    def slowly(text: Any, signatures: Any) -> Any:
        assert text in on_disk or goes_on.wait(60)
        return compile_(text, signatures)

    def in_the_background(*given: Any) -> None:
        assert goes_on.wait(60)
        compile_ahead(*given)

    monkeypatch.setattr(device, "compile", slowly)
    monkeypatch.setattr(device.driver, "compile_ahead", in_the_background)
    first = expression(x).numpy()  # would hang here
    second = expression(x).numpy()
    own = executables(device)
    assert len(own._bridges) == 1
    assert not own._programs
    assert "row [" in ps.explain(expression(x)), "what is to come, and not what is there meanwhile"
    goes_on.set()
    (bridge,) = own._bridges.values()
    assert bridge.compiled is not None
    bridge.compiled.result(60)
    third = expression(x).numpy()
    assert not own._bridges
    assert len(own._programs) == 1
    assert first.tobytes() == second.tobytes() == third.tobytes()
    assert third.tobytes() == ps.jit(expression)(x).numpy().tobytes()


def test_other_shapes_are_computed_by_the_same_kernels(
    device: Device, on_disk: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own table of kernels, as in another process: knowledge is shared through the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [shape for pair in ahead_cpu.ROWS for shape in zip(ahead_cpu.ROW_COUNTS, pair, strict=True)]
    for shape in (*itertools.chain(*ahead.SHAPES), *rows):
        compiled_ahead(device, on_disk, expression(ps.asarray(values(*shape), device=device)))
    texts = set(on_disk)
    for shape in ((57, 61), (400, 211), (90, 999), (64, 64), (3, 7), (3000, 6), (33, 8), (7, 1000)):
        compiled_ahead(device, on_disk, expression(ps.asarray(values(*shape), device=device)))
    assert on_disk == texts


@pytest.mark.slow
def test_the_list_has_kernels_for_what_users_write(
    device: Device, on_disk: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device.driver, "compile_ahead", lambda text, *given: on_disk.add(text))
    own = executables(device)
    own.kernels = KernelCache(device)
    compiler = ahead.Ahead(device, own.kernels, lambda: np.inf)
    for _ in compiler._listed():
        pass
    assert len(on_disk) < 700
    missing = {
        (name, dtype): sources
        for name, expression in (USUAL | OF_IMAGES).items()
        for dtype in ("float32", "float16", "bfloat16")
        for n, m in ((345, 219), (128, 512), (77, 64), (600, 101))
        if (structure := Structure([expression(Arrays(device, dtype), n, m)._node], device.capabilities))
        if (sources := [source.name for source in own._missing(own._separate(structure))])
    }
    assert not missing


def test_an_error_of_the_compiler_is_raised_where_the_expression_is_computed(
    device: Device, on_disk: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ps.asarray(values(40, 30), device=device)
    compiled_ahead(device, on_disk, expression(x))
    compile_ = device.compile

    def refuses(text: Any, signatures: Any, groups: Any = None) -> Any:
        if text not in on_disk:
            raise CompileError("no such thing")
        return compile_(text, signatures)

    goes_on = threading.Event()
    monkeypatch.setattr(device, "compile", refuses)
    monkeypatch.setattr(device.driver, "compile_ahead", lambda *given: goes_on.wait(60) and refuses(*given))
    expression(x).numpy()
    (bridge,) = executables(device)._bridges.values()
    assert bridge.compiled is None, "it may never come again"
    expression(x).numpy()
    goes_on.set()
    assert bridge.compiled is not None
    assert isinstance(bridge.compiled.exception(60), CompileError)
    with pytest.raises(CompileError, match="no such thing"):
        expression(x).numpy()
    monkeypatch.undo()
    assert expression(x).numpy().shape == (40, 30)


def test_waiting_compilations_are_bounded(
    device: Device, on_disk: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are more expressions than the cache holds, dropped ones are not compiled."""
    shapes = [(20, 30 + number) for number in range(6)]
    tensors = [ps.asarray(values(*shape), device=device) for shape in shapes]
    for x in tensors:
        compiled_ahead(device, on_disk, expression(x))
    goes_on, compiled = threading.Event(), []

    def in_the_background(text: Any, *given: Any) -> None:
        assert goes_on.wait(60)
        compiled.append(text)

    monkeypatch.setattr(device.driver, "compile_ahead", in_the_background)
    own = executables(device)
    own._bridges = LRU(2)
    for x in tensors:
        expression(x).numpy()
        expression(x).numpy()
    last = [bridge.compiled for bridge in own._bridges.values()]
    goes_on.set()
    for future in last:
        assert future is not None
        future.result(60)
    assert len(compiled) <= 3, "one was under way"
    for x in tensors:
        assert expression(x).numpy().tobytes() == ps.jit(expression)(x).numpy().tobytes()


def test_the_end_waits_for_one_compilation(tmp_path: Path) -> None:
    """Compilations of a script's last expressions do not delay its exit."""
    script = """
        import time
        import penstock as ps
        from penstock.execution.realize import executables
        device = ps.use("opencl:0")
        own = executables(device)
        own._ahead._work = None
        def compile():
            print("compiles", flush=True)
            time.sleep(0.2)
        futures = [own._ahead.compile(compile) for _ in range(50)]
        futures[0].result(60)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PENSTOCK_COMPILE_AHEAD": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert 1 <= done.stdout.count("compiles") <= 3


def test_python_goes_on_while_a_kernel_is_compiled(tmp_path: Path) -> None:
    """The whole compilation, including the last part, for which PyOpenCL would hold the GIL."""
    device = Device.over(DRIVERS[OPENCL]())
    steps = " ".join(f"y = sin(y) * exp(y) + tanh(y) * {k}.5f;" for k in range(40))
    text = f"__kernel void k(__global float *x) {{ float y = x[0]; {steps} x[0] = y; }}"
    source = f"/* {tmp_path} */ {text}"
    taken, longest = pause_of_others(lambda: device.driver.compile_ahead(source, {"k": ("float32*",)}, {}))
    device.close()
    assert longest < taken / 3


def test_what_would_take_much_memory_has_no_bridge(device: Device, on_disk: set[str]) -> None:
    """Single operations store intermediate values that a fused kernel never stores."""
    x = ps.asarray(values(400, 64), device=device)
    distances: Callable[[], ps.Tensor] = lambda: ps.sum((x[:, None] - x[None]) ** 2, axis=-1)  # noqa: E731
    compiled_ahead(device, on_disk, distances())
    device.limit_bytes = "32MiB"
    assert distances().numpy().shape == (400, 400)
    assert not executables(device)._bridges


def test_what_is_not_there_is_compiled_at_once(device: Device, on_disk: set[str]) -> None:
    x = ps.asarray(values(40, 30), device=device)
    expression(x).numpy()
    assert len(executables(device)._programs) == 1
    assert not executables(device)._bridges


def test_others_use_the_device_while_numpy_async_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(DRIVERS[OPENCL]())
    x = ps.asarray(values(40, 30), device=device)
    known: Callable[[], ps.Tensor] = lambda: ps.tanh(x) / 2  # noqa: E731
    expected = known().numpy()
    compiling, goes_on, compile_ = threading.Event(), threading.Event(), device.compile

    def slowly(*given: Any) -> Any:
        compiling.set()
        assert goes_on.wait(60)
        return compile_(*given)

    monkeypatch.setattr(device, "compile", slowly)
    monkeypatch.setattr(device.driver, "has_compiled", lambda text: False)
    future = expression(x).numpy_async()
    assert compiling.wait(60)
    assert known().numpy().tobytes() == expected.tobytes()  # would hang here
    goes_on.set()
    assert future.wait().tobytes() == ps.jit(expression)(x).numpy().tobytes()
    device.close()


def test_all_rows_of_a_matrix_but_the_first_are_computed_by_one_program(device: Device) -> None:
    x = ps.asarray(values(50, 64), device=device)
    rows = ps.jit(lambda x: ps.sum(ps.exp(x), axis=1))(x).numpy()
    for _ in range(2):
        result = [ps.sum(ps.exp(x[row])).item() for row in range(50)]
        np.testing.assert_array_equal(result, rows)
    own = executables(device)
    assert len(own._programs) + len(own._bridges) == 2


def test_several_small_operations_that_come_often_get_a_kernel(device: Device) -> None:
    x = ps.asarray(values(8, 8), device=device)
    function: Callable[[ps.Tensor], ps.Tensor] = lambda x: ps.abs(x) * 2 + 1  # noqa: E731
    expected = np.abs(x.numpy()) * np.float32(2) + np.float32(1)
    own = executables(device)
    for _ in range(3):
        np.testing.assert_array_equal(function(x).numpy(), expected)
    assert not own._programs
    assert "NumPy computes" in ps.explain(function(x))
    for _ in range(20):
        np.testing.assert_array_equal(function(x).numpy(), expected)
    for bridge in own._bridges.values():
        assert bridge.compiled is not None
        bridge.compiled.result(60)
    np.testing.assert_array_equal(function(x).numpy(), expected)
    assert len(own._programs) == 1
    assert not own._bridges
    assert "NumPy" not in ps.explain(function(x))
    for _ in range(20):  # one operation is NumPy's
        (x + x).numpy()
    assert len(own._programs) == 1


# Ahead


@pytest.mark.parametrize("launches", [0, 1])
def test_numpy_stands_in_for_a_kernel_where_it_takes_less_time(
    device: Device, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.driver, "launch_seconds", 0.0 if launches else np.inf)
    x = ps.asarray(values(9, 7), device=device)
    results: set[bytes] = set()

    def has_both() -> bool:
        results.add(((ps.where(x > 0, x, -x) + 1.5) / 3.0).numpy().tobytes())
        runs = executables(device).singles.values()
        return any(isinstance(getattr(run, "__self__", None), numpy_or_launch.NumpyOrLaunch) for run in runs)

    counted = Counted(device, monkeypatch)
    until(has_both)
    for _ in range(numpy_or_launch._TRIALS):
        has_both()
    counted.launches = 0
    has_both()
    assert counted.launches == launches
    assert len(results) == 1


@pytest.mark.parametrize("inline_after", [60, 90])
def test_a_launch_is_preferred_once_the_calling_thread_runs_it(
    inline_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kernel that takes half as long as NumPy, but twice as long while threads run it."""
    clock, launches, by_numpy = 0.0, [0], [0]
    monkeypatch.setattr(numpy_or_launch, "perf_counter", lambda: clock)
    result = SimpleNamespace(usage=SimpleNamespace(event=object()))

    def on_host(inputs: Any, numbers: Any) -> list[Any]:
        nonlocal clock
        clock, by_numpy[0] = clock + 10e-6, by_numpy[0] + 1
        return [result]

    def launch(inputs: Any, numbers: Any) -> list[Any]:
        nonlocal clock
        launches[0] += 1
        clock += 5e-6 if launches[0] > inline_after else 20e-6
        return [result]

    driver = SimpleNamespace(launch_seconds=8e-6, is_done=lambda event: launches[0] > inline_after)
    program = SimpleNamespace(run_in_place=on_host)
    run = numpy_or_launch.NumpyOrLaunch(cast(Any, program), launch, 20e-6, cast(Any, driver)).run
    for _ in range(5000):
        run((), ())
    by_numpy[0] = 0
    for _ in range(100):
        run((), ())
    assert not by_numpy[0]


def test_a_launch_after_a_pause_is_not_what_launches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several takes longer than NumPy, those that follow it take less time."""
    clock, by_numpy, is_first = 0.0, 0, True
    monkeypatch.setattr(numpy_or_launch, "perf_counter", lambda: clock)
    result = SimpleNamespace(usage=SimpleNamespace(event=object()))

    def on_host(inputs: Any, numbers: Any) -> list[Any]:
        nonlocal clock, by_numpy, is_first
        clock, by_numpy, is_first = clock + 6e-6, by_numpy + 1, True
        return [result]

    def launch(inputs: Any, numbers: Any) -> list[Any]:
        nonlocal clock, is_first
        clock += 9e-6 if is_first else 4e-6
        is_first = False
        return [result]

    driver = cast(Any, SimpleNamespace(launch_seconds=8e-6, is_done=lambda event: True))
    program = cast(Any, SimpleNamespace(run_in_place=on_host))
    run = numpy_or_launch.NumpyOrLaunch(program, launch, 20e-6, driver).run
    for _ in range(200):
        run((), ())
    assert by_numpy < 100


def test_numpy_is_not_given_up_on_a_machine_that_is_busy_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, by_numpy = 0.0, 0
    monkeypatch.setattr(numpy_or_launch, "perf_counter", lambda: clock)
    result = SimpleNamespace(usage=SimpleNamespace(event=object()))

    def on_host(inputs: Any, numbers: Any) -> list[Any]:
        nonlocal clock, by_numpy
        by_numpy += 1
        clock += 30e-6 if by_numpy < 20 else 3e-6
        return [result]

    driver = cast(Any, SimpleNamespace(launch_seconds=8e-6))
    program = cast(Any, SimpleNamespace(run_in_place=on_host))
    run = numpy_or_launch.NumpyOrLaunch(program, lambda inputs, numbers: [], 20e-6, driver).run
    for _ in range(200):
        run((), ())
    assert by_numpy == 200


@pytest.mark.parametrize("kind", sorted({*DRIVERS} & {"opencl-svm", "host", "host-late"}))
def test_small_operations_of_numpy_are_written_where_they_stay(kind: str) -> None:
    """With other values and constants each time, while earlier results are in use, and without a copy."""
    device = Device.over(DRIVERS[kind](), Settings(compile_ahead=False))
    index = np.array([2, 0, 2, 1])
    operations: list[Callable[[Any, Any, Any, float], Any]] = [
        lambda m, x, y, number: x + y,
        lambda m, x, y, number: y - x,
        lambda m, x, y, number: x * x,
        lambda m, x, y, number: x * number,
        lambda m, x, y, number: number - x,
        lambda m, x, y, number: m.concat([x, y, x], axis=1),
        lambda m, x, y, number: m.take(x, index if m is np else ps.asarray(index, device=device), axis=0),
    ]
    results, expected = [], []
    for turn in range(6):
        x, y = values(3, 5) + turn, values(3, 5, 1)[..., 0] * turn
        there = [ps.asarray(array, device=device) for array in (x, y)]
        for operation in operations:
            results.append(operation(ps, *there, turn // 2).realize())
            expected.append(operation(np, x, y, turn // 2))
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.numpy(), wanted, strict=True)
    device.sync()
    with ps.profile(device=device) as profile:
        operations[5](ps, *there, 0).realize()
    assert not profile.copies()
    device.close()


def check_that_the_list_waits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a device has work."""
    own, now = executables(device)._ahead, time.perf_counter()
    assert own is not None
    x = ps.asarray(values(40, 30), device=device)
    step = ps.jit(lambda x: x + 1)  # which is built at first, and then only launched
    step(x)
    monkeypatch.setattr(ahead, "perf_counter", lambda: now)
    device.sync()
    now += 100
    own._is_quiet()
    now += 100
    assert own._is_quiet(), "nothing happened for long"
    step(x)
    assert not own._is_quiet()
    now += 100
    done = device.driver.is_done
    monkeypatch.setattr(device.driver, "is_done", lambda event: False)
    device.stream.commit()
    assert not own._is_quiet(), "the step takes long"
    monkeypatch.setattr(device.driver, "is_done", done)
    device.sync()
    now += 100
    assert own._is_quiet()


def test_the_list_waits_while_the_cpu_has_work(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_the_list_waits(device, monkeypatch)


@pytest.fixture
def few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_operations, "_UNARY", ("exp",))
    monkeypatch.setattr(ahead_operations, "_BINARY", ("add",))
    for table in ("_COMPARISONS", "_CASTS", "_OF_NUMBERS", "_OF_INTEGERS"):
        monkeypatch.setattr(ahead_operations, table, ())
    for table in ("_LONG", "_DOTS", "_CUBES", "_IMAGES", "_SORTED"):
        monkeypatch.setattr(ahead_cpu, table, ())
    monkeypatch.setattr(ahead_cpu, "_CONVOLVED", ((), ()))
    for table in ("PRODUCTS", "_BATCHED"):
        monkeypatch.setattr(ahead_cpu, table, ((5, 6), (7, 19), (9, 10)))
    monkeypatch.setattr(ahead_cpu, "_SQUARES", ((5, 6), (7, 19)))
    monkeypatch.setattr(ahead_cpu, "_COLUMNS", ((3, 5), (7, 9)))
    monkeypatch.setattr(ahead, "SHAPES", ahead.SHAPES[:1])
    monkeypatch.setattr(ahead, "_QUIET_SECONDS", 0.0)


def test_kernels_are_compiled_ahead_once_for_a_device(
    few_operations: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where it is noted that they are
    for number in range(2):
        device = Device.over(DRIVERS[OPENCL](), Settings(compile_ahead=True))
        compiled: list[str] = []
        real = device.driver.compile_ahead
        monkeypatch.setattr(
            device.driver,
            "has_compiled",
            lambda text, compiled=compiled, number=number: number or text in compiled,
        )
        monkeypatch.setattr(
            device.driver,
            "compile_ahead",
            lambda text, *given, compiled=compiled, real=real: (
                compiled.append(text),
                len(compiled) <= examples(50, quick=5) and real(text, *given),
            ),
        )
        own = executables(device)
        assert own._ahead is not None
        until(lambda own=own: own.kernels.kept.get("ahead"))
        assert bool(compiled) is (number == 0)
        assert len(set(compiled)) == len(compiled)
        device.close()


def test_what_was_missing_is_compiled_later(
    few_operations: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = Device.over(DRIVERS[OPENCL](), Settings(compile_ahead=True))
    compiled: list[str] = []
    monkeypatch.setattr(device.driver, "has_compiled", compiled.__contains__)
    monkeypatch.setattr(device.driver, "compile_ahead", lambda text, *given: compiled.append(text))
    monkeypatch.setattr(ahead, "SHAPES", ())
    x = ps.asarray(values(40, 30), device=device)
    ps.sinh(ps.exp(x)).numpy()
    until(lambda: any("sinh" in text for text in compiled))
    device.close()
    assert executables(device)._ahead is not None, "which ends by itself"
