"""What users do between steps under a budget: results are held, batches made anywhere, gradients added up."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL
from test_budget import Counted
from test_offload import offloading

import penstock as ps
from penstock import Device, nn, optim
from penstock.errors import OutOfDeviceMemory

KINDS = ["host", "opencl-mapped", "host-far", "host-late"]
FAR = ["host-far", "host-late"]


def opened(kind: str) -> Device:
    return offloading(kind) if kind in FAR else Device.over(DRIVERS[kind](), SMALL)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = opened(request.param)
    yield made
    made.close()


def clean(device: Device) -> None:
    gc.collect()
    device.cleanup()


def refusal(call: Callable[[], Any]) -> int | None:
    """The smallest budget that a refusal names; None where there is no refusal."""
    try:
        call()
    except OutOfDeviceMemory as error:
        if error.smallest is None:
            raise
        return error.smallest
    return None


class Session:
    """A network, its optimizer and jitted functions of both."""

    def __init__(self, device: Device, network: str = "mlp", rule: str = "momentum") -> None:
        ps.random.manual_seed(5)
        self.device, self._network = device, network
        self.model, self._loss_of = NETWORKS[network](device)
        self.use(rule)

    def use(self, rule: str) -> None:
        """Train with another optimizer from now on."""
        self.optimizer = RULES[rule](self.model.parameters())
        self.jitted = {what: ps.jit(getattr(self, what)) for what in ("step", "add", "update", "evaluate")}

    def step(self, x: ps.Tensor) -> ps.Tensor:
        loss = self._loss_of(x)
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def add(self, x: ps.Tensor) -> ps.Tensor:
        loss = self._loss_of(x)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, x: ps.Tensor) -> ps.Tensor:
        with ps.no_grad():
            return self._loss_of(x)

    def batch(self, number: int, rows: int = 160) -> ps.Tensor:
        rng = np.random.default_rng(number)
        if self._network == "gpt":
            return ps.asarray(rng.integers(0, 61, (rows // 20, 17)).astype(np.int32), device=self.device)
        shape = (rows // 4, 1, 8, 8) if self._network == "convolution" else (rows, 24)
        return ps.asarray(rng.standard_normal(shape).astype(np.float32), device=self.device)

    @property
    def bits(self) -> list[bytes]:
        state = [np.asarray(array).tobytes() for array in self.optimizer.state_dict().values()]
        return state + [parameter.numpy().tobytes() for parameter in self.model.parameters()]


def mlp(device: Device) -> Any:
    layers = [nn.Linear(a, b, device=device) for a, b in pairwise([24, 48, 48, 32, 8])]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    return model, lambda x: ps.mean(model(x) ** 2)


def convolution(device: Device) -> Any:
    first, second = (nn.Conv2d(a, 6, 3, padding=1, device=device) for a in (1, 6))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(384, 4, device=device))
    return model, lambda x: ps.mean(model(x) ** 2)


def gpt(device: Device) -> Any:
    model = nn.GPT(vocab_size=61, context=16, width=32, layers=1, heads=2, dropout=0.1, device=device)
    return model, lambda tokens: model.loss(tokens[:, :-1], tokens[:, 1:])


NETWORKS: dict[str, Any] = {"mlp": mlp, "convolution": convolution, "gpt": gpt}
RULES: dict[str, Any] = {
    "momentum": lambda given: optim.SGD(given, lr=1e-2, momentum=0.9),
    "adamw": lambda given: optim.AdamW(given, lr=1e-2),
    "clipped": lambda given: optim.AdamW(given, lr=1e-2, clip_norm=1.0),
}


# One thing at a time


def test_the_smallest_budget_does_for_all_steps(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a new value does not take the place of the old one, which lies among others."""
    counted = Counted(device, monkeypatch)
    session = Session(device)
    expected = [session.jitted["step"](session.batch(number)).item() for number in range(4)]
    clean(device)
    del session
    session = Session(device)
    least = ps.memory.plan(session.jitted["step"], session.batch(0)).smallest_bytes
    del session
    clean(device)
    device.limit_bytes, counted.peak = least, counted.nbytes
    session = Session(device)
    losses = []
    for number in range(4):
        x = session.batch(number)
        loss = session.jitted["step"](x)  # while that of the last step is held
        losses.append(loss.item())
        del x
    assert losses == expected
    assert counted.peak <= least


@pytest.mark.parametrize("kind", FAR)
def test_a_batch_that_found_no_room_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = offloading(kind)
    counted = Counted(device, monkeypatch)
    rng = np.random.default_rng(0)
    weights = [
        ps.asarray(rng.standard_normal((128, 128)) / 12, dtype=ps.float32, device=device) for _ in range(8)
    ]
    rows = rng.standard_normal((512, 128)).astype(np.float32)

    def total(x: ps.Tensor) -> ps.Tensor:
        for weight in weights[:2]:
            x = ps.tanh(x @ weight)
        return sum((ps.sum(weight) for weight in weights), ps.sum(x))

    x = ps.asarray(rows, device=device)
    plan = ps.memory.plan(ps.jit(total), x)
    expected = ps.jit(total)(x).numpy()
    del x
    clean(device)
    device.limit_bytes, counted.peak = plan.smallest_bytes, counted.nbytes
    x = ps.asarray(rows, device=device)
    assert x._node.value.hosted
    assert ps.memory.plan(ps.jit(total), x).smallest_bytes == plan.smallest_bytes
    step = ps.jit(total)
    assert [step(x).numpy() for _ in range(2)] == [expected] * 2
    assert counted.peak <= plan.smallest_bytes
    device.close()


