"""Indices out of range are refused on every driver and path, with the index, the length and the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, Lazy, surface

import penstock as ps
from penstock.config import Settings
from penstock.dispatch.device import AutoDevice
from penstock.drivers.host import HostDriver
from penstock.errors import BadIndex
from penstock.graph.bounds import unchecked
from penstock.graph.calls import inline
from penstock.graph.contraction import GATHER
from penstock.graph.node import topological
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.runtime import Device
from penstock.tensor import core

pytestmark = surface

ROWS, WIDTH, COUNT = 7, 5, 4
# Operations on a table and an index, by what they do to the index first.
Function = Callable[[Any, Any], Any]
READS: dict[str, Function] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "x[index]": lambda x, i: x[i],
    "x[1, index]": lambda x, i: x.T[1, i],
    "x[index, index]": lambda x, i: x[i, i * 0],
    "x[:, None, index]": lambda x, i: x.T[:, None, i],
    "take": lambda x, i: ps.take(x, i, axis=0),
    "take_along_axis": lambda x, i: ps.take_along_axis(x, ps.expand_dims(i, axis=1), axis=0),
    "cross_entropy": lambda x, i: F.cross_entropy(x.T[:COUNT], i),
    "linear_cross_entropy": lambda x, i: F.linear_cross_entropy(x[:COUNT], x, i),
    "gradient": lambda x, i: ps.grad(lambda x: ps.sum(F.embedding(i, x) ** 2))(x),
}
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FROM_END = ("x[index]", "x[1, index]", "x[index, index]", "x[:, None, index]", "take", "take_along_axis")


@pytest.fixture(params=[*DRIVERS, "auto"])
def on(request: pytest.FixtureRequest, given_rates: None) -> Iterator[Device]:
    names = ["opencl-device", "host"] if request.param == "auto" else [request.param]
    forced = "kernels_only" in request.fixturenames
    members = [Device.over(DRIVERS[name](), replace(SMALL, force_kernels=forced)) for name in names]
    yield AutoDevice(members) if request.param == "auto" else members[0]
    for member in members:
        member.close()


def table(on: Device) -> ps.Tensor:
    return ps.asarray(np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH), device=on)


def ids(on: Device, last: int, dtype: Any = np.int64) -> ps.Tensor:
    return ps.asarray(np.array([0, 3, 2, last], dtype), device=on)


def refused(function: Callable[[], ps.Tensor], index: int, line: Callable[..., Any]) -> None:
    """The value cannot be read. The error names the index, the length, and the line of `line`."""
    with pytest.raises(BadIndex) as caught:
        function().numpy()
    error = caught.value
    assert (error.index, error.length) == (index, ROWS)
    assert f"index {index} is out of range" in str(error)
    assert f"length {ROWS}" in str(error)
    assert isinstance(error, IndexError)
    assert error.where == f"{__file__}:{line.__code__.co_firstlineno}"
    assert error.where in str(error)


@pytest.fixture
def kernels_only() -> None:
    """Outside of jitted functions, too, kernels compute everything."""


@pytest.mark.parametrize("name", READS)
def test_numpy_refuses_a_bad_index(name: str) -> None:
    on = Device.over(HostDriver("host"), SMALL)
    function, bads = READS[name], (ROWS, 10**6, -ROWS - 1 if name in FROM_END else -1)
    for bad in bads:
        refused(lambda: function(table(on), ids(on, bad)), bad, function)  # noqa: B023
    on.close()


@pytest.mark.slow("auto")
@pytest.mark.parametrize("name", READS)
def test_kernels_refuse_a_bad_index(on: Device, name: str, kernels_only: None) -> None:
    function = READS[name]
    x = table(on)
    for bad in (ROWS, 10**6, -ROWS - 1 if name in FROM_END else -1):
        refused(lambda: function(x, ids(on, bad)), bad, function)  # noqa: B023
    for good in (ROWS - 1, *((-1, -ROWS) if name in FROM_END else ())):
        expected = function(x, ids(on, good % ROWS)).numpy()
        np.testing.assert_array_equal(function(x, ids(on, good)).numpy(), expected)


@pytest.mark.slow("webgpu", "x[1, index]", "x[:, None, index]", "take")
@pytest.mark.parametrize("name", READS)
def test_jitted_functions_refuse_a_bad_index(on: Device, name: str) -> None:
    function = READS[name]
    jitted, x = ps.jit(lambda x, i: function(x, i)), table(on)
    expected = function(x, ids(on, ROWS - 1)).numpy()
    for bad in (ROWS, -ROWS - 1 if name in FROM_END else -1):
        np.testing.assert_allclose(jitted(x, ids(on, ROWS - 1)).numpy(), expected, 1e-6)
        refused(lambda: jitted(x, ids(on, bad)), bad, function)  # noqa: B023
    np.testing.assert_allclose(jitted(x, ids(on, ROWS - 1)).numpy(), expected, 1e-6)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_every_dtype_are_refused(dtype: str) -> None:
    on = ps.default_device()
    x, limits = table(on), np.iinfo(dtype)
    for name in ("x[index]", "embedding"):
        jitted = ps.jit(lambda x, i, name=name: READS[name](x, i))
        for bad in (ROWS, int(limits.max), *((-ROWS - 1, int(limits.min)) if limits.min else ())):
            with pytest.raises(BadIndex, match=f"index {bad} is out of range"):
                jitted(x, ids(on, bad, dtype)).numpy()
        np.testing.assert_array_equal(jitted(x, ids(on, 5, dtype)).numpy()[3], x.numpy()[5])


def test_items_cannot_be_replaced_at_a_bad_index(on: Device) -> None:
    for bad in (ROWS, -ROWS - 1):
        x = table(on)
        for key in (
            ids(on, bad),
            [0, bad],
            np.array([bad]),
            bad,
            (slice(None), ps.asarray([bad], device=on)),
        ):
            with pytest.raises(BadIndex, match=rf"index {bad} is out of range .* at {__file__}"):
                (x.T if isinstance(key, tuple) else x)[key] = 0.0
        np.testing.assert_array_equal(x.numpy(), table(on).numpy())


def test_what_the_host_knows_is_refused_at_once(on: Device) -> None:
    x = table(on)
    for bad in (ROWS, -ROWS - 1):
        for key in ([0, bad], np.array([bad, 0]), bad):
            with pytest.raises(BadIndex, match=rf"index {bad} .* length {ROWS}: -{ROWS} to {ROWS - 1} can"):
                x[key]
    with pytest.raises(BadIndex, match=r"axis 0 of shape \(0, 5\), which has length 0: no index can be used"):
        x[:0][ids(on, 0)]
    assert x[:0][ids(on, 0)[:0]].shape == (0, WIDTH)
    np.testing.assert_array_equal(x[x > 9].numpy(), np.arange(10, ROWS * WIDTH))
    np.testing.assert_array_equal(ps.repeat(x, 2, axis=0).numpy(), np.repeat(x.numpy(), 2, axis=0))


def test_nothing_is_looked_at_that_the_graph_shows_to_be_in_range() -> None:
    x = table(ps.default_device())
    known = (ps.arange(ROWS), ps.arange(-1, 3), ps.argmax(x, axis=0), ps.argsort(x, axis=0)[2])
    clamped = ps.minimum(ps.maximum(ps.asarray([1, 2]) + 0, 0), ROWS - 1)
    for index in (*known, clamped, [1, 2], x[:, 0] > 4):
        assert "uint" not in ps.explain(x[index])
    unknown = (ps.arange(ROWS + 1), ps.arange(-ROWS - 1, 0), ps.argmax(x, axis=1) + 1)
    unknown = (*unknown, ps.maximum(ps.asarray([1, 2]) + 0, 0), ps.minimum(clamped - 1, ROWS - 1))
    for index in (*unknown, ps.asarray([1, ROWS]), ps.asarray([-ROWS - 1]), ps.asarray([1, 2]) + 0):
        assert "uint" in ps.explain(x[index])


def test_an_index_is_looked_at_once(on: Device, kernels_only: None) -> None:
    """An index that is in range for an axis is so for every axis as long, but not for a shorter one."""
    x, low, high = table(on), ids(on, -ROWS), ids(on, ROWS - 1)
    moves = on.dispatcher is not None  # so nothing is remembered
    for index in (low, high):
        x[index].numpy()  # its items were not checked on the host before
        on.sync()
        for _ in range(2):
            assert bool(checks(x[index], ps.take(x, index, axis=0), x.T[:, index])) == moves
            np.testing.assert_array_equal(x[index].numpy(), x.numpy()[index.numpy()])
        short = x[: ROWS - 1]
        assert checks(short[index])
        worst = -ROWS if index is low else ROWS - 1
        for _ in range(2):
            with pytest.raises(BadIndex, match=rf"index {worst} .* -{ROWS - 1} to {ROWS - 2} can be used"):
                short[index].numpy()
        with pytest.raises(BadIndex, match=rf"index {worst} .* axis 1 of .*{__file__}"):
            ps.take(short.T, index, axis=1).numpy()
    F.embedding(high, x).numpy()
    on.sync()
    assert bool(checks(F.embedding(high, x))) == moves
    with pytest.raises(BadIndex, match=rf"embedding: index -{ROWS} .* 0 to {ROWS - 1} can be used"):
        F.embedding(low, x).numpy()


def test_a_jitted_function_looks_at_every_index(on: Device) -> None:
    """Also at an index that was in range before, or that comes from outside and changes."""
    x, index = table(on), ids(on, 1)
    x[index].numpy()
    on.sync()
    jitted, outside = ps.jit(lambda i: x[i]), ps.jit(lambda: x[index])
    for last in (1, 2, ROWS, 3):
        fresh = index if last == 1 else ids(on, last)
        index._rebind(fresh)
        for function in (lambda: jitted(fresh), outside):  # noqa: B023
            if last == ROWS:
                with pytest.raises(BadIndex, match=f"index {ROWS}"):
                    function().numpy()
            else:
                np.testing.assert_array_equal(function().numpy(), x.numpy()[fresh.numpy()])


def checks(*tensors: ps.Tensor) -> list[Any]:
    """The nodes that have an index looked at."""
    return unchecked(topological([tensor._node for tensor in tensors]))


def test_the_index_of_a_function_that_is_called_is_not_looked_at(on: Device) -> None:
    x = table(on)
    largest = ps.reshape(x, -1)[ps.argmax(x)]
    assert not checks(largest)
    assert largest.item() == x.numpy().max()


@pytest.mark.slow("int16", "uint16")
@pytest.mark.parametrize("dtype", [name for name in INTEGERS if "8" not in name])
def test_what_is_not_looked_at_is_found(on: Device, dtype: str, kernels_only: None) -> None:
    x, order = table(on), ps.arange(ROWS, dtype=getattr(ps, dtype), device=on)
    expected = x.numpy()
    np.testing.assert_array_equal(F.embedding(order, x).numpy(), expected)
    np.testing.assert_array_equal(x[ps.flip(order)].numpy(), expected[::-1])
    np.testing.assert_array_equal(ps.sort(x, axis=0, descending=True).numpy(), expected[::-1])


# When it is told


@pytest.fixture(params=[True, False], ids=["shared", "far"])
def lazy(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that does nothing before the host waits for it."""
    made = Device.over(HostDriver("lazy", shared_memory=request.param, scheduler=Lazy(0)), SMALL)
    yield made
    made.close()


