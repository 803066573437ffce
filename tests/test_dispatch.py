"""Automatic dispatch: right values wherever programs run, moves without leaks, remembered choices."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, examples, surface
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_lifecycle import assert_quiet_success
from test_random_graphs import compare, grown, meaning

import penstock as ps
from penstock import registry
from penstock.dispatch import AutoDevice, placing, running
from penstock.dispatch.cutting import cut, operations
from penstock.dispatch.device import _usable
from penstock.dispatch.placements import Placement
from penstock.dispatch.placing import Placed
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import DeviceUnavailable, OutOfDeviceMemory, PenstockWarning
from penstock.execution.realize import realize
from penstock.graph.node import leaf
from penstock.measuring import quiet
from penstock.measuring import rates as machine
from penstock.measuring.rates import Rates, at, plausible
from penstock.runtime import Device
from penstock.tensor.jit import schedules

pytestmark = surface

KINDS = [kind for kind in DRIVERS if kind != "host"]  # each as the first of two, NumPy the second
PRODUCTS = ((32.0, 1e-5), (1024.0, 1e-2))
FAST = Rates(
    program=40e-6,
    step=1e-6,
    sums=((1e4, 1e-6), (1e7, 1e-3)),
    products=PRODUCTS,
    exponential=1e-10,
    uploads=((4096.0, 5e-6), (1e7, 1e-3)),
    downloads=((4096.0, 5e-6), (1e7, 1e-3)),
)
SLOW = replace(FAST, sums=((1e4, 1e-5), (1e7, 1e-2)), products=((32.0, 1e-4), (1024.0, 1e-1)), step=1e-5)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The state of the draws of jitted functions, by device; a test closes these devices.
    monkeypatch.setattr(ps.random.default_generator, "_captured", {})


def made(kind: str, rates: tuple[Rates, Rates] = (FAST, SLOW)) -> AutoDevice:
    """The device `auto` for a device of a kind and NumPy, with given rates."""
    members = (Device.over(DRIVERS[kind](), SMALL), Device.over(HostDriver("numpy"), SMALL))
    auto = AutoDevice(members)
    auto.dispatcher._rates = dict(zip(members, rates, strict=True))
    return auto


@pytest.fixture(params=KINDS)
def auto(request: pytest.FixtureRequest) -> Iterator[AutoDevice]:
    device = made(request.param)
    yield device
    device.close()


@pytest.fixture
def plain() -> Iterator[AutoDevice]:
    """On the kind of memory that this machine has."""
    device = made(KINDS[0])
    yield device
    device.close()


def anywhere(device: AutoDevice, choice: random.Random) -> Callable[[Placed], Placement]:
    """Random placements: whole on any member, or split at any operation."""

    def dictate(placed: Placed) -> Placement:
        first, second = choice.sample(list(device.members), 2)
        if choice.random() < 0.5:
            return Placement(first)
        return Placement(first, second, choice.randint(0, len(operations(placed.nodes))))

    return dictate


def chain(x: ps.Tensor) -> ps.Tensor:
    return ps.exp(-(x * 2 + 1)) / 3


def expected_chain(x: np.ndarray) -> np.ndarray:
    return np.exp(-(x * 2 + 1)) / 3


# Values


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(12, quick=4), deadline=None)
@given(seed=st.integers(0, 1 << 20), size=st.integers(8, 60))
@example(seed=488, size=46)  # the epilogue of a product in float64
@example(seed=244, size=44)  # a sum of integers that NumPy computes
@example(seed=31, size=18)  # items apart along the innermost axis, and a border along others
def test_random_graphs_are_right_wherever_they_run_and_are_cut(kind: str, seed: int, size: int) -> None:
    device = made(kind)
    device.dispatcher.dictate = anywhere(device, random.Random(seed))
    try:
        for values in range(2):
            _, plain_nodes = grown(seed, size, values, lambda array: leaf(array, array.shape, array.dtype))
            expected = meaning(plain_nodes)
            grower, wanted = grown(
                seed, size, values, lambda array: leaf(device.upload(array), array.shape, array.dtype)
            )
            realize(wanted, device)
            results = [node.value for node in wanted]
            compare(device, grower, wanted, expected, results, f"seed {seed}, values {values}")
            for node, array in grower.leaves:  # they may be on another device now, with the same values
                result = device.download(node.value, node.dtype, node.shape).wait()
                np.testing.assert_array_equal(result, array)
    finally:
        device.close()


def trained(device: Device, steps: int) -> tuple[list[float], list[np.ndarray]]:
    """Losses and parameters of a small network, by a jitted step that draws random numbers too."""
    rng = np.random.default_rng(0)
    model = ps.nn.Sequential(ps.nn.Linear(8, 16), ps.nn.Dropout(0.25), ps.nn.GELU(), ps.nn.Linear(16, 4))
    for tensor in model.parameters():
        values = ps.asarray(rng.normal(0, 0.3, tensor.shape).astype(np.float32), device=device)
        tensor.device = device
        tensor._become(values._node)
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0)
    ps.random.manual_seed(7)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = ps.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for _ in range(steps):
        x = ps.asarray(rng.normal(size=(32, 8)).astype(np.float32), device=device)
        y = ps.asarray(rng.integers(0, 4, 32), device=device)
        losses.append(step(x, y).item())
    return losses, [tensor.numpy() for tensor in model.parameters()]


@pytest.mark.slow("alternating", "webgpu", "never")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dictated", ["never", "alternating", "anywhere"])
def test_a_jitted_training_step_gives_the_same_model_wherever_its_steps_run(kind: str, dictated: str) -> None:
    device, alone = made(kind), Device.over(HostDriver("alone"), SMALL)
    choice = random.Random(3)
    if dictated == "alternating":
        device.dispatcher.dictate = lambda _: Placement(choice.choice(device.members))
    elif dictated == "anywhere":
        device.dispatcher.dictate = anywhere(device, choice)
    losses, parameters = trained(device, 12)
    right, right_parameters = trained(alone, 12)
    np.testing.assert_allclose(losses, right, rtol=1e-4)
    for parameter, other in zip(parameters, right_parameters, strict=True):
        np.testing.assert_allclose(parameter, other, atol=1e-4)
    device.close()
    alone.close()


def test_gradients_without_jit(auto: AutoDevice) -> None:
    auto.dispatcher.dictate = anywhere(auto, random.Random(1))
    array = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    for _ in range(6):
        x = ps.asarray(array, device=auto).requires_grad_()
        (ps.tanh(x @ x.T) * 2).sum().backward()
        assert x.grad is not None
        slope = 2 * (1 - np.tanh(array @ array.T) ** 2)
        np.testing.assert_allclose(x.grad.numpy(), (slope + slope.T) @ array, rtol=1e-4, atol=1e-4)


def test_what_is_changed_in_place_leaves_no_old_copy_behind(auto: AutoDevice) -> None:
    """A value is used on a device, overwritten on another, and read on the first again."""
    first, second = auto.members
    total = ps.asarray(np.zeros(100, np.float32), device=auto)

    @ps.jit
    def add(x: ps.Tensor) -> None:
        total.__iadd__(x)

    tensor = ps.asarray(np.ones(100, np.float32), device=auto)
    for number in range(1, 9):
        auto.dispatcher.dictate = lambda _, n=number: Placement(auto.members[n // 2 % 2])
        add(tensor)
        for member in (second, first, second):
            auto.dispatcher.dictate = lambda _, m=member: Placement(m)
            np.testing.assert_array_equal((total * 2).numpy(), np.full(100, 2 * number, np.float32))


def test_donated_arguments(auto: AutoDevice) -> None:
    auto.dispatcher.dictate = anywhere(auto, random.Random(5))
    double = ps.jit(donate=0)(lambda x: x * 2)
    x = ps.asarray(np.arange(64, dtype=np.float32), device=auto)
    for _ in range(6):
        given_away, x = x, double(x)
        with pytest.raises(ValueError, match="donated"):
            given_away.numpy()
    np.testing.assert_array_equal(x.numpy(), np.arange(64, dtype=np.float32) * 64)


def test_items_are_set_in_place(auto: AutoDevice) -> None:
    auto.dispatcher.dictate = anywhere(auto, random.Random(6))
    array = np.zeros((4, 5), np.float32)
    x = ps.asarray(array, device=auto)
    for row in range(4):
        x[row] = row + 1.5
        x += 1
        array[row] = row + 1.5
        array += 1
    np.testing.assert_array_equal(x.numpy(), array)


@pytest.mark.slow("webgpu")
def test_random_numbers_are_the_same_bits_wherever_they_are_drawn(auto: AutoDevice) -> None:
    drawn = []
    for member in (*auto.members, None):
        auto.dispatcher.dictate = None if member is None else (lambda _, m=member: Placement(m))
        generator = ps.random.Generator(11, auto)
        result = [generator.uniform((33,)), generator.integers(0, 1000, (40,)), generator.permutation(50)]
        result += [generator.bernoulli(0.3, (64,))]
        drawn.append(([tensor.numpy() for tensor in result], generator.state()))
        jitted = ps.jit(lambda g=generator: g.uniform((20,)))
        drawn[-1][0].extend([jitted().numpy(), jitted().numpy()])
    for values, state in drawn[1:]:
        assert state == drawn[0][1]
        for value, other in zip(values, drawn[0][0], strict=True):
            np.testing.assert_array_equal(value, other)


def test_stacked_products_are_one_launch(plain: AutoDevice) -> None:
    x = ps.asarray(np.ones((40, 8, 16), np.float32), device=plain)
    y = ps.asarray(np.ones((40, 16, 8), np.float32), device=plain)
    for member in plain.members:
        plain.dispatcher.dictate = lambda _, m=member: Placement(m)
        assert plain.dispatcher.build(_recorded(x @ y)).current  # it is built
        text = ps.explain(x.to_device(member) @ y.to_device(member))
        assert "\n1 steps" in text, text


def _recorded(x: ps.Tensor) -> Any:
    from penstock.execution.realize import Structure

    return Structure([x._node])


# What users see of it


def test_the_device_says_what_it_is(plain: AutoDevice) -> None:
    first, second = plain.members
    about = f"{first.name} ({first.capabilities.description}) or numpy (NumPy), whichever is sooner"
    assert repr(plain) == f"<Device auto: {about}>"
    x = ps.asarray([1.0, 2.0], device=plain)
    assert x.device is plain
    assert plain.holder(x._node.value) in plain.members
    assert "device=auto" in repr(x)
    assert "computed already, on" in ps.explain(x)
    other = ps.asarray([1.0, 2.0], device=second)
    with pytest.raises(ValueError, match="tensors are on auto and numpy; use to_device first"):
        x + other
    assert (x + other.to_device(plain)).tolist() == [2.0, 4.0]
    assert x.to_device(second).device is second
    foreign = Device.over(HostDriver("foreign"), SMALL)
    with pytest.raises(ValueError, match="cannot be used on auto"):
        plain.download(foreign.upload(np.ones(3)))


def test_values_come_out_in_every_way(auto: AutoDevice) -> None:
    auto.dispatcher.dictate = anywhere(auto, random.Random(2))
    array = np.random.default_rng(0).random((30, 40)).astype(np.float32)
    for _ in range(4):
        x = chain(ps.asarray(array, device=auto))
        np.testing.assert_allclose(x.numpy_async().wait(), expected_chain(array), rtol=1e-5)
        np.testing.assert_allclose(np.from_dlpack(x), expected_chain(array), rtol=1e-5)
        assert ps.from_dlpack(np.ones(3), device=auto).tolist() == [1, 1, 1]


def test_there_is_one_auto_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_default", None)
    monkeypatch.setenv("PENSTOCK_DEVICE", "auto")
    result = ps.default_device()
    assert isinstance(result, AutoDevice)
    assert ps.use(" Auto ") is result
    assert all(device is not result for device in ps.devices())
    assert [member.capabilities.kind for member in result.members][-1] == "host"
    assert len(result.members) <= 3


def test_software_that_draws_pictures_is_no_candidate() -> None:
    host = Device("host", host_capabilities(), HostDriver)
    kinds: Any = {"kind": "cpu", "language": "wgsl"}
    picture = Device("webgpu:0", replace(host_capabilities(), **kinds), HostDriver)
    cpu = Device(
        "opencl:0",
        replace(host_capabilities(), **kinds | {"language": "opencl", "vector_width": 8}),
        HostDriver,
    )
    gpu = Device("webgpu:1", replace(host_capabilities(), **kinds | {"kind": "gpu"}), HostDriver)

    def broken() -> Any:
        raise DeviceUnavailable("not today")

    lost = Device("cuda:0", replace(host_capabilities(), **kinds | {"kind": "gpu"}), broken)
    assert _usable([picture, cpu, host]) == [cpu, host]
    assert _usable([lost, gpu, picture, cpu, host]) == [gpu, cpu, host]
    assert _usable([lost, host]) == [host]


def test_explain_tells_the_prices_and_the_choice(plain: AutoDevice) -> None:
    first = plain.members[0]
    x = ps.asarray(np.ones((300, 300), np.float32), device=plain)
    lines = ps.explain(chain(x)).splitlines()
    assert lines[0].startswith(f"{first.name}: ")
    assert lines[0].endswith("µs estimated")
    assert lines[1].startswith("numpy: ")
    assert "µs to bring inputs" in lines[1]
    assert lines[2] == f"chosen: {first.name}, which takes the least time"
    assert "1 steps" in lines[-1]
    exact = ps.explain(x * 2).splitlines()[0]  # NumPy's bits are those of a kernel
    assert exact.startswith("NumPy computes [multiply] on the host")
    assert exact.endswith("was not computed before; in a jitted function:")
    small = ps.explain(x[:2, :2] * 2)
    assert "as the host sees all inputs and no step has 32768 items; in a jitted function:" in small


def test_explain_tells_of_inputs_that_are_elsewhere(plain: AutoDevice) -> None:
    """A value that is on the slower device stays there, as a move would take longer."""
    first, second = plain.members
    plain.dispatcher._rates = {first: FAST, second: replace(FAST, program=50e-6)}
    x = ps.asarray(np.ones(1 << 16, np.float32), device=plain)
    plain.dispatcher.dictate = lambda _: Placement(second)
    y = (x + 1).realize()
    plain.dispatcher.dictate = None
    text = ps.explain(y + 1)
    assert "to bring inputs" in text.splitlines()[0]


def test_a_cut_is_chosen_where_each_part_is_sooner_elsewhere(auto: AutoDevice) -> None:
    first, second = auto.members
    products = replace(SLOW, products=((32.0, 1e-6), (1024.0, 1e-4)), sums=((1e4, 1e-5), (1e7, 1.0)))
    auto.dispatcher._rates = {first: replace(FAST, products=((32.0, 1e-3), (1024.0, 1.0))), second: products}
    array = np.random.default_rng(0).random((200, 200), np.float32)

    def function(x: ps.Tensor) -> ps.Tensor:
        return chain(x) @ x.T

    text = ps.explain(function(ps.asarray(array, device=auto)))
    line = next(line for line in text.splitlines() if line.startswith("chosen"))
    assert f"{first.name} for " in line
    assert "operations, then numpy" in line
    assert "for moving values between them" in text
    assert f"on {first.name}:" in text
    for run in (function, ps.jit(function)):
        for _ in range(3):
            result = run(ps.asarray(array, device=auto))
            np.testing.assert_allclose(result.numpy(), expected_chain(array) @ array.T, rtol=1e-4)
        assert auto.holder(result._node.value) is second


def test_cuts_at_every_place_give_the_graph_whole(plain: AutoDevice) -> None:
    x = ps.asarray(np.ones((4, 6), np.float32), device=plain)
    y = chain(x)
    placed = plain.dispatcher.build(_recorded(y @ y.T + y.sum()))
    order = operations(placed.nodes)
    assert cut(placed.nodes, 0) is None
    assert cut(placed.nodes, len(order)) is None
    for place in range(1, len(order)):
        parts = cut(placed.nodes, place)
        if parts is not None:
            assert len(parts.leaves) == len(parts.crossing) <= len(parts.heads)
            assert not set(operations(parts.tails)) & set(order[:place]) - {
                node
                for node in order[:place]
                if not node.inputs or node.primitive.name in "reshape expand permute"
            }


# Choosing


def test_close_prices_are_settled_by_time_and_remembered(
    plain: AutoDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(placing, "seconds_of", lambda ways, *_: tried.append(len(ways)) or [2e-3, 1e-3])
    plain.dispatcher._rates = dict.fromkeys(plain.members, FAST)
    array = np.random.default_rng(0).random(1 << 16).astype(np.float32)
    x = ps.asarray(array, device=plain)
    text = ps.explain(x + x)
    assert "as it seems; those that are close are timed before the first run" in text
    assert text.count("estimated") == 2
    held = []
    for _ in range(9):
        y = (x + x).realize()
        held.append(plain.holder(y._node.value))
        np.testing.assert_array_equal(y.numpy(), array + array)
    assert held[1:] == [plain.members[1]] * 8, "the first time NumPy computed it without a program"
    text = ps.explain(x + x)
    assert "chosen: numpy, which took the least time when it was tried" in text
    assert text.count("measured") == 2
    # A process that comes later does the same without trying.
    later = made(KINDS[0])
    later.dispatcher._rates = dict.fromkeys(later.members, FAST)
    x = ps.asarray(array, device=later)
    for _ in range(3):
        y = (x + x).realize()
    assert later.holder(y._node.value).name == "numpy"
    assert tried == [2]
    assert "when it was tried in an earlier run" in ps.explain(x + x)
    later.close()


def _eager(device: AutoDevice, array: np.ndarray) -> ps.Tensor:
    x = ps.asarray(array, device=device)
    return x + x


def test_a_file_of_choices_that_makes_no_sense_is_not_believed(plain: AutoDevice) -> None:
    plain.dispatcher._rates = dict.fromkeys(plain.members, FAST)
    array = np.ones(1 << 16, np.float32)
    placed = plain.dispatcher.build(_recorded(_eager(plain, array)))
    assert placed._key is not None
    for text in ("nonsense", "[]", '{"abacus": 1.0}', '{"numpy": -1.0}', '{"numpy": "soon"}'):
        plain.dispatcher.choices.put(placed._key, text)
        fresh = plain.dispatcher.build(_recorded(_eager(plain, array)))
        assert fresh.candidates
        assert fresh._best is None, text
    plain.dispatcher.choices.put(placed._key, '{"numpy": 1e-6}')
    fresh = plain.dispatcher.build(_recorded(_eager(plain, array)))
    assert fresh.candidates
    assert fresh._best is not None
    assert "in an earlier run" in fresh._why


def test_programs_are_timed_without_a_trace(auto: AutoDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed runs change nothing, inputs are not moved, and an update in place counts once."""
    auto.dispatcher._rates = dict.fromkeys(auto.members, FAST)
    total = ps.asarray(np.zeros(1 << 15, np.float32), device=auto)
    tensor = ps.asarray(np.ones(1 << 15, np.float32), device=auto)
    holder, shared = auto.holder(tensor._node.value), tensor._node.value.shared
    timed: list[list[float]] = []
    real = running.seconds_of

    def watched(*args: Any) -> list[float]:
        timed.append(real(*args))
        assert auto.holder(tensor._node.value) is holder
        assert tensor._node.value.shared == shared
        return timed[-1]

    monkeypatch.setattr(placing, "seconds_of", watched)
    monkeypatch.setattr(quiet.Watch, "busy", lambda watch: False)

    @ps.jit
    def step(x: ps.Tensor) -> None:
        total.__iadd__(x)

    for _ in range(5):
        step(tensor)
    assert len(timed) == 1
    assert all(0 < seconds < 10 for seconds in timed[0])
    np.testing.assert_array_equal(total.numpy(), np.full(1 << 15, 5, np.float32))


