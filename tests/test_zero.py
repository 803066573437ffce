"""ZeRO-3: parameters in parts that are gathered for their uses; and the stage that a budget chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_distributed import Trained, on_ranks

import penstock as ps
from penstock.errors import SettingError
from penstock.plan.order import Work
from penstock.plan.overlap import in_time
from penstock.runtime import Device
from penstock.tensor.jit import schedules
from penstock.train.config import Config
from penstock.train.planning import plan_ranks

LAYERS, WIDTH = 6, 64
LAYER_BYTES = 4 * WIDTH * WIDTH


class Deep:
    """A network of several layers, each of which is a row that ranks exchange, and a jitted step for it."""

    def __init__(self, device: Device, **options: Any) -> None:
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(LAYERS)]
        self.device = device
        self.weights = [ps.nn.Parameter(ps.asarray(array, device=device)) for array in arrays]
        self.optimizer = ps.distributed.DataParallel(
            ps.optim.AdamW(self.weights, lr=1e-3), **{"shards": 4, "bucket": LAYER_BYTES, **options}
        )
        self.step = ps.jit(self._trained)

    def outputs(self, x: ps.Tensor) -> ps.Tensor:
        for weight in self.weights:
            x = (x @ weight).relu()
        return x

    def _trained(self, x: ps.Tensor) -> ps.Tensor:
        loss = (self.outputs(x) ** 2).mean()
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def batch(self) -> ps.Tensor:
        array = np.random.default_rng(1).standard_normal((8, WIDTH)).astype(np.float32)
        return ps.asarray(array, device=self.device)

    def steps(self, count: int) -> list[float]:
        return [self.optimizer.train(self.step, self.batch()).wait() for _ in range(count)]

    def values(self) -> list[bytes]:
        with self.optimizer.gathered():
            return [weight.numpy().tobytes() for weight in self.weights]


# Memory


def test_a_rank_keeps_its_part_of_parameters() -> None:
    def kept(zero: int) -> Any:
        def live(device: Device) -> tuple[int, int]:
            run = Deep(device, zero=zero)
            made = device.memory_stats().live_bytes
            run.steps(2)
            return made, device.memory_stats().live_bytes

        return live

    whole = 3 * LAYERS * LAYER_BYTES  # parameters and AdamW's moments
    divided = on_ranks(4, kept(3))
    assert all(whole / 4 <= made < whole / 3 for made, _ in divided)
    live = [max(after for _, after in on_ranks(4, kept(zero))) for zero in (0, 1, 3)]
    assert live == sorted(live, reverse=True)
    assert live[2] < live[1] - LAYERS * LAYER_BYTES / 2


def test_a_step_with_divided_parameters_has_a_lower_peak() -> None:
    def peak(zero: int) -> Any:
        def own(device: Device) -> int:
            run = Deep(device, zero=zero)
            run.steps(1)
            device.pool.reset_peak()
            run.steps(2)
            return device.memory_stats().peak_bytes

        return own

    peaks = [max(on_ranks(2, peak(zero))) for zero in (0, 2, 3)]
    assert peaks[2] < peaks[1] < peaks[0]
    assert peaks[1] - peaks[2] > LAYERS * LAYER_BYTES


def gathered_at_once(run: Deep) -> int:
    """The most rows that are between the wait for them and their last use, or under way."""
    (schedule,) = schedules(run.step)
    groups = [step.group for step in schedule.groups]
    live = most = 0
    for at, group in enumerate(groups):
        node = group.nodes[0]
        live += node.primitive.collective == "fetch"
        most = max(most, live)
        for earlier in groups[: at + 1]:
            fetched = earlier.nodes[0]
            if fetched.primitive.collective != "wait" or fetched.inputs[0].primitive.collective != "fetch":
                continue
            users = [number for number, other in enumerate(groups) if fetched in _bases(other.inputs)]
            live -= max(users) == at
    return most


def _bases(nodes: Sequence[Any]) -> list[Any]:
    from penstock.fusion.views import base

    return [base(node) for node in nodes]


def test_few_rows_are_there_at_once() -> None:
    def own(device: Device) -> Any:
        run = Deep(device, zero=3, shards=2)
        run.steps(1)
        (schedule,) = schedules(run.step)
        names = [step.group.nodes[0].primitive.collective for step in schedule.groups]
        return gathered_at_once(run), names.count("fetch")

    # Twice each layer, but for the first, through which no gradient passes.
    assert on_ranks(2, own) == [(2, 2 * LAYERS - 1)] * 2


def test_gradients_that_are_kept_gather_again() -> None:
    def own(zero: int) -> Any:
        def kept(device: Device) -> Any:
            run = Deep(device, zero=zero)

            @ps.jit
            def accumulate(x: ps.Tensor) -> ps.Tensor:
                loss = (run.outputs(x) ** 2).mean()
                run.optimizer.backward(loss)
                return loss

            accumulate(run.batch())
            accumulate(run.batch())
            (_, schedule) = schedules(accumulate)
            names = [step.group.nodes[0].primitive.collective for step in schedule.groups]
            return names.count("fetch"), [weight.grad.numpy().tobytes() for weight in run.weights]

        return kept

    (_, expected), _ = on_ranks(2, own(0))
    assert on_ranks(2, own(3)) == [(2 * LAYERS - 1, expected)] * 2


def test_fetches_come_in_time() -> None:
    # 0, 2, 4 fetch, 1, 3, 5 wait for them, and 6, 7, 8 use the results one after the other.
    steps = [
        Work((), (0,)),
        Work((0,), (1,)),
        Work((0,), (2,)),
        Work((2,), (3,)),
        Work((2,), (4,)),
        Work((4,), (5,)),
        Work((1,), (6,)),
        Work((6, 3), (7,)),
        Work((7, 5), (8,)),
    ]
    order = [0, 2, 4, 1, 3, 5, 6, 7, 8]
    assert in_time(order, steps, {0, 2, 4}, {1, 3, 5}) == [0, 2, 1, 6, 4, 3, 7, 5, 8]


# Values outside of jitted functions


def test_a_divided_parameter_has_no_value_outside() -> None:
    def own(device: Device) -> None:
        run = Deep(device, zero=3)
        weight = run.weights[0]
        assert weight.shape == (WIDTH, WIDTH)
        for reading in (weight.numpy, lambda: (weight + 1).numpy(), lambda: run.outputs(run.batch()).numpy()):
            with pytest.raises(SettingError, match=r"with optimizer.gathered"):
                reading()

    on_ranks(2, own)


def test_jitted_functions_gather_what_they_use() -> None:
    def own(device: Device) -> Any:
        run = Deep(device, zero=3)
        run.steps(1)
        evaluate = ps.jit(lambda x: run.outputs(x).detach())
        first = evaluate(run.batch()).numpy()
        run.steps(1)
        second = evaluate(run.batch()).numpy()
        with run.optimizer.gathered():
            expected = np.asarray(run.batch().numpy())
            for weight in run.weights:
                expected = np.maximum(expected @ weight.numpy(), 0)
        assert not np.array_equal(first, second)
        np.testing.assert_allclose(second, expected, rtol=1e-4, atol=1e-5)

    on_ranks(2, own)


def test_two_steps_in_a_function() -> None:
    def own(zero: int) -> Any:
        def trained(device: Device) -> Any:
            run = Deep(device, zero=zero, shards=2)

            @ps.jit
            def twice(x: ps.Tensor) -> ps.Tensor:
                run._trained(x)
                return run._trained(x)

            return float(twice(run.batch())), run.values()

        return trained

    assert on_ranks(2, own(3)) == on_ranks(2, own(0))


def test_weights_that_are_loaded_while_gathered_are_kept() -> None:
    def own(device: Device) -> Any:
        run = Deep(device, zero=3)
        new = np.full((WIDTH, WIDTH), 0.5, np.float32)
        before = run.values()
        with run.optimizer.gathered("host"):
            run.weights[2]._become(ps.asarray(new, device="host")._node)
        after = run.values()
        assert after[2] == new.tobytes()
        assert after[:2] + after[3:] == before[:2] + before[3:]

    on_ranks(2, own)


def test_master_weights_outlast_a_look_at_the_parameters() -> None:
    def own(device: Device) -> Any:
        run = Trained(device, ps.bfloat16, zero=3)
        run.steps(1)
        before = run.state()
        run.values()
        assert run.state() == before

    on_ranks(2, own)


def test_steps_are_not_for_gathered_parameters() -> None:
    def own(device: Device) -> None:
        run = Deep(device, zero=3)
        with run.optimizer.gathered(), pytest.raises(SettingError, match="outside of it"):
            run.step(run.batch())

    on_ranks(2, own)


def test_stages_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SettingError, match="0, 1, 2, 3 or auto"):
        ps.distributed.DataParallel(ps.optim.SGD([ps.nn.Parameter(ps.zeros(2))], lr=1.0), zero=4)
    with pytest.raises(SettingError, match=r"ranks.zero is 0, 1, 2, 3 or auto"):
        Config().changed({"ranks": {"zero": "all"}})
    weight = ps.nn.Parameter(ps.zeros((2, 2)))
    with pytest.raises(SettingError, match="Muon updates"):
        ps.distributed.DataParallel(ps.optim.Muon([weight], lr=0.1), zero=3)


# The stage that a budget chooses


def needed(zero: int, count: int) -> int:
    """What a step takes in a stage on some ranks, with the sums that wait for other shards."""

    def own(device: Device) -> int:
        run = Deep(device, zero=zero)
        planned: int = ps.memory.plan(run.step, run.batch()).unlimited_bytes + run.optimizer._waiting_bytes()
        return planned

    return max(on_ranks(count, own))


@pytest.mark.slow("3")
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_budget_chooses_the_least_stage(zero: int) -> None:
    limit = needed(zero, 2) + 4096

    def own(device: Device) -> Any:
        run = Deep(device, zero="auto")
        said = run.optimizer.choose(run.step, run.batch()[:2], memory=limit)
        device.limit_bytes = limit
        return run.optimizer.zero, said.startswith(f"zero={zero} for "), run.steps(2), run.values()

    (whole,) = on_ranks(1, lambda device: (run := Deep(device)) and (run.steps(2), run.values()))
    assert on_ranks(2, own) == [(zero, True, *whole)] * 2


def test_without_a_budget_nothing_is_divided() -> None:
    def own(device: Device) -> Any:
        run = Deep(device, zero="auto")
        run.steps(1)
        return run.optimizer.zero

    assert on_ranks(2, own) == [0, 0]


def test_loaded_state_is_divided_too() -> None:
    ((state, weights),) = on_ranks(1, lambda device: _state(Deep(device)))
    limit = needed(1, 2)

    def own(device: Device) -> Any:
        run = Deep(device, zero="auto")
        for weight, array in zip(run.weights, weights, strict=True):
            weight._become(ps.asarray(array, device=device)._node)
        run.optimizer.load_state_dict(state)
        run.optimizer.choose(run.step, run.batch()[:2], memory=limit)
        return run.optimizer.zero, run.steps(1), run.values()

    (whole,) = on_ranks(1, lambda device: (run := Deep(device)) and (run.steps(3)[2:], run.values()))
    assert on_ranks(2, own) == [(1, *whole)] * 2


def _state(run: Deep) -> Any:
    run.steps(2)
    return run.optimizer.state_dict(), [weight.numpy() for weight in run.weights]


@pytest.mark.slow
def test_plans_of_ranks_have_the_memory_of_each_stage() -> None:
    model = {"context": 16, "width": 256, "layers": 4}
    config = Config().changed({"data": {"tokenizer": "bytes", "batch": 8}, "model": model})
    scaling = plan_ranks(config, 4, "1GB/s")
    assert sorted(scaling.rank_bytes) == [0, 1, 2, 3]
    assert scaling.rank_bytes[0] > scaling.rank_bytes[1] >= scaling.rank_bytes[2] > scaling.rank_bytes[3]
    assert "zero=3" in str(scaling)