def test_a_future_has_the_error_and_reading_anything_else_tells_it_too(on: Device) -> None:
    x = table(on)
    jitted = ps.jit(lambda x, i: F.embedding(i, x))
    jitted(x, ids(on, 0))
    future = jitted(x, ids(on, ROWS)).numpy_async()
    with pytest.raises(BadIndex):
        future.wait()
    jitted(x, ids(on, -1))
    with pytest.raises(BadIndex, match="index -1"):
        (x + 1).numpy()
    jitted(x, ids(on, 9))
    with pytest.raises(BadIndex, match="index 9"):
        on.sync()
    on.sync()
    assert jitted(x, ids(on, 1)).numpy().shape == (COUNT, WIDTH)


def test_one_bad_step_of_many_is_told_at_the_next_read(on: Device) -> None:
    x = table(on)
    step = ps.jit(lambda x, i: ps.sum(F.embedding(i, x)))
    taken = []

    def many() -> None:
        for number in range(30):
            taken.append(step(x, ids(on, 99 if number == 3 else 1)))
        taken[-1].item()

    with pytest.raises(BadIndex, match="index 99"):
        many()
    assert len(taken) == 30 or len(on.members) > 1, "only auto reads in between, where it moves values"
    assert step(x, ids(on, 0)).item() == np.sum(x.numpy()[[0, 3, 2, 0]])


