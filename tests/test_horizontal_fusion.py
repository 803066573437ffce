"""Horizontal fusion of kernels on a GPU: the same bits as in separate launches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, NATIVE, opencl_threads
from test_random_graphs import compare, grown, meaning, overwriting, poison

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler import launches as launching
from penstock.compiler import passes
from penstock.drivers.opencl import opencl_capabilities
from penstock.execution import executable, realize
from penstock.execution.executable import Executable
from penstock.execution.structure import Structure
from penstock.graph.node import Node, leaf
from penstock.kernels import horizontal_fusion
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.concatenation import Call, concatenated
from penstock.kernels.hazards import Touched
from penstock.kernels.source import KernelSource

Make = Callable[[], Device]


KINDS = {"opencl-threads": opencl_threads, **{kind: DRIVERS[kind] for kind in CUDA_KINDS}}
on_every_gpu = pytest.mark.parametrize("make", KINDS, indirect=True)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes devices of a kind."""
    made: list[Device] = []

    def device() -> Device:
        made.append(Device.over(KINDS[getattr(request, "param", "opencl-threads")]()))
        return made[-1]

    yield device
    for item in made:
        item.close()


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable horizontal fusion: every kernel is a launch."""
    for module in (passes, launching):
        monkeypatch.setattr(module, "kind", lambda *_: None)


def program_of(jitted: Any) -> Executable:
    ((captured,),) = jitted._captured.values()
    assert captured.program is not None
    return captured.program


def launches(result: Executable) -> list[str]:
    """The names of the kernels that are launched, in order."""
    (segments,) = result._segments.values()
    parts = [segment._bound for segment in segments if isinstance(segment, executable._Segment)]
    return [command[0].name for part in parts if part is not None for command in part.commands]


def bundle_of(result: Executable, *outputs: int) -> set[int]:
    """The turns in which the wanted values at these positions are computed."""
    wanted = {result.schedule.results[at] for at in outputs}
    steps = result.schedule.groups
    return {step.turn for step in steps if wanted.intersection(buffer for buffer, _, _ in step.writes)}


# Training


class Xor(nn.Module):
    """Three layers. (The update of a single number would be part of the norm's kernel.)"""

    def __init__(self, device: Device) -> None:
        draw = np.random.default_rng(5)
        shapes = [(2, 24), (24,), (24, 8), (8,), (8, 1)]
        self.weights = [
            ps.asarray(draw.standard_normal(shape).astype(np.float32), device=device).requires_grad_()
            for shape in shapes
        ]

    def forward(self, x: ps.Tensor) -> ps.Tensor:
        first, bias, second, other_bias, last = self.weights
        return ps.tanh(ps.tanh(x @ first + bias) @ second + other_bias) @ last


def train_xor(device: Device, steps: int = 6) -> tuple[list[np.ndarray], Any, optim.Optimizer]:
    model = Xor(device)
    optimizer = optim.Adam(model.parameters(), lr=0.05, clip_norm=0.1)
    x = ps.asarray(np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32), device=device)
    y = ps.asarray(np.array([[0], [1], [1], [0]], np.float32), device=device)

    @ps.jit
    def step() -> ps.Tensor:
        loss = ps.mean((model(x) - y) ** 2)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    losses = [step().numpy() for _ in range(steps)]
    return [*losses, *model.state_dict().values(), *optimizer.state_dict().values()], step, optimizer


@on_every_gpu
def test_the_updates_of_all_parameters_are_one_launch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    together, step, optimizer = train_xor(make())
    result = program_of(step)
    changed = [
        at for at, node in enumerate(result.schedule.results) if result.schedule.buffers[node].nbytes > 4
    ]  # the others are loss and powers
    assert len(changed) == 3 * len(optimizer.parameters)
    assert len(bundle_of(result, *changed)) == 1
    names = launches(result)
    assert names[-1].startswith("side_by_side"), "which is the last"
    assert len(names) == result.schedule.turns <= len(result.schedule.steps) - 4
    alone(monkeypatch)
    apart, step, _ = train_xor(make())
    assert not any(name.startswith("side_by_side") for name in launches(program_of(step)))
    for value, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(value, other)


@on_every_gpu
def test_a_launch_takes_few_parameters_because_the_values_lie_side_by_side(make: Make) -> None:
    _, step, optimizer = train_xor(make())
    update = next(name for name in reversed(launches(program_of(step))) if "side_by_side" in name)
    kernel = program_of(step)._cache._kernels[update]
    # Parameters, means and squares, the temporaries, the rate and two powers, with offsets; and constants.
    assert len(kernel.buffer_slots) <= 3 + 1 + 3
    for tensors in (optimizer.parameters, *optimizer._state.values()):
        assert len({id(tensor._node.value.whole) for tensor in tensors}) == 1


