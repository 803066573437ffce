"""The examples reach the losses that they should, on every driver, and leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS, surface

import penstock as ps
from penstock import Device
from penstock.tensor.recording import only_recording

sys.path += [str(Path(__file__).parent.parent / name) for name in ("examples", "benchmarks")]
import classifier
import diffusion
import digits
import finetune
import gpt
import lora
import lstm
import pictures
import resnet
import sine
import trainer
import vit
import xor

import zoo

pytestmark = surface
OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))
IN_FLIGHT_BYTES = 256 << 10  # losses of steps that the device has not finished, a block for each
SLACK_BYTES = 2 << 20  # what the resident size may drift by


@pytest.fixture(params=DRIVERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


@pytest.mark.slow("host", "host-late")
def test_xor_on_every_driver(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert xor.main(device) < 1e-4
    assert "0 xor 1 = 1.0" in capsys.readouterr().out


@pytest.mark.slow("host", "host-late", "host-far", "webgpu")
def test_a_sine_on_every_driver(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert sine.main(device) < 1e-3
    assert "beside the sine" in capsys.readouterr().out


@pytest.mark.slow
def test_pictures_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert classifier.main() < 0.1
    right = float(capsys.readouterr().out.split("%")[0].split()[-1])
    assert right > 95


@pytest.mark.slow  # some sixty kernels to compile
@pytest.mark.usefixtures("optimized")  # more to compile, and far less to wait for
def test_a_resnet_tells_shapes_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert resnet.main() < 0.3
    assert percent(capsys) > 90


def percent(capsys: pytest.CaptureFixture[str]) -> float:
    """How much is right, as the last line says."""
    return float(capsys.readouterr().out.splitlines()[-1].split("%")[0])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pictures, whether scikit-learn is installed or not."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)


def test_digits_are_drawn_where_scikit_learn_is_not_installed(drawn: None) -> None:
    images, labels = pictures.digits(50)
    assert images.shape == (50, 1, 8, 8)
    assert images.dtype == np.float32
    assert 0 <= images.min() < images.max() <= 1
    assert set(labels) == set(range(10))


def test_digits_are_those_of_scikit_learn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    ink = np.arange(2 * 64).reshape(2, 8, 8) % 17
    data = SimpleNamespace(images=ink.astype(float), target=np.array([3, 7]))
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=lambda: data))
    images, labels = pictures.digits()
    np.testing.assert_array_equal(images[:, 0], ink / 16)
    np.testing.assert_array_equal(labels, [3, 7])


@pytest.mark.slow
def test_digits_are_told_apart(drawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main(steps=100) < 0.5
    assert percent(capsys) > 90


@pytest.mark.slow
def test_fine_tuning_trains_what_is_not_frozen(drawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main(steps=100) < 0.5
    assert percent(capsys) > 80


@pytest.mark.slow("12")
@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize(("epochs", "least"), [(1, 0.15), (12, 0.9)])
def test_a_trainer_tells_digits_apart(
    drawn: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: int, least: float
) -> None:
    default = ps.default_device()
    ps.use("host" if epochs == 1 else default)  # which compiles nothing
    try:
        assert trainer.main(tmp_path / "run", epochs) > least
        assert "of new digits right, by the weights of step" in capsys.readouterr().out
        assert trainer.main(tmp_path / "run", epochs) > least  # nothing is left to do
    finally:
        ps.use(default)


@pytest.mark.slow
def test_an_lstm_learns_a_rhyme(capsys: pytest.CaptureFixture[str]) -> None:
    assert lstm.main(steps=150) < 0.4
    written = capsys.readouterr().out.split("\n", 1)[1]
    assert written.startswith("The rain")
    assert len(written) == 8 + 60 + 1


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")  # more to compile, and far less to wait for
def test_a_vision_transformer_tells_digits_apart(drawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    loss = vit.main(steps=150)  # of 2.3 at the start; after so many steps of Adam it depends on last bits
    assert loss < 1.5
    assert percent(capsys) > 60


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")  # more to compile, and far less to wait for
def test_diffusion_learns_what_is_noise(drawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert diffusion.main(steps=60) < 0.4  # the noise itself has a mean square of 1
    assert len(capsys.readouterr().out.splitlines()) == 8


@pytest.mark.slow
def test_adapters_learn_another_rhyme(capsys: pytest.CaptureFixture[str]) -> None:
    assert lora.main("host", steps=15) < 2.4
    first, second, before, after = capsys.readouterr().out.splitlines()
    assert first.startswith("100,416 parameters trained")
    assert second.startswith("9,728 parameters trained")
    assert before.split(": ")[1] != after.split(": ")[1]


@pytest.mark.slow
def test_a_gpt_learns_a_rhyme(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpt.main() < 0.6
    written = capsys.readouterr().out.split("\n", 4)[4]  # after four lines of losses
    assert written.startswith("The rain")
    assert len(written) == 8 + 60 + 1


@pytest.mark.parametrize("name", [name for name, case in zoo.CASES.items() if not case.half])
def test_models_of_the_benchmark_have_a_loss(name: str) -> None:
    case = zoo.CASES[name]
    batch = [ps.asarray(array) for array in case.batch(np.random.default_rng(0), 2)]
    with only_recording():
        loss = case.loss(ps.nn.functional, case.build(zoo.loaded(case.file, ps)), tuple(batch))
    assert (loss.shape, loss.requires_grad) == ((), True)


def test_the_resnet50_of_the_benchmark_has_the_size_of_the_original() -> None:
    model = zoo.loaded("resnet50", ps).resnet50()
    assert sum(parameter.size for parameter in model.parameters()) == 25_557_032


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OPENCL, *CUDA_KINDS, *WEBGPU_KINDS])
def test_ten_thousand_further_steps_take_no_memory(kind: str) -> None:
    """In a process of its own: what other tests leave to be freed would change the resident size."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(resident_growth, kind).result() < SLACK_BYTES


def resident_growth(kind: str) -> int:
    """How many bytes larger a process is after ten thousand further steps on a device."""
    device = Device.over(DRIVERS[kind]())
    network = xor.Xor(device)
    network.train(2000)
    gc.collect()
    device.cleanup()
    held, resident = device.driver.allocated_bytes, psutil.Process().memory_info().rss
    for _ in range(10):
        assert np.isfinite(network.train(1000))
        staging = device.memory_stats().staging_bytes
        assert device.driver.allocated_bytes - staging < held + IN_FLIGHT_BYTES
    device.cleanup()
    assert device.driver.allocated_bytes == held
    grown = psutil.Process().memory_info().rss - resident
    device.close()
    return grown


@pytest.mark.slow("host-far", "webgpu")
@pytest.mark.parametrize("kind", [OPENCL, "host-far", *CUDA_KINDS, *WEBGPU_KINDS])
def test_trainings_leave_nothing_alive(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    for _ in range(5):
        network = xor.Xor(device)
        assert network.train(20) < 1
        del network
        gc.collect()
        device.cleanup()
        stats = device.memory_stats()
        assert stats.live_bytes == 0
        assert device.driver.allocated_bytes == stats.pooled_bytes == 0
    device.close()


def test_trainings_on_the_default_device_leave_nothing_alive() -> None:
    device = ps.default_device()
    gc.collect()
    device.cleanup()
    before = device.memory_stats().live_bytes
    for _ in range(5):
        network = xor.Xor()
        network.train(20)
        del network
        gc.collect()
        device.cleanup()
        assert device.memory_stats().live_bytes == before
