"""Devices of other machines, described by a file: memory plans and predicted times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, MEASURED_RATES, SMALL

import penstock as ps
from penstock import Device, nn, optim
from penstock.compiler import budget
from penstock.drivers.description import description_text, read_description
from penstock.drivers.driver import Cost
from penstock.drivers.rates import StepRates
from penstock.errors import DeviceError, OutOfDeviceMemory, SettingError
from penstock.execution.memory_plan import MemoryPlan
from penstock.measuring import ceilings, step_rates
from penstock.measuring.step_rates import fitted
from penstock.nn.quantizing import BITS

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from decode_steps import empty_quantized, launches_of, step_of
from generate import SHAPES

CARD = """
[device]
kind = "gpu"
language = "cuda"
memory = "8GiB"

[rates]
bandwidth = 250e9
launch = 3e-6
link = 12e9
operations.float32 = 10e12
operations.bfloat16 = 40e12
"""

H200 = """
[device]
kind = "gpu"
language = "cuda"
memory = "141GiB"
compute_units = 132
tf32 = true

[rates]
bandwidth = 4e12
launch = 1.5e-6
link = 55e9
attention = 0.5
operations.float32 = 300e12
operations.bfloat16 = 650e12
"""


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here stays here."""
    monkeypatch.setattr("penstock.tuning_cache.cache_folder", lambda: tmp_path)


@pytest.fixture
def default() -> Iterator[None]:
    before = ps.default_device()
    yield
    ps.use(before)


def planned(device: str | Path | Device, batch: int, width: int = 32, precision: Any = None) -> MemoryPlan:
    """The plan of a small GPT's training step."""
    ps.use(device if isinstance(device, Device) else str(device))
    model = nn.GPT(vocab_size=256, context=32, width=width, layers=2, heads=2)
    if precision is not None:
        model.to(precision)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    plan: MemoryPlan = ps.memory.plan(step, ps.asarray(np.zeros((batch, 33), np.int32)))
    return plan


@pytest.mark.usefixtures("default")
def test_a_plan_tells_what_is_too_large_for_kernels(tmp_path: Path) -> None:
    """NumPy computes it on the host, which takes a time that no rate predicts, and is never moved."""
    card = tmp_path / "h200.toml"
    card.write_text(H200)
    ps.use(str(card))
    step = ps.jit(lambda x: ps.sum(ps.tanh(x[:, None] * ps.ones(1 << 15)) ** 2, axis=1))
    small, large = (ps.memory.plan(step, ps.zeros(rows)) for rows in ((1 << 16) - 64, 1 << 16))
    assert not small.note
    assert small.unlimited_seconds
    assert "float32[65536, 32768]" in large.note
    assert large.note in str(large)
    assert large.unlimited_seconds is None
    assert large.step_seconds is None
    with pytest.raises(OutOfDeviceMemory, match=r"NumPy computes .* steps on the host"):
        ps.jit(step, memory="4GiB")(ps.zeros(1 << 16))