def train_gpt(device: Device, dtype: Any = ps.float32) -> list[float]:
    ps.random.manual_seed(7)
    before = ps.default_device()
    ps.use(device)
    try:
        model = nn.GPT(vocab_size=31, context=8, width=16, layers=2, heads=2)
        if dtype != ps.float32:
            model.to(dtype)
        optimizer = optim.AdamW(model.parameters(), lr=0.01, clip_norm=0.5)

        @ps.jit
        def step(tokens: ps.Tensor) -> ps.Tensor:
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            optimizer.backward(loss)
            optimizer.step()
            return loss

        tokens = ps.asarray(np.random.default_rng(1).integers(0, 31, (3, 9)).astype(np.int32))
        return [step(tokens).item() for _ in range(8)]
    finally:
        ps.use(before)


@on_every_gpu
@pytest.mark.slow("float16", "opencl-threads")
@pytest.mark.parametrize("dtype", [ps.float32, ps.float16], ids=str)
def test_a_gpt_learns_the_same(dtype: Any, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    together = train_gpt(make(), dtype)
    assert together[-1] < together[0]
    alone(monkeypatch)
    assert train_gpt(make(), dtype) == together


# Any graph


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which programs compute everything, the first time too, and however small."""
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)


@on_every_gpu
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_in_poisoned_memory(seed: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three graphs of the same structure in a program, so that every kernel has others to be fused with."""
    poison(monkeypatch)
    device = make()
    copies = range(3)

    def to_device(array: np.ndarray) -> Node:
        return leaf(device.upload(array), array.shape, array.dtype)

    expected = [
        meaning(grown(2000 + seed, 30, at, lambda array: leaf(array, array.shape, array.dtype))[1])
        for at in copies
    ]
    graphs = [grown(2000 + seed, 30, at, to_device) for at in copies]
    wanted = [node for _, nodes in graphs for node in nodes]
    structure = Structure(wanted)
    result = realize.executables(device).build(structure)
    assert result.schedule.turns < len(result.schedule.steps), "some are together"
    inputs = [node.value for node in structure.inputs]
    for turn in range(2):
        over = overwriting(result, len(wanted), len(inputs), random.Random(seed)) if turn else None
        results = iter(result.run(inputs, structure.constants(), over))
        for (grower, nodes), right in zip(graphs, expected, strict=True):
            compare(device, grower, nodes, right, [next(results) for _ in nodes], f"seed {seed}, turn {turn}")


# Bounds


def built(device: Device, wanted: list[ps.Tensor]) -> tuple[Executable, list[Any], list[Any]]:
    """A program with its inputs and constants."""
    nodes = [node._node for node in wanted]
    structure = Structure(nodes)
    result = realize.executables(device).build(structure)
    return result, [node.value for node in structure.inputs], structure.constants()


def numbers(count: int, device: Device) -> list[ps.Tensor]:
    return [ps.asarray(np.full(40, at, np.float32), device=device) for at in range(count)]


def parameter_bytes(result: Executable) -> list[int]:
    kernels = [result._cache._kernels[name] for name in launches(result)]
    return [sum(8 if kind.endswith("*") else 4 for kind in kernel.signature) for kernel in kernels]


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_no_kernel_takes_more_parameters_than_every_device_has(make: Make) -> None:
    device = make()
    actual, inputs, constants = built(device, [ps.sqrt(tensor) for tensor in numbers(130, device)])
    for at, result in enumerate(actual.run(inputs, constants)):
        np.testing.assert_array_equal(device.download(result, np.float32).wait(), np.sqrt(np.float32(at)))
    assert len(actual.schedule.steps) == 130
    assert len(launches(actual)) == 4
    assert max(parameter_bytes(actual)) <= 1024
    # The outputs of many kernels lie in the arena of temporaries, and so are a single parameter.
    actual, inputs, constants = built(
        device, [ps.concat([ps.sum(tensor, keepdims=True) + 1 for tensor in numbers(130, device)])]
    )
    (result,) = actual.run(inputs, constants)
    np.testing.assert_array_equal(device.download(result, np.float32).wait(), 1 + 40 * np.arange(130))
    assert len(actual.schedule.steps) == 131
    assert max(parameter_bytes(actual)) <= 64


@pytest.mark.usefixtures("at_once")
def test_buffers_may_lie_anywhere_and_a_program_is_not_written_again_and_again(make: Make) -> None:
    device = make()
    actual, inputs, constants = built(device, [ps.sqrt(tensor) for tensor in numbers(6, device)])
    for turn in range(12):
        whole = device.empty(1 << 16)
        given = []
        for at in range(len(inputs)):
            # Some have separate allocations, the others are parts of one, each time at other offsets.
            offset = 512 * (at * (turn + 1) % 31) + (128 if turn == 3 and at == 2 else 0)
            given.append(device.empty(160) if (turn >> at) & 1 else whole.part(offset, 160))
            device.upload(np.full(40, at + turn, np.float32), given[-1])
        for at, result in enumerate(actual.run(given, constants)):
            array = device.download(result, np.float32).wait()
            np.testing.assert_array_equal(array, np.sqrt(np.float32(at + turn)))
    assert len(actual._segments) == 1 + executable._MAX_ARRANGEMENTS


@on_every_gpu
@pytest.mark.usefixtures("at_once")
def test_programs_that_differ_in_the_number_of_rows_only(make: Make) -> None:
    """A kernel of rows has the same text for each number of them, but a launch of several has not."""
    device, rng = make(), np.random.default_rng(3)
    whole = device.empty(1 << 13)
    given = [whole.part(at << 12, 1 << 12) for at in range(2)]
    for rows in (3, 5, 7, 3):
        arrays = [rng.normal(size=(rows, 64)).astype(np.float32) for _ in given]
        rest = [ps.asarray(array, device=device) for array in arrays]
        actual, _, constants = built(device, [ps.concat([ps.max(tensor, axis=1) for tensor in rest])])
        for part, array in zip(given, arrays, strict=True):
            device.upload(array, part)
        (result,) = actual.run(given, constants)
        assert [name.partition("_")[0] for name in launches(actual)] == ["side", "map"]
        maxima = device.download(result, np.float32, (2 * rows,)).wait()
        np.testing.assert_array_equal(maxima, np.concatenate(arrays).max(1))


def call(source: KernelSource, unit: int) -> Call:
    return Call(source, ((0, unit), (1, 8 * unit)), (), (), 1, Touched())


def source(name: str, statements: int = 0) -> KernelSource:
    k = KernelBuilder(name, opencl_capabilities(NATIVE), ["float32"], ["float32"])
    for number in range(statements):
        k.let(f"x{number}", k.load(k.inputs[0], number))
    return k.source((3,), (256,))


def test_texts_and_calls_are_bounded() -> None:
    capabilities = opencl_capabilities(NATIVE)
    lies = {0: (7, 100), 1: (8, 0)}
    same = horizontal_fusion.fuse_horizontally(
        [call(source("one"), at) for at in range(2000)], lies, capabilities
    )
    assert [len(launch.source.text) < 40_000 for launch in same] == [True, True]
    assert [launch.source.grid for launch in same] == [(3 * 1024,), (3 * 976,)]
    assert same[0].locations == ((7, 0), (8, 0))
    others = [call(source(f"k{at}"), at) for at in range(100)]
    assert len(horizontal_fusion.fuse_horizontally(others, lies, capabilities)) == 3
    long = [call(source(f"k{at}", 700), at) for at in range(4)]
    assert len(horizontal_fusion.fuse_horizontally(long, lies, capabilities)) == 2


def test_equal_calls_give_equal_texts() -> None:
    capabilities = opencl_capabilities(NATIVE)
    calls = [call(source(name), at) for at, name in enumerate("abab")]
    lies = {0: (0, 0), 1: (1, 0)}
    (first,) = horizontal_fusion.fuse_horizontally(calls, lies, capabilities)
    (second,) = horizontal_fusion.fuse_horizontally(calls, lies, capabilities)
    (other,) = horizontal_fusion.fuse_horizontally(calls, {0: (0, 1), 1: (1, 0)}, capabilities)
    assert first == second != other
    more = [replace(calls[0], source=replace(calls[0].source, grid=(4,))), *calls[1:]]
    (longer,) = horizontal_fusion.fuse_horizontally(more, lies, capabilities)
    assert len({launch.source.name for launch in (first, other, longer)}) == 3
    assert first.source.text.count("DEVICE void") == 2


def test_concatenated_calls_keep_their_numbers_of_workgroups() -> None:
    first, second = call(source("same"), 0), call(source("same"), 1)
    second = replace(second, source=replace(second.source, grid=(5,)))
    (chain,) = concatenated([first, second], (), opencl_capabilities(NATIVE))
    assert [f"group < {groups}" in chain.source.text for groups in (3, 5)] == [True, True]


@pytest.mark.parametrize("names", ["a", "ab", "abc", "aab", "abcd"])
def test_calls_that_come_in_turn_are_a_loop(names: str) -> None:
    """Whatever comes before them and after."""
    calls = [call(source(name), at) for at, name in enumerate("xy" + names * 9 + names[0] + "z")]
    (chain,) = concatenated(calls, (), opencl_capabilities(NATIVE))
    assert chain.source.text.count("row < 9") + chain.source.text.count("row < 10") == 1
    assert chain.source.text.count("group <") == len("xyz" + names) + (len(names) > 1)