def test_a_value_is_read_without_waiting_for_later_work(lazy: Device) -> None:
    x = table(lazy)
    step = ps.jit(lambda x, i: ps.sum(F.embedding(i, x)))
    expected = step(x, ids(lazy, 0)).item()
    first = step(x, ids(lazy, 0))
    second = step(x, ids(lazy, 50))
    assert first.item() == expected
    assert lazy.stream.pending  # the second one
    with pytest.raises(BadIndex, match="index 50"):
        second.item()


def test_what_is_not_written_yet_is_not_judged(lazy: Device) -> None:
    x, other = table(lazy), table(lazy)
    step = ps.jit(lambda x, i: F.embedding(i, x))
    index = ids(lazy, 1)
    lazy.sync()
    step(x, index)
    assert other.numpy().shape == (ROWS, WIDTH)
    assert lazy.stream.pending
    lazy.sync()


def test_what_nobody_reads_takes_no_memory(on: Device, kernels_only: None) -> None:
    x, index = table(on), ids(on, 1)
    live = []
    for _ in range(6):
        for _ in range(50):
            F.embedding(index, x).realize()
        on.sync()
        live.append(on.memory_stats().live_bytes)
    assert live[-1] <= live[0]
    for _ in range(200):
        F.embedding(index, x).realize()
    assert on.memory_stats().live_bytes < live[0] + (1 << 17)


