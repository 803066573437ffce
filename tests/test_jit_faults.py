"""Steps that fail or are interrupted: they change nothing, or everything, or damaged tensors raise."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, surface

import penstock as ps
from penstock import Device, optim
from penstock.errors import DamagedTensor, DeviceError, OutOfDeviceMemory
from penstock.memory.buffer import Buffer
from penstock.tensor import replay

pytestmark = surface

KINDS = [
    kind for kind in ("opencl-svm", "opencl-device", "host-late", "host-far", "webgpu") if kind in DRIVERS
]
State = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


class Training:
    """A model of some launches, whose state is known before and after a step."""

    def __init__(self, device: Device, jit: bool = True, size: int = 48) -> None:
        draw = np.random.default_rng(5).standard_normal
        shapes = [(size, size), (size,), (size, size), (size, 1)]
        arrays = [0.3 * draw(shape).astype(np.float32) for shape in shapes]
        self.weights = [ps.asarray(array, device=device).requires_grad_() for array in arrays]
        self.optimizer = optim.Adam(self.weights, lr=0.01, clip_norm=1.0)
        self.count = ps.zeros((), device=device).realize()
        self.x, self.y = (ps.asarray(draw(s).astype(np.float32), device=device) for s in [(9, size), (9, 1)])
        self.run: Callable[[], ps.Tensor] = ps.jit(self.step) if jit else self.step

    def step(self) -> ps.Tensor:
        first, bias, second, last = self.weights
        difference = ps.tanh(ps.tanh(self.x @ first + bias) @ second) @ last - self.y
        loss = ps.mean(difference * difference)
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.count += 1
        return loss.detach()

    def tensors(self) -> dict[str, ps.Tensor]:
        state = {f"state {at}": tensor for at, tensor in enumerate(self.optimizer._all())}
        return state | {"count": self.count}

    def state(self) -> State:
        return {name: tensor.numpy() for name, tensor in self.tensors().items()}

    def load(self, state: State) -> None:
        for name, tensor in self.tensors().items():
            value = ps.asarray(state[name], device=tensor.device)
            tensor._become(value._node)
            tensor.grad = None

    def sound(self) -> tuple[State, list[str]]:
        """The values that can still be read, and the names of damaged tensors."""
        result, damaged = {}, []
        for name, tensor in self.tensors().items():
            if isinstance(tensor._node.value, Buffer):
                result[name] = tensor.numpy()
            else:
                named = r"(the jitted function step|a step of its optimizer) failed .* checkpoint"
                with pytest.raises(DamagedTensor, match=named):
                    tensor.numpy()
                damaged.append(name)
        return result, damaged

    def check(self, before: State, after: State) -> str:
        """Which of the permitted outcomes a failed step had."""
        result, damaged = self.sound()
        if damaged:
            for name, value in result.items():
                np.testing.assert_array_equal(value, before[name], err_msg=name)
            with pytest.raises(DamagedTensor):
                self.run()
            return "damaged"
        outcome = "before" if result["count"] == before["count"] else "after"
        for name, value in result.items():
            np.testing.assert_array_equal(
                value, (before if outcome == "before" else after)[name], err_msg=name
            )
        return outcome


@contextmanager
def refusing(driver: Any, position: int, error: Callable[[], BaseException]) -> Iterator[list[int]]:
    """Raise at one of the launches from here on; how many there were."""
    replayed, launched, seen = driver.replay, driver.launch, [0]

    def count() -> None:
        seen[0] += 1
        if seen[0] == position:
            raise error()

    def replay(queue: Any, bound: Sequence[Any], waits: Any, events: list[Any]) -> None:
        for launch in bound:
            count()
            replayed(queue, [launch], waits, events)

    def launch(*args: Any) -> Any:
        count()
        return launched(*args)

    driver.replay, driver.launch = replay, launch
    try:
        yield seen
    finally:
        del driver.replay, driver.launch


@pytest.mark.slow("webgpu")
def test_a_launch_refused_at_every_position(device: Device) -> None:
    training = Training(device)
    for _ in range(3):  # with graphs, where there are any
        training.run()
    before = training.state()
    with refusing(device.driver, -1, Exception) as seen:
        training.run()
    after, launches = training.state(), seen[0]
    outcomes = []
    for position in range(1, launches + 1):
        training.load(before)
        training.run()  # moves off the memory that was loaded, so that the next step overwrites in place
        training.load(before)
        with (
            refusing(device.driver, position, lambda: DeviceError("injected")),
            pytest.raises(DeviceError, match="injected"),
        ):
            training.run()
        outcomes.append(training.check(before, after))
    assert outcomes[0] == "before", "nothing was launched"
    assert set(outcomes[1:]) <= {"damaged", "before"}
    training.load(before)
    training.run()
    for name, value in training.state().items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)


def test_damage_is_told_until_a_checkpoint_is_loaded(device: Device) -> None:
    training = Training(device)
    for _ in range(2):
        training.run()
    saved = training.optimizer.state_dict()
    weights = [weight.numpy() for weight in training.weights]
    with refusing(device.driver, -1, Exception) as seen:
        training.run()
    position = max(seen[0], 1)
    with refusing(device.driver, position, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        training.run()
    assert training.sound()[1]
    for use in (training.run, training.optimizer.state_dict, lambda: (training.weights[0] + 1).numpy()):
        with pytest.raises(DamagedTensor, match="KeyboardInterrupt"):
            use()
    assert training.weights[0].shape == (48, 48)
    training.optimizer.load_state_dict(saved)
    for tensor, array in zip(training.weights, weights, strict=True):
        tensor._become(ps.asarray(array, device=device)._node)
    training.count._become(ps.zeros((), device=device).realize()._node)
    training.run()
    training.run()


def test_memory_that_is_refused_changes_nothing(device: Device) -> None:
    training = Training(device)
    for _ in range(2):
        training.run()
    before = training.state()
    real = device.empty
    device.empty = lambda nbytes: (_ for _ in ()).throw(  # type: ignore[method-assign, assignment]
        OutOfDeviceMemory("injected", asked=nbytes)
    )
    try:
        with pytest.raises(OutOfDeviceMemory):
            training.run()
    finally:
        device.empty = real  # type: ignore[method-assign]
    assert training.check(before, before) == "before"
    training.run()


# Interrupts


@contextmanager
def interrupted(position: int, files: Sequence[str]) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at an operation of these files; how many there were."""
    seen = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(tuple(files)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen[0] += 1
            if seen[0] == position:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(old)


FILES = ("tensor/replay.py", "tensor/jit.py")


def test_an_interrupt_at_every_operation_of_a_replay() -> None:
    device = Device.over(DRIVERS["host"]())
    training = Training(device, size=4)
    for _ in range(3):
        training.run()
    before = training.state()
    training.run()
    after = training.state()
    outcomes = []
    for position in itertools.count(1, 3):
        training.load(before)
        with suppress(KeyboardInterrupt), interrupted(position, FILES) as seen:
            training.run()
        outcomes.append(training.check(before, after))
        if seen[0] < position:
            break
    assert outcomes[0] == "before"
    assert outcomes[-2:] == ["after", "after"]
    assert "damaged" not in outcomes or outcomes.index("damaged") > outcomes.count("before") - 1
    assert len(outcomes) > 300
    device.close()


def test_ctrl_c_waits_for_the_end_of_a_step(device: Device) -> None:
    training = Training(device)
    for _ in range(3):
        training.run()
    before = training.state()
    with refusing(device.driver, -1, Exception) as seen:
        training.run()
    after = training.state()
    real = device.driver.replay

    def presses(*args: Any) -> None:
        if not pressed:
            pressed.append(1)
            signal.raise_signal(signal.SIGINT)
        real(*args)

    for _ in range(2):
        pressed: list[int] = []
        training.load(before)
        device.driver.replay = presses  # type: ignore[method-assign]
        try:
            with pytest.raises(KeyboardInterrupt):
                training.run()
        finally:
            del device.driver.replay
        assert training.check(before, after) == "after"
    assert seen[0]
    with pytest.raises(KeyboardInterrupt):  # outside of a step, at once
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    device = Device.over(DRIVERS["host"]())
    training = Training(device, size=4)
    pressed: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        training.run()
        signal.raise_signal(signal.SIGINT)
        assert pressed == [signal.SIGINT]
        thread = threading.Thread(target=training.run)  # where there are no signals
        thread.start()
        thread.join()
        assert training.count.item() == 2
    finally:
        signal.signal(signal.SIGINT, old)
    device.close()


# Without jit


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])
def test_an_eager_step_that_fails_changes_nothing_or_damaged_moments_raise(
    device: Device, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    training, other = Training(device, jit=False), Training(device, jit=False)
    other.step()
    position = 1
    while True:
        before = training.state()
        with refusing(device.driver, position, lambda: error("injected")) as seen, suppress(error):
            training.step()
        if seen[0] < position:
            break
        values, damaged = training.sound()
        for name, value in values.items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        if damaged:
            training.load(before)
        elif training.weights[0].grad is not None:  # the step failed, not the code before it
            for weight in training.weights:
                weight.grad = None
        position += 1
    assert position > 1
    for name, value in training.state().items():
        np.testing.assert_allclose(value, other.state()[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_positions_are_where_things_happen() -> None:
    """The files that the interrupts are raised in are those that a replay runs through."""
    assert replay.__file__.endswith(FILES[0])
    assert sys.modules["penstock.tensor.jit"].__file__.endswith(FILES[1])  # type: ignore[union-attr]
