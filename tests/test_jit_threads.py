"""Threads beside a capturing thread: each sees the actual state of the tensors that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS

import penstock as ps
from penstock import Device

KINDS = [kind for kind in ("opencl-svm", "host-far", "cuda", "webgpu") if kind in DRIVERS]


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def together(*works: Callable[[], Any], until: Callable[[], Any]) -> None:
    """Run each function repeatedly in its own thread, until another function ends in this thread."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def repeat(work: Callable[[], Any]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        until()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def captures(function: Callable[..., Any], *args: Any) -> Callable[[], None]:
    """Capture a function anew at each call, without a replay. It may read and change anything."""
    ends = pytest.raises(ZeroDivisionError)

    def failing(*args: Any) -> None:
        function(*args)
        raise ZeroDivisionError

    def capture() -> None:
        with ends:
            ps.jit(failing)(*args)

    return capture


def test_counting_beside_a_capture_that_reads_and_changes(device: Device) -> None:
    count = ps.zeros((), device=device).realize()
    other = ps.zeros((3,), device=device).realize()

    def reads() -> None:
        nonlocal other
        other += count * 2
        count.__iadd__(100.0)

    def counting() -> None:
        nonlocal count
        for turn in range(1, 301):
            count += 1
            if not turn % 50:
                assert count.item() == turn

    together(captures(reads), until=counting)
    assert count.item() == 300
    assert other.tolist() == [0, 0, 0]


def test_inference_beside_a_capture_of_training(device: Device) -> None:
    weights = [ps.asarray(np.full((4, 4), k, np.float32), device=device).requires_grad_() for k in (1, 2)]
    optimizer = ps.optim.Adam(weights, lr=0.1)
    x = ps.asarray(np.ones((2, 4), np.float32), device=device)

    def train(x: ps.Tensor) -> None:
        optimizer.backward(ps.sum(x @ weights[0] @ weights[1]))
        optimizer.step()

    def infer() -> None:
        for _ in range(40):
            with ps.no_grad():
                assert np.all((x @ weights[0] @ weights[1]).numpy() == 32)
            assert weights[0].grad is None

    together(captures(train, x), until=infer)
    assert all(weight.requires_grad for weight in weights)


def test_gradients_of_one_thread_are_not_seen_by_another(device: Device) -> None:
    (weight,) = (ps.asarray(np.ones(3, np.float32), device=device).requires_grad_(),)

    def elsewhere() -> None:
        weight.grad = None
        ps.sum(weight * 5).backward()
        weight.requires_grad_(False)

    def here() -> None:
        for turn in range(1, 101):
            ps.sum(weight * 2).backward()
            assert weight.grad is not None
            if not turn % 20:
                assert weight.grad.tolist() == [2 * turn] * 3

    together(captures(elsewhere), until=here)


def test_threads_that_train_one_model_lose_no_step(device: Device) -> None:
    """Captures and replays of a function that changes tensors, from several threads."""
    count, total = (ps.zeros((), device=device).realize() for _ in range(2))

    @ps.jit
    def step(x: ps.Tensor) -> ps.Tensor:
        nonlocal count, total
        count += 1
        total += ps.sum(x)
        return total / count

    done: list[int] = []
    failures: list[BaseException] = []

    def work(length: int) -> None:
        try:
            for _ in range(50):
                x = ps.ones(length % 3 + 1, device=device)  # several shapes: captured by the first thread
                assert 1 <= step(x).item() <= 3
                done.append(length % 3 + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (count.item(), total.item()) == (len(done), sum(done))


def test_captures_are_forgotten_by_one_thread_while_others_use_them(device: Device) -> None:
    jitted = ps.jit(lambda x, number: x + number)
    x = ps.asarray(np.zeros(2, np.float32), device=device)

    def first() -> None:
        for number in range(40):
            assert jitted(x, number).tolist() == [number] * 2

    def second() -> None:
        for number in range(40, 0, -1):
            assert jitted(x, number).tolist() == [number] * 2

    together(second, until=first)
    assert len(jitted._captured) <= 32  # type: ignore[attr-defined]