def test_profiles_see_no_less(on: Device, kernels_only: None) -> None:
    x, step = table(on), ps.jit(lambda x, i: F.embedding(i, x))
    with ps.profile(device=on):
        refused(lambda: READS["embedding"](x, ids(on, ROWS)), ROWS, READS["embedding"])
        with pytest.raises(BadIndex):
            step(x, ids(on, ROWS)).numpy()


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("kind", DRIVERS)
def test_the_setting_turns_it_off(kind: str, forced: bool) -> None:
    on = Device.over(DRIVERS[kind](), replace(SMALL, check_indices=False, force_kernels=forced))
    x = table(on)
    for function in READS.values():
        for bad in (ROWS, 2**40, -1, -(2**40)):
            assert np.isfinite(function(x, ids(on, bad)).numpy()).all()
    every = ps.jit(lambda x, i: [function(x, i) for function in READS.values()])
    for bad in (ROWS, 2**40, -1, -(2**40)):
        for result in every(x, ids(on, bad)):
            assert np.isfinite(result.numpy()).all()
    on.close()


def test_the_setting_comes_from_the_environment() -> None:
    assert Settings.from_environment({}).check_indices
    assert not Settings.from_environment({"PENSTOCK_CHECK_INDICES": "0"}).check_indices


# Class targets

LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda x, w, target, **how: F.cross_entropy(x @ w.T, target, **how),
    "linear_cross_entropy": F.linear_cross_entropy,
}
INPUTS, CLASSES, TARGETS = 4, 90, 60


def expected_loss(x: Any, w: Any, target: Any, kept: Any, smoothing: float = 0.0) -> tuple[Any, Any, Any]:
    """The mean loss over the kept rows, and its gradients, in float64."""
    x, w, target = x[kept].astype(float), w.astype(float), target[kept].astype(int)
    logits = x @ w.T
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    wanted = np.full_like(logs, smoothing / w.shape[0])
    wanted[np.arange(len(target)), target] += 1 - smoothing
    gradient = (np.exp(logs) - wanted) / len(target)
    rows = np.zeros((len(kept), x.shape[1]))
    rows[kept] = gradient @ w
    return -(wanted * logs).sum() / len(target), rows, gradient.T @ x