@pytest.mark.usefixtures("default")
def test_parts_of_attention_read_their_keys_in_place(tmp_path: Path) -> None:
    """A library reads the first rows of each matrix of a batch without a copy of them."""
    card = tmp_path / "h200.toml"
    card.write_text(H200)
    ps.use(str(card))
    model = nn.GPT(vocab_size=64, context=2048, width=256, layers=1, heads=4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    plan: MemoryPlan = ps.memory.plan(step, ps.asarray(np.zeros((16, 2049), np.int32)))
    launches = plan.unlimited.launches
    parts = sum(launch.product != "" for launch in launches)
    assert sum(launch.operations == 0 for launch in launches) < parts // 4
    # The plan for one budget has no more work than the next smaller of all budgets.
    row = plan.budgets[len(plan.budgets) // 2]
    unlimited, inside = plan.within(row.budget_bytes).budgets
    assert unlimited == plan.unlimited
    assert inside.budget_bytes <= row.budget_bytes
    assert inside.extra_work <= row.extra_work
    assert plan.fits(plan.least_bytes)
    assert plan.within(plan.unlimited_bytes).budgets == (plan.unlimited,)


@pytest.mark.slow("wgsl", "opencl")
@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("language", ["cuda", "opencl", "wgsl"])
def test_a_plan_for_a_device_that_is_not_there(tmp_path: Path, language: str) -> None:
    card = tmp_path / "card.toml"
    card.write_text(CARD.replace("cuda", language))
    precision = ps.bfloat16 if language == "cuda" else None
    plan = planned(card, 16, precision=precision)
    budgets, times = [row.budget_bytes for row in plan.budgets], plan.step_seconds
    assert times is not None
    assert budgets == sorted(set(budgets), reverse=True)
    assert list(times) == sorted(times)  # a smaller budget never takes less time
    assert 0 < times[0] < times[-1] < 1
    assert str(card) in str(plan)
    assert "8.0 GiB is enough" in plan.verdict(8 << 30)
    larger = planned(card, 32, precision=precision)
    assert larger.smallest_bytes > plan.smallest_bytes
    assert larger.step_seconds is not None
    assert larger.step_seconds[0] > times[0]


@pytest.mark.usefixtures("default")
def test_half_the_rates_take_twice_the_time(tmp_path: Path) -> None:
    times = []
    for number, rates in enumerate((("250e9", "3e-6", "10e12"), ("125e9", "6e-6", "5e12"))):
        card = tmp_path / f"{number}.toml"
        text = CARD.replace("250e9", rates[0]).replace("3e-6", rates[1]).replace("10e12", rates[2])
        card.write_text(text)
        plan = planned(card, 4)
        assert plan.step_seconds is not None
        times.append(plan.step_seconds[0])
    assert times[1] == pytest.approx(2 * times[0])


@pytest.mark.usefixtures("default")
def test_choices_suit_the_rates_of_a_gpu(tmp_path: Path) -> None:
    """Which values are computed again or moved goes by usual rates, which are about those of an H200."""
    card = tmp_path / "card.toml"
    card.write_text(H200)
    ps.use(str(card))
    layers = [part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.GELU())]
    model = nn.Sequential(*layers).to(ps.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    @ps.jit
    def step(rows: ps.Tensor) -> ps.Tensor:
        loss = ps.mean(model(rows).astype(ps.float32) ** 2)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    plan = ps.memory.plan(step, ps.zeros((16384, 2048), dtype=ps.bfloat16))
    times = plan.step_seconds
    assert times is not None
    within = [at for at, row in enumerate(plan.budgets) if row.budget_bytes <= 0.55 * plan.unlimited_bytes]
    assert times[within[0]] < 1.3 * times[0]


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize(
    ("quantize", "batch", "each", "others"),
    [
        # The embedding with positions and angles; the head, after a norm if it is packed; argmax; the state.
        (None, 1, 5, 4),
        ("int4", 1, 5, 5),
        # The embedding is a part of a norm: each layer has two, and the last comes before the head.
        (None, 32, 7, 5),
        ("int4", 32, 7, 5),
    ],
)
def test_a_step_of_tokens_has_few_launches(
    tmp_path: Path, quantize: str | None, batch: int, each: int, others: int
) -> None:
    card = tmp_path / "card.toml"
    card.write_text(H200)
    ps.use(str(card))
    layers = 2
    model = ps.models.build({**SHAPES["llama-1b"], "num_hidden_layers": layers}).to("bfloat16")
    if quantize is not None:
        empty_quantized(model, BITS[quantize])
    launches = launches_of(step_of(model, batch, 512))
    assert len(launches) == each * layers + others, [call.source.name for call in launches]


@pytest.mark.usefixtures("default")
def test_it_has_no_values(tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_text(CARD)
    x = ps.ones((4, 4), device=ps.use(str(card)))
    with pytest.raises(DeviceError, match="not there: it has plans, and no values"):
        (x + 1).numpy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[rates]", "[speeds]"), r"\[rates\] is missing"),
        (('"gpu"', '"tpu"'), "device.kind is 'tpu'; it is gpu or cpu"),
        (('language = "cuda"', ""), "device.language is missing; it is cuda or opencl or wgsl"),
        (('"8GiB"', '"much"'), "device.memory is 'much' is not a size in bytes"),
        (("memory", "vector_width = true\nmemory"), "device.vector_width is True, and int is wanted"),
        (("memory", "wheels = 4\nmemory"), "device.wheels is nothing that is known"),
        (("250e9", "-1"), "rates.bandwidth is -1; it is more than 0"),
        (("launch = 3e-6", ""), "rates.launch is missing; it is more than 0, seconds"),
        (("operations.float32", "operations.int8"), "rates.operations.int8 is no dtype of products"),
        (("operations.float32 = 10e12", ""), "rates.operations.float32 is missing"),
        (("link", "cable = 1\nlink"), "rates.cable is nothing that is known"),
        (("[rates]", "[rates"), "is no TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    card = tmp_path / "card.toml"
    card.write_text(CARD.replace(*change))
    with pytest.raises(SettingError, match=message) as raised:
        ps.registry.find(str(card))
    assert str(card) in str(raised.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent\.toml cannot be read"):
        ps.use(str(tmp_path / "absent.toml"))


@pytest.mark.usefixtures("default", "_own_cache")
def test_a_device_that_is_here_has_the_plans_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ps.devices()[0]
    rates = StepRates(1e10, {"float32": 1e11, "float16": 5e10}, 2e-6, 3e9, attention=0.5)
    file = tmp_path / "here.toml"
    file.write_text(description_text(here.capabilities, rates))
    capabilities, read = read_description(file)
    assert (capabilities, read) == (here.capabilities, rates)
    monkeypatch.setattr(step_rates, "measured_rates", lambda device: rates)
    own, described = planned(here, 8), planned(file, 8)
    assert [row.arena_bytes for row in own.budgets] == [row.arena_bytes for row in described.budgets]
    assert own.step_seconds == pytest.approx(described.step_seconds)


def test_rates_are_those_that_explain_the_times() -> None:
    rng = np.random.default_rng(0)
    true = StepRates(3e9, {"float32": 5e10}, 4e-6, 1e18, attention=0.4)

    def launches() -> list[Cost]:
        sizes = rng.integers(1 << 12, 1 << 24, (int(rng.integers(2, 30)), 3)).tolist()
        kinds = [("", 1, False), ("float32", 1 << 8, False), ("float32", 1 << 8, True)]
        made = [(*kinds[at % 3], *size) for at, size in enumerate(sizes)]
        return [
            Cost(operations * times, read, written, "", product, attends)
            for product, times, attends, operations, read, written in made
        ]

    programs = [launches() for _ in range(8)]
    programs.append([Cost(0, 8, 8, "")] * 40)
    result = fitted(programs, [true.seconds(costs) for costs in programs])
    assert result.bandwidth == pytest.approx(true.bandwidth, rel=1e-3)
    assert result.product_rate("float32") == pytest.approx(true.product_rate("float32"), rel=1e-3)
    assert result.product_rate("int8") == result.product_rate("float32")
    assert result.launch == pytest.approx(true.launch, rel=1e-3)
    assert result.attention == pytest.approx(true.attention, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = step_rates._steps
    few = lambda *args: steps(*args)[:3]  # noqa: E731 - the others take seconds
    monkeypatch.setattr(step_rates, "_steps", few)
    monkeypatch.setattr(step_rates, "_TRY_SECONDS", 0.001)
    monkeypatch.setattr(step_rates, "measured_rates", MEASURED_RATES)
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e9 if what == "float32" else 5e8)
    device = Device.over(DRIVERS["host"](), SMALL)
    rates = step_rates.step_rates(device)
    assert rates is not None
    assert rates.launch > 0
    assert rates.product_rate("float16") == pytest.approx(rates.product_rate("float32") / 2)
    assert rates.product_rate("float32") > 2e6
    assert step_rates.step_rates(device, measure=False) == rates  # which is kept
    device.close()


@pytest.mark.usefixtures("default", "given_rates")
def test_a_profile_with_such_a_device_has_advice(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    rates = StepRates(1e10, {"float32": 1e11}, 2e-6, 3e9)
    file.write_text(description_text(ps.devices()[0].capabilities, rates))
    device = ps.use(str(file))
    held = nn.Linear(4, 4)  # whose parameters are on that device
    with ps.profile(tmp_path / "trace.json"):
        ps.ones(4, device="host").sum().item()
    file.unlink()
    assert not [said for said in ps.advise(tmp_path / "trace.json") if str(file) in said.evidence]
    del held, device


@pytest.mark.usefixtures("default", "_own_cache")
def test_moves_are_priced_by_the_link_of_the_file(tmp_path: Path) -> None:
    here = replace(ps.devices()[0].capabilities, kind="gpu", vector_width=1, offloads=True)
    file = tmp_path / "card.toml"
    file.write_text(description_text(here, StepRates(2e11, {"float32": 1e13}, 3e-6, 1e10)))
    assert ps.registry.find(str(file)).link_cost == 20
    assert planned(file, 8).budgets[-1].moved
    file.write_text(
        description_text(replace(here, offloads=False), StepRates(2e11, {"float32": 1e13}, 3e-6, 1e10))
    )
    assert ps.registry.find(str(file)).link_cost is None


@pytest.mark.usefixtures("default")
def test_it_may_have_more_pinned_memory_than_this_machine(tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_text(CARD)
    driver = ps.use(str(card)).driver
    memory = driver.allocate(1 << 40, pinned=True)
    assert memory.host is not None
    memory.host[-1] = 7
    assert memory.host[-2:].tolist() == [0, 7]
    driver.free(memory)


@pytest.mark.usefixtures("default")
def test_smaller_budgets_are_planned_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "card.toml"
    card.write_text(CARD)
    asked: list[object] = []
    real = budget.Ways.frontier
    monkeypatch.setattr(budget.Ways, "frontier", lambda ways: asked.append(ways) or real(ways))
    plan = planned(card, 8)
    assert plan.unlimited_bytes > 0
    assert not asked
    assert plan.budgets[0] == plan.unlimited
    assert plan.step_seconds is not None
    assert plan.step_seconds[0] == plan.unlimited_seconds
    assert len(asked) == 1