def test_a_result_that_is_held_counts_once(device: Device) -> None:
    rows = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)
    x = ps.asarray(rows, device=device)
    step = ps.jit(lambda x: ps.tanh(x) @ ps.sum(x, axis=0)[:, None] + x)
    plan = ps.memory.plan(step, x)
    result = step(x)
    assert ps.memory.plan(step, x).smallest_bytes == plan.smallest_bytes
    for more in range(3):  # each of which is another limit, for which it is planned
        with ps.memory.budget(plan.smallest_bytes + more):
            result = step(x)
    assert result.shape == (300, 100)


def test_old_values_that_somebody_holds_count(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(device, monkeypatch)
    free = Session(device)
    step = free.jitted["step"]
    for number in range(2):
        step(free.batch(number))
    expected = free.bits
    del free, step
    clean(device)
    session = Session(device)
    step, x = session.jitted["step"], session.batch(0)
    least = ps.memory.plan(step, x).smallest_bytes
    with ps.memory.budget(least):
        step(x)
    del x
    held = [parameter.detach() for parameter in session.model.parameters()]
    values = [tensor.numpy().copy() for tensor in held]
    x = session.batch(1)
    with ps.memory.budget(least):
        more = refusal(lambda: step(x))
    if more is not None:  # or else they moved to the host
        with ps.memory.budget(more - 1):
            assert refusal(lambda: step(x)) == more
        counted.peak = counted.nbytes
        with ps.memory.budget(more):
            step(x)
            assert counted.peak <= more
    assert session.bits == expected
    for tensor, value in zip(held, values, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), value)


def test_what_a_refusal_names_does(device: Device) -> None:
    """Also where a capture has flags of its own on the device, as for tokens out of range."""
    session = Session(device, "gpt")
    step, x = session.jitted["step"], session.batch(0)
    with ps.memory.budget(limit := ps.memory.plan(step, x).smallest_bytes + 1024):
        step(x).item()
    held = ps.zeros(1 << 16, device=device).realize()
    with ps.memory.budget(limit):
        smallest = refusal(lambda: step(x))
    if smallest is not None:
        with ps.memory.budget(smallest):
            step(x)
    del held


# All of it


def script(choice: random.Random) -> list[tuple[str, Any]]:
    """What a user does, line by line."""
    lines: list[tuple[str, Any]] = []
    adds = choice.random() < 0.5
    for number in range(choice.randint(3, 5)):
        lines.append(("batch", (number, choice.choice((160, 160, 80)))))
        what = "add" if adds else "step"
        lines.append((what, choice.choice(("held", "held", "dropped", "kept"))))
        if adds and choice.random() < 0.5:
            lines.append(("update", "dropped"))
        if choice.random() < 0.3:
            lines.append(("evaluate", choice.choice(("held", "kept"))))
        if choice.random() < 0.2:
            lines.append(("use", choice.choice(list(RULES))))
        if choice.random() < 0.2:
            lines.append(("clean", None))
    return lines


def run(
    session: Session, lines: list[tuple[str, Any]], call: Callable[[str, Callable[[], Any]], Any]
) -> list[bytes]:
    """The bits of the results and of the state; `call` runs each line."""
    x: ps.Tensor | None = None
    held, kept = None, list[ps.Tensor]()
    for what, more in lines:
        if what == "batch":
            x = call(what, lambda more=more: session.batch(*more))
        elif what == "clean":
            clean(session.device)
        elif what == "use":
            call(what, lambda more=more: session.use(more))
        else:
            given = [] if what == "update" else [x]
            result = call(what, lambda what=what, given=given: session.jitted[what](*given))
            held = result if more == "held" else None
            kept += [result] if more == "kept" else []
    return [*(tensor.numpy().tobytes() for tensor in kept), *session.bits, b"" if held is None else b"held"]


@pytest.mark.slow(*map(str, range(8, 20)))
@pytest.mark.parametrize("seed", range(20))
def test_a_session_under_any_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, never more memory, and each refusal names a budget that does and one that does not."""
    choice = random.Random(seed)
    device = opened(choice.choice(KINDS if seed % 5 == 0 else ["host", *FAR]))
    network, rule = choice.choice(list(NETWORKS)), choice.choice(list(RULES))
    lines = script(choice)
    counted = Counted(device, monkeypatch)
    expected = run(Session(device, network, rule), lines, lambda what, call: call())
    limit = int(counted.peak * choice.uniform(0.2, 0.9))
    always = choice.random() < 0.5  # or for jitted calls only
    clean(device)

    def under(what: str, call: Callable[[], Any]) -> Any:
        nonlocal limit
        if what in ("batch", "use") and not always:
            return call()
        results: list[Any] = []

        def inside(nbytes: int) -> int | None:
            counted.peak = before = counted.nbytes
            with ps.memory.budget(nbytes):
                smallest = refusal(lambda: results.append(call()))
                assert counted.peak <= max(nbytes, before)
                assert smallest is not None or what not in session.jitted or counted.nbytes <= nbytes
            return smallest

        if what not in session.jitted and device.capabilities.offloads is False:
            with ps.memory.budget(counted.nbytes + (1 << 20)):
                return call()
        if (least := inside(limit)) is not None:
            assert least > limit
            assert (inside(least - 1) or 0) >= least
            limit = least
            if (again := inside(limit)) is not None:  # another capture may have a few numbers of its own
                assert again <= least + 1024
                limit = again
                assert inside(limit) is None
        return results[0]

    session = Session(device, network, rule)
    assert run(session, lines, under) == expected
    device.close()