@pytest.mark.slow("webgpu", "auto")
@pytest.mark.parametrize("name", LOSSES)
def test_targets_of_every_integer_dtype(on: Device, name: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((TARGETS, INPUTS)).astype(np.float32)
    w = rng.standard_normal((CLASSES, INPUTS)).astype(np.float32)
    target = rng.integers(0, CLASSES, TARGETS)
    both = ps.value_and_grad(LOSSES[name], (0, 1))

    def all_dtypes(x: ps.Tensor, w: ps.Tensor, *targets: ps.Tensor) -> list[Any]:
        return [both(x, w, target) for target in targets]

    targets = [ps.asarray(target.astype(dtype), device=on) for dtype in INTEGERS]
    function = all_dtypes if on.name == "host-plain" else ps.jit(all_dtypes)
    loss, by_x, by_w = expected_loss(x, w, target, np.full(TARGETS, True))
    for result, (found_x, found_w) in function(ps.asarray(x, device=on), ps.asarray(w, device=on), *targets):
        assert result.item() == pytest.approx(loss, 1e-5)
        np.testing.assert_allclose(found_x.numpy(), by_x, 1e-3, 1e-6)
        np.testing.assert_allclose(found_w.numpy(), by_w, 1e-3, 1e-6)


def test_the_place_of_a_logit_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_PENDING_BYTES", 1 << 60)  # nothing so large is computed
    rng = np.random.default_rng(2)
    for rows, width, dtype in ((2**15, 2**16 - 1, "int32"), (2**15, 2**16, "int64"), (10**5, 50257, "int64")):
        for given in INTEGERS:
            target = rng.integers(0, min(width, np.iinfo(given).max), rows)
            loss = F.cross_entropy(ps.zeros((rows, width)), ps.asarray(target.astype(given)))
            (look_up,) = (node for node in topological(inline([loss._node])) if node.primitive is GATHER)
            places = ps.Tensor(look_up.inputs[1], loss.device)
            assert str(places.dtype) == dtype
            np.testing.assert_array_equal(places.numpy(), np.arange(rows) * width + target)


@pytest.mark.slow("int16", "uint16", "uint32", "int64")
@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_ignore_index_that_the_dtype_does_not_hold_ignores_nothing(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x, target = rng.standard_normal((9, 200)).astype(np.float32), rng.integers(0, 100, 9)
    weight, kept = np.eye(200, dtype=np.float32), np.full(9, True)
    target[4] = np.array(-100).astype(dtype) if dtype == "uint8" else 99
    for ignored in (-100, -1, 300, 10**30):
        result = F.cross_entropy(ps.asarray(x), ps.asarray(target.astype(dtype)), ignore_index=ignored)
        assert result.item() == pytest.approx(expected_loss(x, weight, target, kept)[0], 1e-5)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.slow("0.0", "webgpu", "auto")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_of_an_ignored_row_is_in_any_result(
    on: Device, name: str, smoothing: float, jitted: bool
) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((8, INPUTS)).astype(np.float32)
    w = rng.standard_normal((7, INPUTS)).astype(np.float32)
    target = np.array([3, -100, 6, -100, 0, -100, 5, 1])
    kept = target != -100
    x[1], x[3, 2], x[5, 0] = np.nan, np.inf, -np.inf

    def loss(x: ps.Tensor, w: ps.Tensor, target: ps.Tensor) -> ps.Tensor:
        if name == "cross_entropy":  # where the logits come from, the product's gradient is another matter
            return F.cross_entropy(x, target, label_smoothing=smoothing)
        return F.linear_cross_entropy(x, w, target, label_smoothing=smoothing)

    both = ps.value_and_grad(loss, 0 if name == "cross_entropy" else (0, 1))
    function = ps.jit(both) if jitted else both
    rows = x @ w.T if name == "cross_entropy" else x
    result, gradients = function(*(ps.asarray(part, device=on) for part in (rows, w, target)))
    weights = np.eye(7) if name == "cross_entropy" else w
    value, by_x, by_w = expected_loss(rows, weights, target, kept, smoothing)
    assert result.item() == pytest.approx(value, 1e-5)
    found_x, found_w = (gradients, None) if name == "cross_entropy" else gradients
    np.testing.assert_allclose(found_x.numpy(), by_x, 1e-4, 1e-6)
    if found_w is not None:
        np.testing.assert_allclose(found_w.numpy(), by_w, 1e-4, 1e-6)


@pytest.mark.parametrize("step", [10, -1])
def test_an_index_that_a_jitted_function_changes(device: Device, step: int) -> None:
    """The known range of an index is dropped when its items change."""
    x = ps.asarray(np.arange(5, dtype=np.float32), device=device)
    index = ps.asarray(np.array([0, 1]), device=device)
    assert x[index].numpy().tolist() == [0, 1]

    @ps.jit
    def change() -> None:
        nonlocal index
        index += step

    change()
    change()
    if step < 0:
        assert x[index].numpy().tolist() == [3, 4]
    else:
        with pytest.raises(BadIndex, match=r"index 2[01] is out of range"):
            x[index].numpy()


def test_the_line_is_that_of_this_time(device: Device) -> None:
    x = ps.asarray(np.arange(5, dtype=np.float32), device=device)
    good, bad = (ps.asarray(np.array(items), device=device) for items in ([1, 2], [1, 9]))
    x[good + 0].numpy()
    with pytest.raises(BadIndex) as raised:
        x[bad + 0].numpy()
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert raised.value.where.endswith(f":{line}")