def test_the_median_counts_but_for_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.2, 0.0, 0.01, 0.0, 0.03, 0.0, 0.09] * running._ROUNDS)
    monkeypatch.setattr(running, "perf_counter", lambda: next(clock))

    class Stub:
        devices = ()

        def copied(self, held: Any) -> list[Any]:
            return []

        def run(self, *_: Any) -> list[Any]:
            return []

    assert running.seconds_of([Stub()], [], [], ()) == [pytest.approx(0.03)]  # type: ignore[list-item]


def test_a_device_without_memory_for_a_program_is_not_chosen(plain: AutoDevice) -> None:
    first, second = plain.members
    plain.dispatcher._rates = dict.fromkeys(plain.members, FAST)
    array = np.ones(1 << 16, np.float32)
    x = ps.asarray(array, device=plain)
    first.limit_bytes = first.memory_stats().driver_bytes
    first.trim()
    placed = plain.dispatcher.build(_recorded(x + x))
    program, inputs = placed.chosen([x._node.value], lambda: [x._node], [])
    (result,) = program.run(inputs, [])
    assert plain.holder(result) is second
    np.testing.assert_array_equal(plain.download(result, np.float32).wait(), 2 * array)
    assert f"{first.name}: no memory for it" in placed.explained([x._node])
    assert plain.dispatcher.choices.get(placed._key or "") is None


