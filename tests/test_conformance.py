"""The conformance suite for every driver: the guarantees of a device, through the public surface."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, compiled, source_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import Device, FutureState
from penstock.drivers.driver import Kernel
from penstock.errors import BufferInUse, CompileError, DeviceError

Kernels = dict[str, Kernel]
LARGE = 300_000  # bytes; several times the small staging ring, and more than the host copies directly


def numbers(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4097, LARGE])
def test_what_goes_up_comes_down(device: Device, nbytes: int) -> None:
    array = numbers(nbytes)
    assert np.array_equal(device.download(device.upload(array)).wait(), array)


def test_empty_arrays_and_buffers_are_fine(device: Device) -> None:
    buffer = device.upload(np.empty((0, 3), np.float32))
    assert buffer.nbytes == 0
    assert device.download(buffer, np.float32, (0, 3)).wait().shape == (0, 3)
    with device.view(buffer, np.float32) as view:
        assert view.size == 0


def test_arrays_of_any_layout_go_up_as_they_read(device: Device) -> None:
    array = np.arange(24, dtype=np.int64).reshape(2, 3, 4)[::-1, :, ::2].T
    result = device.download(device.upload(array), np.int64, array.shape).wait()
    assert np.array_equal(result, array)


def test_the_array_may_change_right_after_upload(device: Device, kernels: Kernels) -> None:
    target = device.upload(np.zeros(LARGE // 4, np.float32))
    x = device.upload(np.ones(LARGE // 4, np.float32))
    device.stream.launch(kernels["axpy"], (8,), (16,), (x, target, 1.0, LARGE // 4))  # keeps target busy
    array = np.full(LARGE // 4, 7, np.float32)
    device.upload(array, into=target)
    array[:] = -1
    assert np.all(device.download(target, np.float32).wait() == 7)


def test_a_part_of_a_buffer_can_be_written_and_read(device: Device) -> None:
    expected = numbers(LARGE)
    buffer = device.upload(expected)
    part = numbers(1000, seed=1)
    device.upload(part, into=buffer, offset=12_345)
    expected[12_345:13_345] = part
    assert np.array_equal(device.download(buffer).wait(), expected)
    assert np.array_equal(
        device.download(buffer, shape=(500,), offset=12_000).wait(), expected[12_000:12_500]
    )


def test_kernels_run_in_the_order_in_which_they_were_recorded(device: Device, kernels: Kernels) -> None:
    n = 1000
    out = device.empty(4 * n)
    for value in range(50):  # passes the small bounds on commands and on submissions in flight
        device.stream.launch(kernels["fill"], (4,), (16,), (out, value, n))
    assert np.all(device.download(out, np.int32).wait() == 49)
    assert device.stream.pending <= 50


def test_a_download_shows_the_moment_at_which_it_was_asked_for(device: Device, kernels: Kernels) -> None:
    n = LARGE // 4
    out = device.empty(LARGE)
    futures = []
    for value in range(4):
        device.stream.launch(kernels["fill"], (4,), (16,), (out, value, n))
        futures.append(device.download(out, np.int32))
    for value, future in enumerate(futures):
        assert np.all(future.wait() == value)


def test_uploads_between_kernels_keep_their_place(device: Device, kernels: Kernels) -> None:
    n = 500
    x, y = device.empty(4 * n), device.upload(np.zeros(n, np.float32))
    for value in range(1, 20):
        device.upload(np.full(n, value, np.float32), into=x)
        device.stream.launch(kernels["axpy"], (4,), (16,), (x, y, 1.0, n))
    assert np.all(device.download(y, np.float32).wait() == sum(range(1, 20)))


def test_a_program_replays_with_the_arguments_it_was_bound_to(device: Device, kernels: Kernels) -> None:
    n = 100
    x, y = device.upload(np.ones(n, np.float32)), device.upload(np.zeros(n, np.float32))
    launch = (kernels["axpy"], (2,), (16,), (x, y, 0.5, n))
    program = device.stream.bind([launch] * 20)  # more than one submission takes
    for _ in range(3):
        device.stream.replay(program)
    assert np.all(device.download(y, np.float32).wait() == 30)


def test_a_program_keeps_its_buffers(device: Device, kernels: Kernels) -> None:
    y = device.upload(np.zeros(64, np.float32))
    program = device.stream.bind(
        [(kernels["axpy"], (1,), (16,), (device.upload(np.ones(64, np.float32)), y, 1.0, 64))]
    )
    spoilers = [device.upload(np.full(64, 9, np.float32)) for _ in range(5)]
    device.stream.replay(program)
    assert np.all(device.download(y, np.float32).wait() == 1)
    assert spoilers


def test_arguments_in_a_list_that_changes_are_kept_as_they_were(device: Device, kernels: Kernels) -> None:
    y = device.upload(np.zeros(64, np.float32))
    for _ in range(20):
        args = [device.upload(np.ones(64, np.float32)), y, 1.0, 64]
        device.stream.launch(kernels["axpy"], (1,), (16,), args)
        args.clear()
        assert (
            device.upload(np.full(64, 9, np.float32)).nbytes == 256
        )  # must not reuse the memory of the first
    assert np.all(device.download(y, np.float32).wait() == 20)


def test_a_launch_over_nothing_does_nothing(device: Device, kernels: Kernels) -> None:
    out = device.upload(np.ones(4, np.int32))
    nothing = (kernels["fill"], (0,), (16,), (out, 5, 4))
    device.stream.launch(*nothing)
    device.stream.replay(device.stream.bind([nothing]))
    assert np.all(device.download(out, np.int32).wait() == 1)


def test_device_copies(device: Device, kernels: Kernels) -> None:
    n = 1000
    a, b = device.empty(4 * n), device.upload(np.zeros(n, np.int32))
    device.stream.launch(kernels["fill"], (4,), (16,), (a, 3, n))
    device.copy(b, a)
    device.stream.launch(kernels["fill"], (4,), (16,), (a, 4, n))
    device.copy(b, a, 40, target_offset=400, source_offset=80)
    expected = np.full(n, 3)
    expected[100:110] = 4
    assert np.array_equal(device.download(b, np.int32).wait(), expected)
    with pytest.raises(ValueError, match="overlap"):
        device.copy(a, a, 400, target_offset=100)
    device.copy(a, a, 100, target_offset=100)


def test_views_of_a_buffer_share_its_memory_and_its_order(device: Device, kernels: Kernels) -> None:
    step = max(device.capabilities.offset_alignment, 4)
    whole = device.upload(np.zeros(4 * step, np.uint8))
    part = whole.view(2 * step, step)
    device.stream.launch(kernels["fill"], (1,), (16,), (part, -1, step // 4))
    expected = np.zeros(4 * step, np.uint8)
    expected[2 * step : 3 * step] = 255
    assert np.array_equal(device.download(whole).wait(), expected)
    assert np.array_equal(device.download(part).wait(), expected[2 * step : 3 * step])
    del whole
    device.upload(np.full(step, 7, np.uint8), into=part)
    assert np.all(device.download(part).wait() == 7)
    with pytest.raises(ValueError, match="not inside"):
        part.view(0, step + 1)
    if step > 4:
        with pytest.raises(ValueError, match="multiple of"):
            part.view(4, 4)


@pytest.mark.parametrize("nbytes", [4096, LARGE])
def test_a_reading_view_shows_the_results_and_leaves_them_valid(
    device: Device, kernels: Kernels, nbytes: int
) -> None:
    out = device.empty(nbytes)
    device.stream.launch(kernels["fill"], (4,), (16,), (out, 6, nbytes // 4))
    with device.view(out, np.int32) as view:
        assert np.all(view == 6)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with device.view(out, np.int32) as again:  # many may read
            assert np.all(again == 6)
    assert np.all(device.download(out, np.int32).wait() == 6)


@pytest.mark.parametrize("nbytes", [4096, LARGE])
def test_what_a_writable_view_changes_reaches_the_device_once(
    device: Device, kernels: Kernels, nbytes: int
) -> None:
    n = nbytes // 4
    y = device.upload(np.arange(n, dtype=np.float32))
    x = device.upload(np.ones(n, np.float32))
    with device.view(y, np.float32, writable=True) as view:
        assert np.array_equal(view, np.arange(n))
        view[::2] = 0
    device.stream.launch(kernels["axpy"], (4,), (16,), (x, y, 1.0, n))
    expected = np.arange(n) + 1
    expected[::2] = 1
    assert np.array_equal(device.download(y, np.float32).wait(), expected)


def test_the_device_leaves_an_open_view_alone(device: Device, kernels: Kernels) -> None:
    out = device.upload(np.zeros(16, np.int32))
    launch = (kernels["fill"], (1,), (16,), (out, 1, 16))
    program = device.stream.bind([launch])
    for writable in (False, True):
        with device.view(out, np.int32, writable=writable) as view:
            for forbidden in (
                lambda: device.stream.launch(*launch),
                lambda: device.stream.replay(program),
                lambda: device.upload(np.ones(16, np.int32), into=out),
                lambda: device.view(out, np.int32, writable=True).__enter__(),
            ):
                with pytest.raises(BufferInUse, match="host view"):
                    forbidden()
            assert np.all(view == 0)
    device.stream.launch(*launch)
    assert np.all(device.download(out, np.int32).wait() == 1)


def test_an_array_kept_after_its_view_still_points_to_the_buffer(device: Device) -> None:
    with device.view(device.upload(numbers(LARGE)), np.uint8) as view:
        kept = view[5:10]
    device.trim()
    if device.capabilities.language == "numpy" or "svm" in device.name:
        assert np.array_equal(kept, numbers(LARGE)[5:10])


def test_futures_pass_from_pending_to_ready(device: Device) -> None:
    future = device.download(device.upload(numbers(LARGE)))
    assert future.state in (FutureState.PENDING, FutureState.READY)
    assert np.array_equal(future.wait(timeout=60), numbers(LARGE))
    assert future.is_ready()
    assert future.state is FutureState.READY
    assert future.try_get() is future.wait()


def test_counters_agree_with_the_driver(device: Device, kernels: Kernels) -> None:
    buffers = [device.upload(numbers(n)) for n in (10, 1000, 100_000, 2_000_000)]
    del buffers[1]
    device.stream.launch(kernels["fill"], (1,), (16,), (buffers[0], 1, 2))
    device.download(buffers[-1]).wait()
    device.sync()
    stats = device.memory_stats()
    assert stats.live_bytes == sum(buffer.memory.nbytes for buffer in buffers)
    assert stats.pooled_bytes == 1024
    assert stats.unaccounted_bytes == 0
    assert device.driver.allocated_bytes == stats.driver_bytes > 0
    del buffers
    device.cleanup()
    assert device.driver.allocated_bytes == 0


@pytest.mark.slow("opencl-mapped", "opencl-device")
def test_waits_are_counted_with_the_line_that_caused_them(device: Device, kernels: Kernels) -> None:
    out = device.empty(1 << 16)
    device.stream.launch(kernels["spin"], (64,), (16,), (out, 200_000))
    device.sync()
    sites = device.stream.waits.sites()
    if sites or device.capabilities.kind != "host":  # it may be done before the wait
        assert [site.why for site in sites] == ["sync"]
        assert "test_conformance.py:" in sites[0].where
        assert sites[0].count == device.stream.waits.count == 1
        assert 0 < sites[0].seconds == device.stream.waits.seconds
    device.stream.waits.clear()
    assert device.stream.waits.count == 0


def test_a_source_that_does_not_compile_shows_the_compilers_words(device: Device) -> None:
    bad = "__kernel void broken(__global int *a) { a[0] = bogus; }"
    if device.capabilities.language == "cuda":
        bad = 'extern "C" __global__ void broken(int *a) { a[0] = bogus; }'
    if device.capabilities.language == "wgsl":
        bad = "kernel broken(a: array<i32>) { a[0] = bogus; }"
    if device.capabilities.language != "numpy":
        with pytest.raises(CompileError, match="bogus"):
            device.compile(bad, {"broken": ("int32*",)})
        with pytest.raises(CompileError, match="functions were given"):
            device.compile({"fill": print}, {"fill": ("int32*",)})
        with pytest.raises(CompileError, match="has 3 parameters"):
            device.compile(source_for(device), {"fill": ("int32*",)})
    else:
        with pytest.raises(CompileError, match="text was given"):
            device.compile(bad, {"broken": ("int32*",)})
    with pytest.raises(CompileError, match="missing"):
        device.compile(source_for(device), {"missing": ("int32*",)})
    with pytest.raises(ValueError, match="parameter 1: 'floaty' is no type"):
        device.compile(source_for(device), {"fill": ("int32*", "floaty", "int32")})
    assert compiled(device)["fill"].name == "fill"


def test_wrong_arguments_are_named(device: Device, kernels: Kernels) -> None:
    out = device.empty(64)
    for args in ((out, 1), (1, 1, 1), (out, 1, 1, 1), ()):
        with pytest.raises(TypeError, match=r"'fill' takes \(int32\*, int32, int32\)"):
            device.stream.launch(kernels["fill"], (1,), (1,), args)
        with pytest.raises(TypeError, match="'fill' takes"):
            device.stream.bind([(kernels["fill"], (1,), (1,), args)])
    device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
    device.sync()


def test_a_refused_launch_names_kernel_sizes_and_arguments(device: Device, kernels: Kernels) -> None:
    out = device.empty(64)
    with pytest.raises(
        DeviceError, match=r"'fill', grid \(1,\), group \(1000000000,\), .*64-byte buffer, 5, 1"
    ):
        device.stream.launch(kernels["fill"], (1,), (1_000_000_000,), (out, 5, 1))
    device.stream.launch(kernels["fill"], (1,), (1,), (out, 6, 16))
    assert np.all(device.download(out, np.int32).wait() == 6)


def test_ranges_outside_a_buffer_are_refused(device: Device) -> None:
    buffer = device.upload(numbers(100))
    for call in (
        lambda: device.upload(numbers(101), into=buffer),
        lambda: device.upload(numbers(1), into=buffer, offset=100),
        lambda: device.download(buffer, np.int32, (26,)),
        lambda: device.download(buffer, np.uint8, (1,), offset=-1),
        lambda: device.copy(buffer, buffer, 60, source_offset=50),
        lambda: device.view(buffer, np.int64, (13,)),
    ):
        with pytest.raises(ValueError, match="not inside <Buffer of 100 bytes"):
            call()
    with pytest.raises(ValueError, match="-1 bytes"):
        device.empty(-1)


def test_a_buffer_of_another_device_is_refused(device: Device, kernels: Kernels) -> None:
    other = Device.over(DRIVERS["host"]())
    foreign = other.empty(64)
    for call in (
        lambda: device.stream.launch(kernels["fill"], (1,), (1,), (foreign, 1, 1)),
        lambda: device.download(foreign),
        lambda: device.upload(numbers(4), into=foreign),
        lambda: device.view(foreign),
    ):
        with pytest.raises(ValueError, match="cannot be used on"):
            call()


@pytest.mark.parametrize("kind", DRIVERS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_mixture_of_commands_gives_what_numpy_gives(kind: str, data: st.DataObject) -> None:
    """Uploads, kernels, copies, views and downloads in any order, on buffers that come and go."""
    device = Device.over(DRIVERS[kind](), SMALL)
    kernels = compiled(device)
    n = data.draw(st.sampled_from([1, 100, 30_000]))
    buffers, models, futures, view = [], [], [], None
    for step in range(data.draw(st.integers(1, 25))):
        verb = data.draw(
            st.sampled_from(["new", "upload", "fill", "axpy", "copy", "edit", "download", "drop"])
        )
        if verb == "new" or not buffers:
            models.append(np.full(n, step, np.float32))
            buffers.append(device.upload(models[-1]))
            continue
        i, j = (data.draw(st.integers(0, len(buffers) - 1)) for _ in range(2))
        if verb == "upload":
            models[i] = np.full(n, -step, np.float32)
            device.upload(models[i], into=buffers[i])
        elif verb == "fill":
            models[i] = np.full(n, step, np.float32)
            bits = int(np.float32(step).view(np.int32))
            device.stream.launch(kernels["fill"], (3,), (8,), (buffers[i], bits, n))
        elif verb == "axpy" and i != j:
            models[j] = models[j] + np.float32(0.5) * models[i]
            device.stream.launch(kernels["axpy"], (3,), (8,), (buffers[i], buffers[j], 0.5, n))
        elif verb == "copy" and i != j:
            models[i] = models[j]
            device.copy(buffers[i], buffers[j])
        elif verb == "edit":
            models[i] = models[i].copy()
            models[i][::3] = 5
            with device.view(buffers[i], np.float32, writable=True) as view:
                view[::3] = 5
        elif verb == "download":
            futures.append((device.download(buffers[i], np.float32), models[i]))
        elif verb == "drop":
            del buffers[i], models[i]
    last = [device.download(buffer, np.float32) for buffer in buffers]
    for future, model in [*futures, *zip(last, models, strict=True)]:
        np.testing.assert_array_equal(future.wait(), model)
    buffers.clear()
    view = None
    device.close()
    assert device.driver.allocated_bytes == 0
