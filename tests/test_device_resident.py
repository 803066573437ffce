"""Values on a device are computed there: without jit too, nothing is copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS

import penstock as ps
from penstock.dispatch.device import AutoDevice
from penstock.runtime import Device

F = ps.nn.functional
FAR = ["host-far", "opencl-device", *CUDA_KINDS, *WEBGPU_KINDS]
SIZES = {"small": 6, "large": 300}  # rows and columns: below and above what NumPy computes in shared memory

# Each takes a matrix x, a vector v, a vector of ids, and knows the same in NumPy.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (lambda x, v, ids: ps.sum(x), lambda x, v, ids: x.sum()),
    "row sums": (lambda x, v, ids: ps.sum(x, axis=1), lambda x, v, ids: x.sum(1)),
    "column sums": (lambda x, v, ids: ps.sum(x, axis=0), lambda x, v, ids: x.sum(0)),
    "mean": (lambda x, v, ids: x.mean(), lambda x, v, ids: x.mean()),
    "max": (lambda x, v, ids: ps.max(x), lambda x, v, ids: x.max()),
    "min of rows": (lambda x, v, ids: ps.min(x, axis=1), lambda x, v, ids: x.min(1)),
    "variance": (lambda x, v, ids: ps.var(x), lambda x, v, ids: x.var()),
    "all": (lambda x, v, ids: ps.all(x < 9), lambda x, v, ids: (x < 9).all()),
    "argmax": (lambda x, v, ids: ps.argmax(x, axis=1), lambda x, v, ids: x.argmax(1)),
    "row": (lambda x, v, ids: x[3], lambda x, v, ids: x[3]),
    "item": (lambda x, v, ids: x[3, 4], lambda x, v, ids: x[3, 4]),
    "block": (lambda x, v, ids: x[1:3, 2:4], lambda x, v, ids: x[1:3, 2:4]),
    "every second": (lambda x, v, ids: x[::2], lambda x, v, ids: x[::2]),
    "product with a vector": (lambda x, v, ids: x @ v, lambda x, v, ids: x @ v),
    "product": (lambda x, v, ids: x @ x.T, lambda x, v, ids: x @ x.T),
    "dot": (lambda x, v, ids: ps.vecdot(v, v), lambda x, v, ids: v @ v),
    "embedding": (lambda x, v, ids: F.embedding(ids, x), lambda x, v, ids: x[ids]),
    "take": (lambda x, v, ids: ps.take(x, ids, axis=0), lambda x, v, ids: x[ids]),
    "add": (lambda x, v, ids: x + v, lambda x, v, ids: x + v),
    "number": (lambda x, v, ids: 2 * x - 1, lambda x, v, ids: 2 * x - 1),
    "exp": (lambda x, v, ids: ps.exp(x), lambda x, v, ids: np.exp(x)),
    "where": (lambda x, v, ids: ps.where(x > 0.5, x, 0.0), lambda x, v, ids: np.where(x > 0.5, x, 0)),
    "cast": (lambda x, v, ids: (x > 0.5).astype(ps.float32), lambda x, v, ids: (x > 0.5).astype(np.float32)),
    "whole numbers": (
        lambda x, v, ids: (9 * x).astype(ps.int32),
        lambda x, v, ids: (9 * x).astype(np.int32),
    ),
    "transpose": (lambda x, v, ids: x.T + 0, lambda x, v, ids: x.T),
    "concat": (lambda x, v, ids: ps.concat([x, x]), lambda x, v, ids: np.concatenate([x, x])),
    "flip": (lambda x, v, ids: ps.flip(x, axis=0), lambda x, v, ids: x[::-1]),
    "roll": (lambda x, v, ids: ps.roll(x, 1, axis=1), lambda x, v, ids: np.roll(x, 1, 1)),
    "running sums": (
        lambda x, v, ids: ps.cumulative_sum(x, axis=1),
        lambda x, v, ids: np.cumsum(x, 1, dtype=np.float32),
    ),
    "sorted": (lambda x, v, ids: ps.sort(v), lambda x, v, ids: np.sort(v)),
    "softmax": (
        lambda x, v, ids: F.softmax(x, axis=-1),
        lambda x, v, ids: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    ),
    "gradient": (
        lambda x, v, ids: ps.grad(lambda t: (t * t).sum())(x),
        lambda x, v, ids: 2 * x,
    ),
    "items of few": (lambda x, v, ids: ps.sum(x[ids]), lambda x, v, ids: x[ids].sum()),
}
FEW = ("sum", "row", "product with a vector", "embedding")  # PoCL takes long to compile


@pytest.fixture(scope="module", params=FAR)
def far(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device whose memory the host cannot access."""
    device = Device.over(DRIVERS[request.param]())
    yield device
    device.close()