def test_what_is_used_again_and_again_is_moved_to_where_it_is_sooner(auto: AutoDevice) -> None:
    """A value on the slower device: a single use is not worth a move, many are."""
    first, second = auto.members
    if first.capabilities.kind == "host" and first.capabilities.shared_memory:
        pytest.skip("a move there costs nothing")
    moves = replace(FAST, uploads=((4096.0, 1e-2), (1e7, 1e-1)))
    auto.dispatcher._rates = {first: moves, second: replace(SLOW, program=1e-3)}
    x = ps.asarray(np.ones(1 << 16, np.float32), device=auto)
    auto.dispatcher.dictate = lambda _: Placement(second)
    x = (x + 0).realize()
    assert auto.holder(x._node.value) is second
    auto.dispatcher.dictate = None
    function = ps.jit(chain)
    places = [auto.holder(function(x)._node.value) for _ in range(60)]
    assert places[0] is second
    assert places[-1] is first
    assert places == sorted(places, key=lambda place: place is first), "it is moved once"


def test_values_that_both_use_are_copied_once(auto: AutoDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copied = auto.dispatcher.locations.copied
    monkeypatch.setattr(
        auto.dispatcher.locations, "copied", lambda *about: copies.append(about) or copied(*about)
    )
    x = ps.asarray(np.arange(1000, dtype=np.float32), device=auto)
    for number in range(20):
        auto.dispatcher.dictate = lambda _, n=number: Placement(auto.members[n % 2])
        np.testing.assert_array_equal((x + 1).numpy(), np.arange(1, 1001, dtype=np.float32))
    assert len(copies) <= 2


def test_parameters_stay_side_by_side_when_they_move(auto: AutoDevice) -> None:
    from penstock.tensor.gathering import gathered

    first, second = auto.members
    tensors = gathered([np.full(100 + n, n, np.float32) for n in range(5)], auto)
    auto.dispatcher.locations.bring([tensor._node for tensor in tensors], second)
    auto.dispatcher.locations.bring([tensor._node for tensor in tensors], first)
    for number, tensor in enumerate(tensors):
        np.testing.assert_array_equal(tensor.numpy(), np.full(100 + number, number, np.float32))
    assert {auto.holder(tensor._node.value) for tensor in tensors} == {first}
    assert len({id(tensor._node.value.whole) for tensor in tensors}) == 1


# Memory and life


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_a_thousand_moves(kind: str) -> None:
    device = made(kind)
    choice = random.Random(0)
    device.dispatcher.dictate = lambda _: Placement(choice.choice(device.members))
    arrays = [np.full(size, 1.5, np.float32) for size in (10, 3000, 70_000)]
    kept = [ps.asarray(array, device=device) for array in arrays]

    def churn(count: int) -> None:
        for number in range(count):
            x = kept[number % 3]
            y = (x * 2).realize()
            assert float((y - 3).max()) == 0.0 if number % 50 == 0 else True

    churn(50)
    device.sync()
    before = [member.memory_stats().live_bytes for member in device.members]
    churn(1000)
    device.sync()
    after = [member.memory_stats().live_bytes for member in device.members]
    for value, other in zip(before, after, strict=True):
        assert other <= value + 2 * sum(array.nbytes for array in arrays)
    assert len(device.dispatcher.locations.kept) <= 3
    kept.clear()
    device.cleanup()
    assert not device.dispatcher.locations.kept
    assert device.memory_stats().live_bytes == 0
    assert device.memory_stats().unaccounted_bytes == 0
    device.close()


def test_copies_are_bounded(plain: AutoDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.dispatch import moving

    monkeypatch.setattr(moving, "_KEPT_BYTES", 10_000)
    second = plain.members[1]
    plain.dispatcher.dictate = lambda _: Placement(second)
    tensors = [ps.asarray(np.ones(1000, np.float32), device=plain) for _ in range(20)]
    for tensor in tensors:
        (tensor + 1).realize()
    kept = plain.dispatcher.locations.kept.values()
    assert 0 < sum(copy.nbytes for record in kept for copy in record.copies) <= 10_000


def test_limits_and_statistics_are_those_of_all_members(plain: AutoDevice) -> None:
    plain.limit_bytes = "1MiB"
    assert [member.limit_bytes for member in plain.members] == [1 << 20] * 2
    x = ps.asarray(np.ones(1000, np.float32), device=plain)
    with pytest.raises(OutOfDeviceMemory):
        ps.asarray(np.ones(1 << 20, np.float32), device=plain)
    assert plain.memory_stats().live_bytes == sum(
        member.memory_stats().live_bytes for member in plain.members
    )
    assert x.sum().item() == 1000
    plain.limit_bytes = None
    plain.trace_memory()
    y = ps.asarray(np.ones(1000, np.float32), device=plain)
    assert plain.memory_owners()
    plain.trace_memory(False)
    plain.cleanup()
    plain.sync()
    assert y.sum().item() == 1000


def test_copies_between_buffers_of_members(auto: AutoDevice) -> None:
    array = np.arange(100, dtype=np.int32)
    for source in auto.members:
        for target in auto.members:
            buffer = target.empty(400)
            auto.copy(buffer, source.upload(array))
            np.testing.assert_array_equal(auto.download(buffer, np.int32).wait(), array)
            auto.upload(array[::-1], buffer)
            with auto.view(buffer, np.int32) as seen:
                np.testing.assert_array_equal(seen, array[::-1])


def test_threads(plain: AutoDevice) -> None:
    choice = random.Random(4)
    lock = threading.Lock()
    errors: list[BaseException] = []
    array = np.random.default_rng(0).random((40, 50)).astype(np.float32)
    weight = ps.asarray(array, device=plain)

    def dictate(placed: Placed) -> Placement:
        with lock:
            return anywhere(plain, choice)(placed)

    plain.dispatcher.dictate = dictate

    def work(number: int) -> None:
        try:
            for _ in range(20):
                result = (weight * number + 1).numpy()
                np.testing.assert_allclose(result, array * number + 1, rtol=1e-6)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.slow
@pytest.mark.usefixtures("given_rates")
def test_a_profile_sees_both(plain: AutoDevice) -> None:
    choice = random.Random(0)
    plain.dispatcher.dictate = lambda _: Placement(choice.choice(plain.members))
    x = ps.asarray(np.ones((64, 64), np.float32), device=plain)
    function = ps.jit(chain)
    with ps.profile(device=plain) as profile:
        for _ in range(10):
            function(x).numpy()
            chain(x).numpy()
    assert len(schedules(function)) == 1
    assert {record.device for record in profile.kernels()} == {member.name for member in plain.members}


@pytest.mark.slow
def test_a_forked_child_has_numpy_left() -> None:
    assert_quiet_success(
        """
        auto = ps.use("auto")
        x = (ps.asarray(np.ones(5, np.float32)) + 1).realize()
        auto.running.acquire()

        def child():
            fresh = ps.use("auto")
            assert fresh is not auto
            assert [member.name for member in fresh.members] == ["host"]
            assert (ps.asarray(np.ones(3, np.float32)) + 1).tolist() == [2, 2, 2]
            assert ps.jit(lambda x: x * 2)(ps.asarray(np.ones(3, np.float32))).tolist() == [2, 2, 2]
            try:
                x.numpy()
            except DeviceUnavailable:
                return
            sys.exit("the child was given a value of the parent")

        assert in_child(child) == 0
        assert x.tolist() == [2] * 5
        """
    )


# The machine


def test_seconds_between_and_beyond_points() -> None:
    points = ((10.0, 1.0), (1000.0, 100.0))
    assert at(points, 1) == 1.0
    assert at(points, 100) == pytest.approx(10.0)
    assert at(points, 10_000) == pytest.approx(1000.0)
    assert at(((10.0, 1.0),), 30) == pytest.approx(3.0)


def test_times_that_something_else_has_stretched_are_left_out() -> None:
    assert plausible([(32, 1e-5), (64, 9.0), (128, 1e-4)], 3) == ((32, 1e-5), (64, 1e-4), (128, 1e-4))
    assert plausible([(32, 1e-5), (64, 9.0)], 3) == ((32, 1e-5), (64, 1.6e-4))
    assert plausible([(32, 1e-7), (64, 1e-4)], 3, unsure=2e-5) == ((32, 1e-7), (64, 1e-4))
    assert plausible([(2, 5.0), (1, 7.0)]) == ((1, 5.0), (2, 5.0))


def hosts() -> list[Device]:
    return [Device("host", host_capabilities(), HostDriver)]


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list of measured devices; measuring takes no time here, on a machine that seems idle."""
    result: list[str] = []
    monkeypatch.setattr(quiet.Watch, "busy", lambda watch: False)
    monkeypatch.setattr(machine, "measured", lambda device, _: result.append(device.name) or FAST)
    return result


def test_a_machine_is_measured_once(measurements: list[str]) -> None:
    for _ in range(2):
        (rates,) = machine.machine_rates(hosts()).values()
        assert rates == FAST
    assert measurements == ["host"]


@pytest.mark.parametrize("changed", ["version", "hardware"])
def test_another_version_or_machine_is_measured_again(
    changed: str, measurements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.machine_rates(hosts())
    devices = hosts()
    if changed == "version":
        monkeypatch.setattr(quiet, "version", lambda _: "99.0")
    else:
        other = replace(host_capabilities(), description="another processor")
        devices = [Device("host", other, HostDriver)]
    machine.machine_rates(devices)
    assert measurements == ["host", "host"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[1, 2]",
        json.dumps({"rates": "{}"}),
        json.dumps({"rates": json.dumps(asdict(FAST) | {"step": -1})}),
        json.dumps({"rates": json.dumps(asdict(FAST) | {"sums": []})}),
        json.dumps({"rates": json.dumps(asdict(FAST) | {"products": [[1, "soon"]]})}),
        json.dumps({"rates": json.dumps(asdict(FAST))})[:-9],
    ],
)
def test_a_broken_file_is_measured_again(text: str, measurements: list[str], tmp_path: Path) -> None:
    machine.machine_rates(hosts())
    (path,) = (tmp_path / "penstock").glob("*.json")
    path.write_text(text)
    (rates,) = machine.machine_rates(hosts()).values()
    assert rates == FAST
    assert measurements == ["host", "host"]
    machine.machine_rates(hosts())
    assert measurements == ["host", "host"]


def test_a_folder_that_cannot_be_written_is_no_failure(
    measurements: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(PenstockWarning, match="going on without it"):
        assert machine.machine_rates(hosts())
    assert measurements == ["host"]


def test_many_that_measure_at_once_leave_a_whole_file(measurements: list[str], tmp_path: Path) -> None:
    threads = [threading.Thread(target=machine.machine_rates, args=(hosts(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = list((tmp_path / "penstock").iterdir())
    assert len(files) == 1
    before = len(measurements)
    assert machine.machine_rates(hosts())
    assert len(measurements) == before


def test_a_device_that_cannot_be_measured_is_left_out() -> None:
    def broken() -> Any:
        raise DeviceUnavailable("not today")

    lost = Device("opencl:0", host_capabilities(), broken)
    with pytest.raises(DeviceUnavailable, match="could not be measured"):
        assert AutoDevice([lost]).dispatcher.rates


@pytest.mark.parametrize("kind", ["host", KINDS[0]])
def test_what_is_measured(kind: str) -> None:
    """All sizes are measured if there is time, and the most important ones if there is none."""
    device = Device.over(DRIVERS[kind](), SMALL)
    none = machine._Measurement(device, 0.0).rates()
    assert [size for size, _ in none.products] == [256]
    assert [size for size, _ in none.sums] == [8 << 20]
    assert Rates.parsed(json.loads(json.dumps(asdict(none)))) == none
    device.close()
