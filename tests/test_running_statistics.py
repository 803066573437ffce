"""Running statistics of several ranks: means over shards, with the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_distributed import on_ranks, result

import penstock as ps
from penstock.errors import SettingError
from penstock.runtime import Device

SHARDS = 4


def trained(device: Device, jitted: bool, momentum: float | None, steps: int = 3, **options: Any) -> Any:
    """The losses, the state and the buffers of a network with BatchNorm, and the batches."""
    rng = np.random.default_rng(0)
    model = ps.nn.Sequential(ps.nn.BatchNorm1d(3, momentum=momentum), ps.nn.Linear(3, 2))
    weights = rng.standard_normal((2, 3)).astype(np.float32)
    model.load_state_dict({**model.state_dict(), "1.weight": weights, "1.bias": np.zeros(2, np.float32)})
    model.to(device)
    optimizer = ps.distributed.DataParallel(
        ps.optim.SGD(model.parameters(), lr=0.1), **{"shards": SHARDS, **options}
    )

    def step(x: ps.Tensor) -> ps.Tensor:
        loss = (model(x) ** 2).mean()
        optimizer.backward(loss)
        optimizer.step()
        return loss

    run = ps.jit(step) if jitted else step
    batches = rng.standard_normal((steps, 24, 3)).astype(np.float32) * [1, 2, 3] + [4, 0, -1]
    losses = [
        optimizer.train(run, ps.asarray(batch.astype(np.float32), device=device)).wait() for batch in batches
    ]
    with optimizer.gathered():
        state = {name: array.tobytes() for name, array in model.state_dict().items()}
    return losses, state, {name: tensor.numpy() for name, tensor in model.named_buffers()}, batches


@pytest.mark.parametrize("momentum", [0.1, None], ids=str)
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_statistics_are_means_over_shards(jitted: bool, momentum: float | None) -> None:
    ((losses, state, buffers, batches),) = on_ranks(1, lambda device: trained(device, jitted, momentum))
    mean, variance = np.zeros(3), np.ones(3)
    for number, batch in enumerate(batches, 1):
        shards = batch.reshape(SHARDS, -1, 3)
        share = 1 / number if momentum is None else momentum
        mean = (1 - share) * mean + share * shards.mean(axis=1).mean(axis=0)
        variance = (1 - share) * variance + share * shards.var(axis=1, ddof=1).mean(axis=0)
    assert np.allclose(buffers["0.running_mean"], mean, rtol=1e-4)
    assert np.allclose(buffers["0.running_var"], variance, rtol=1e-4)
    assert buffers["0.num_batches_tracked"] == len(batches)
    for count, zero in ((2, 0), (4, 0), *([(2, 3)] if jitted else [])):
        for other in on_ranks(count, lambda device, zero=zero: trained(device, jitted, momentum, zero=zero)):
            assert other[:2] == (losses, state)


def test_a_step_that_fails_changes_no_statistics() -> None:
    model = ps.nn.BatchNorm1d(3)
    optimizer = ps.distributed.DataParallel(ps.optim.SGD(model.parameters(), lr=0.1), shards=2)
    calls = []

    def step(x: ps.Tensor) -> ps.Tensor:
        loss = model(x).sum()
        optimizer.backward(loss)
        calls.append(x)
        if len(calls) == 2:
            raise ValueError("no more data")
        optimizer.step()
        return loss

    with pytest.raises(ValueError, match="no more data"):
        optimizer.train(step, ps.arange(12.0).reshape(4, 3))
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [0.0, 0.0, 0.0]


def test_statistics_in_the_order_of_the_engine() -> None:
    ranks = on_ranks(3, lambda device: trained(device, True, 0.1, exact=False, zero=2))
    (alone,) = on_ranks(1, lambda device: trained(device, True, 0.1, exact=False))
    for name in ("0.running_mean", "0.running_var"):
        assert all(np.array_equal(rank[2][name], ranks[0][2][name]) for rank in ranks)
    means = [each[2]["0.running_mean"] for each in (alone, ranks[0])]
    assert np.allclose(*means, rtol=1e-4)  # a mean of means; variances of smaller parts differ


@pytest.mark.slow
def test_a_trainer_with_statistics(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 5, "norm": True, "accumulate": 2, "checkpoint_every": 2}
    alone = result(1, "trainer", folder=str(tmp_path / "1"), **options)
    for count, zero in ((4, 0), (2, 3)):
        folder, parallel = str(tmp_path / f"{count}"), {"zero": zero}
        several = result(count, "trainer", folder=folder, parallel=parallel, **options)
        for part in ("losses", "validation", "weights", "buffers"):
            assert several[part] == alone[part]


class Counting(ps.nn.Module):
    """A layer that changes a buffer in a way of its own."""

    def __init__(self) -> None:
        self.linear = ps.nn.Linear(3, 1)
        self.largest = ps.zeros(())

    def __call__(self, x: ps.Tensor) -> ps.Tensor:
        self.largest += x.max()
        return self.linear(x)


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    model = Counting()
    trainer = ps.Trainer(
        model,
        ps.nn.functional.mse_loss,
        ps.distributed.DataParallel(ps.optim.SGD(model.parameters(), lr=0.1), shards=2),
        [(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))],
        folder=tmp_path / "run",
        steps=2,
        view=ps.train.NoView(),
    )
    with pytest.raises(SettingError, match="the step changes largest"):
        trainer.fit()
