"""Schedules as plain data: made, compared, printed and simulated without a device."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from conftest import DRIVERS
from test_products import GPU as CUDA
from test_random_graphs import grown, meaning

from penstock import Device
from penstock.compiler.pipeline import compile_graph, prepare
from penstock.compiler.schedule import BufferSpec, Copy, Schedule
from penstock.compiler.simulate import simulate
from penstock.compiler.target import Budget, Target
from penstock.drivers.driver import Capabilities
from penstock.errors import OutOfDeviceMemory
from penstock.execution.executable import Executable
from penstock.execution.realize import executables
from penstock.execution.structure import Structure
from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.decompose import decompose
from penstock.graph.dtypes import bfloat16, float32
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, leaf, topological
from penstock.graph.unstack import unstack

CPU = replace(CUDA, kind="cpu", language="opencl", vector_width=8, compute_units=4, matmul_library=False)
GPU = replace(CPU, kind="gpu", vector_width=1, compute_units=16)
WEB = replace(GPU, language="wgsl", int64=False, float64=False, max_buffers=8, local_bytes=16 << 10)
TARGETS = {"cpu": CPU, "gpu": GPU, "cuda": CUDA, "webgpu": WEB, "numpy": replace(CPU, language="numpy")}


def compiled(wanted: list[Node], capabilities: Capabilities) -> tuple[Schedule, Structure]:
    structure = Structure(wanted, checked=False)
    nodes, inputs = prepare(wanted, structure.inputs)
    return compile_graph(nodes, inputs, structure.numbers, Target.of(capabilities)), structure


def plain(array: np.ndarray) -> Node:
    return leaf(array, array.shape, array.dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_of_a_random_graph_computes_what_numpy_does(seed: int, target: str) -> None:
    grower, wanted = grown(seed, 60, 0, plain)
    expected = meaning(wanted)
    schedule, structure = compiled(wanted, TARGETS[target])
    arrays = [node.value for node in structure.inputs]
    choice = random.Random(seed)
    aliases: dict[int, int] = {}
    for at in range(len(wanted)):
        result = schedule.results[at]
        unused = [k for k in range(len(arrays)) if k not in aliases.values()]
        free = [k for k in unused if schedule.may_alias(result, 1 + k)]
        if free and not schedule.shared[at]:
            aliases[at] = choice.choice(free)
    for over in (None, aliases):
        results = simulate(schedule, arrays, structure.constants(), over)
        for node, right, stored in zip(wanted, expected, results, strict=True):
            actual = stored.view(node.dtype).reshape(node.shape)
            if grower.error[node] == 0:
                np.testing.assert_array_equal(actual, right)
            else:
                tolerance = grower.error[node]
                wide = np.complex128 if actual.dtype.kind == "c" else np.float64
                np.testing.assert_allclose(actual.astype(wide), right.astype(wide), rtol=0, atol=tolerance)


def test_the_same_graph_gives_equal_schedules_and_another_one_does_not() -> None:
    first, _ = compiled(grown(5, 60, 0, plain)[1], CPU)
    second, _ = compiled(grown(5, 60, 1, plain)[1], CPU)  # with other values
    other, _ = compiled(grown(6, 60, 0, plain)[1], CPU)
    assert first == second
    assert str(first) == str(second)
    assert first != other
    assert first != compiled(grown(5, 60, 0, plain)[1], GPU)[0]


def test_a_printed_schedule_names_the_steps_and_the_certificate() -> None:
    schedule, _ = compiled(grown(5, 60, 0, plain)[1], CPU)
    *lines, last = str(schedule).splitlines()
    assert len(lines) == len(schedule.steps)
    assert lines[0].startswith("1. ")
    assert "% over the least possible" in last
    assert schedule.plan.arena_bytes >= schedule.plan.lower_bound


def test_no_step_reads_what_a_later_one_writes() -> None:
    for capabilities in TARGETS.values():
        schedule, _ = compiled(grown(7, 80, 0, plain)[1], capabilities)
        written = set(schedule.inputs)
        for step in schedule.groups:
            assert all(read[0] in written or read[0] in schedule.arenas for read in step.reads)
            written.update(buffer for buffer, _, _ in step.writes)


def test_a_budget_is_kept_or_refused() -> None:
    _, wanted = grown(5, 60, 0, plain)
    structure = Structure(wanted, checked=False)
    nodes, inputs = prepare(wanted, structure.inputs)

    def within(limit: int, held: int = 0) -> Schedule:
        return compile_graph(nodes, inputs, structure.numbers, Target.of(CPU, Budget(limit, held)))

    needed = compile_graph(nodes, inputs, structure.numbers, Target.of(CPU)).taken_bytes
    assert within(needed).taken_bytes == within(needed + 100, 100).taken_bytes == needed
    assert not within(needed).recomputed
    with pytest.raises(OutOfDeviceMemory, match="smallest budget that would do is") as raised:
        within(100, 100)
    smallest = raised.value.smallest
    assert smallest is not None
    assert within(smallest, 100).taken_bytes == smallest - 100
    with pytest.raises(OutOfDeviceMemory):
        within(smallest - 1, 100)


def with_a_copy(schedule: Schedule) -> Schedule:
    """The input of the only step is copied into memory of its own, from where the step reads it."""
    (step,) = schedule.groups
    spare = len(schedule.buffers)
    (call,) = step.calls
    output, source = step.locations
    moved = replace(call, locations=(output, (spare, 2)))
    return replace(
        schedule,
        steps=(
            Copy(0, (spare, 2), source, 256),
            replace(step, turn=1, locations=(output, (spare, 2)), calls=(moved,)),
        ),
        buffers=(*schedule.buffers, BufferSpec("arena", 4096)),
    )


def test_a_copy_is_a_step_like_others() -> None:
    x = np.arange(64, dtype=np.float32)
    schedule, structure = compiled([elementwise.exp(plain(x))], CPU)
    moved = with_a_copy(schedule)
    assert "1. copy of 256 B" in str(moved)
    (result,) = simulate(moved, [node.value for node in structure.inputs], structure.constants())
    np.testing.assert_array_equal(result.view(np.float32), np.exp(x))


@pytest.mark.parametrize("kind", ["host", "host-far", "opencl-device"])
def test_an_executable_copies_too(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    x = np.arange(64, dtype=np.float32)
    structure = Structure([elementwise.exp(leaf(device.upload(x), x.shape, x.dtype))], checked=False)
    kernels = executables(device).kernels
    nodes, inputs = prepare(structure.wanted, structure.inputs)
    target = Target(device.name, device.capabilities, kernels.lowering)
    schedule = with_a_copy(compile_graph(nodes, inputs, structure.numbers, target))
    executable = Executable(schedule, device, kernels)
    for _ in range(3):
        (result,) = executable.run([node.value for node in structure.inputs], structure.constants())
        np.testing.assert_allclose(device.download(result, np.float32).wait(), np.exp(x), rtol=1e-6)
    device.close()


def products(sides: list[list[Node]], stacked: bool) -> list[Node]:
    """The products of pairs and the gradients of their squares: of stacks, or each by itself."""
    if stacked:
        stacks = [shaping.concat([shaping.reshape(x, (1, *x.shape)) for x in side], 0) for side in sides]
        product = contraction.matmul(*stacks)
        rest = [(0, length, 1) for length in product.shape[1:]]
        items = [shaping.slice_(product, ((index, 1, 1), *rest)) for index in range(len(sides[0]))]
        results = [shaping.reshape(item, product.shape[1:]) for item in items]
    else:
        results = [contraction.matmul(*pair) for pair in zip(*sides, strict=True)]
    squares = [reducing.sum_(elementwise.multiply(result, result), (0, 1)) for result in results]
    actual = gradients(reduce(elementwise.add, squares), None, [*sides[0], *sides[1]])
    return decompose([*results, *(node for node in actual if node is not None)], CPU)


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_products_of_stacks_are_single_products_on_a_cpu_and_one_product_on_a_gpu(dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    arrays = [[rng.integers(-3, 4, s).astype(np.float32) for _ in range(4)] for s in ((8, 6), (6, 5))]
    sides = [[elementwise.cast(plain(array), dtype) for array in side] for side in arrays]
    wanted = products(sides, stacked=True)
    assert len(wanted) == 12
    schedule, structure = compiled(wanted, CPU)
    single = compiled(products(sides, stacked=False), CPU)[0]
    # Nothing is copied: the kernels are those of the single products, in the gradients too.
    kernels, expected = (Counter(step.group.structure for step in s.groups) for s in (schedule, single))
    assert kernels == expected
    results = simulate(schedule, [node.value for node in structure.inputs], structure.constants())
    for node, right, stored in zip(wanted, meaning(wanted), results, strict=True):
        np.testing.assert_array_equal(stored.view(node.dtype).reshape(node.shape), right)
    steps = compiled(wanted, GPU)[0].groups
    assert sum(step.group.kind == "matmul" for step in steps) == 3  # of stacks: forward, and both gradients


def test_a_product_of_stacks_that_is_read_as_a_whole_stays() -> None:
    x = plain(np.arange(24, dtype=np.float32).reshape(1, 4, 6))
    stack = shaping.concat([x, elementwise.negative(x)], 0)
    product = contraction.matmul(stack, shaping.permute(stack, (0, 2, 1)))
    first = shaping.slice_(product, ((0, 1, 1), (0, 4, 1), (0, 4, 1)))
    rows = shaping.slice_(product, ((0, 2, 1), (0, 1, 1), (0, 4, 1)))
    for others in ([product], [elementwise.exp(product)], [rows], [reducing.sum_(product, (0,))]):
        assert unstack([first, *others]) == [first, *others]
    (matrix,) = unstack([first])
    assert matrix.inputs[0].shape == (4, 4)


def test_gradients_of_some_of_the_products_are_those_of_stacks() -> None:
    sides = [
        [plain(np.arange(12, dtype=np.float32).reshape(s) + i) for i in range(3)] for s in ((3, 4), (4, 3))
    ]
    stacks = [shaping.concat([shaping.reshape(x, (1, *x.shape)) for x in side], 0) for side in sides]
    product = contraction.matmul(*stacks)
    pieces = [shaping.slice_(product, ((index, 1, 1), (0, 3, 1), (0, 3, 1))) for index in (0, 0, 2)]
    total = reducing.sum_(reduce(elementwise.add, [*pieces[:2], elementwise.exp(pieces[2])]), (0, 1, 2))
    wanted = [node for node in gradients(total, None, sides[0]) if node is not None]
    new = unstack(wanted)  # of two pieces of the first, none of the second, and one of the third
    assert all(node.ndim == 2 for node in topological(new) if node.primitive is contraction.MATMUL)
    for right, result in zip(meaning(wanted), meaning(new), strict=True):
        np.testing.assert_array_equal(result, right)