@pytest.fixture
def fetched(far: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every copy from the device to the host that the driver gets."""
    return watched(far, monkeypatch)


def watched(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    driver = device.driver
    read, map_ = driver.read, driver.map

    def reading(queue: Any, target: Any, *rest: Any) -> Any:
        sizes.append(target.nbytes)
        return read(queue, target, *rest)

    def mapping(memory: Any, offset: int, nbytes: int, writable: bool) -> Any:
        sizes.append(0 if writable else nbytes)
        return map_(memory, offset, nbytes, writable)

    monkeypatch.setattr(driver, "read", reading)
    monkeypatch.setattr(driver, "map", mapping)
    return sizes


def arrays(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    x, v = rng.random((size, size), np.float32), rng.random(size, np.float32)
    return x, v, rng.integers(0, size, 5)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_copied_to_the_host(far: Device, fetched: list[int], size: str) -> None:
    given = arrays(SIZES[size])
    tensors = [ps.asarray(array, device=far) for array in given]
    compiled = far.capabilities.language == "opencl"
    for name in FEW if compiled else OPERATIONS:
        compute, expected = OPERATIONS[name]
        for _ in range(1 if compiled else 2):  # the second time a program exists
            result = compute(*tensors).realize()
            assert not sum(fetched), f"{name}: {fetched} bytes left the device"
        np.testing.assert_allclose(result.numpy(), expected(*given), rtol=1e-4, atol=1e-5, err_msg=name)
        nbytes = result.size * result.dtype.itemsize
        checks = 16 if name in ("embedding", "take", "items of few") else 0  # the worst index of both runs
        assert nbytes <= sum(fetched) <= nbytes + checks, "the result alone is copied"
        fetched.clear()


def test_creations_without_inputs_leave_nothing_to_copy(far: Device, fetched: list[int]) -> None:
    for made in (ps.zeros((3,), device=far), ps.arange(5, device=far) * 2, ps.eye(4, device=far)):
        made.realize()
        assert not fetched


def test_a_value_that_is_asked_for_is_one_item(far: Device, fetched: list[int]) -> None:
    x = ps.asarray(arrays(300)[0], device=far)
    assert float(ps.sum(x)) > 0
    assert fetched == [4]


def test_steps_of_the_host_are_explained(far: Device) -> None:
    """Operations without a kernel are the exception, and `explain` shows them."""
    x = ps.asarray(np.ones(4, np.complex64), device=far)
    text = ps.explain(x * 2)
    if far.capabilities.language == "numpy":
        assert "NumPy" not in text
        assert text.startswith("1. ")
    else:
        assert "host [" in text
    np.testing.assert_array_equal((x * 2).numpy(), np.full(4, 2, np.complex64))


@pytest.mark.parametrize(
    "kind", [kind for kind in DRIVERS if kind in ("opencl-svm", "opencl-mapped", "host")]
)
def test_shared_memory_is_read_where_it_lies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy computes new expressions there, in place, without copies."""
    device = Device.over(DRIVERS[kind]())
    x, v, ids = arrays(300)
    tensors = [ps.asarray(array, device=device) for array in (x, v, ids)]
    monkeypatch.setattr(
        device.layers().transfers, "download", lambda *_: pytest.fail("a copy of what the host sees")
    )
    for name in ("row", "item", "embedding", "block"):
        compute, expected = OPERATIONS[name]
        result = compute(*tensors)
        assert ps.explain(result).startswith("NumPy computes ["), name
        result.realize()
        with device.view(result._node.value, result.dtype, result.shape) as actual:
            np.testing.assert_array_equal(actual, expected(x, v, ids))
    monkeypatch.undo()
    device.close()


def test_what_reads_much_is_no_small_matter() -> None:
    """A maximum writes a single item and reads many: the size of the input decides, too."""
    from penstock.execution.structure import MIN_ITEMS, Structure

    device = Device.over(DRIVERS["host"]())
    x = ps.asarray(np.ones(MIN_ITEMS, np.float32), device=device)
    assert not Structure([ps.max(x)._node]).waits_for_no_compiler(True)
    assert Structure([ps.max(x[1:])._node]).waits_for_no_compiler(True)
    assert Structure([(x[7] + 1)._node]).waits_for_no_compiler(True)
    device.close()


def test_explain_tells_of_values_that_are_there(far: Device) -> None:
    x = ps.asarray(np.ones((2, 3), np.float32), device=far)
    assert ps.explain(x, ps.reshape(x, (6,))) == "computed already"
    assert ps.explain(x + 1).startswith("1. ")


def test_auto_leaves_values_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Device.over(DRIVERS[kind]()) for kind in ("host-far", "host")]
    auto = AutoDevice(members)
    fetched = watched(members[0], monkeypatch)
    given = x, v, ids = arrays(300)
    tensors = [ps.asarray(x, device=auto), ps.asarray(v, device=auto), ps.asarray(ids, device=auto)]
    assert auto.holder(tensors[0]._node.value) is members[0]
    for name in ("row", "item", "block", "embedding"):  # small results of what is large
        compute, expected = OPERATIONS[name]
        assert ps.explain(compute(*tensors)).startswith("on host-far, which holds the inputs:\n1. ")
        result = compute(*tensors).realize()
        assert not fetched, name
        np.testing.assert_array_equal(result.numpy(), expected(*given))
        fetched.clear()
    auto.close()
