"""The extensions `linalg` and `fft` of the standard: values against NumPy, gradients against differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, surface
from differences import check_gradients

import penstock as ps
from penstock import Device

pytestmark = surface
Function = Callable[..., Any]


@pytest.fixture(scope="module", params=[kind for kind in DRIVERS if kind != "opencl-device"])
def on(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device.over(DRIVERS[request.param](), SMALL)
    yield device
    device.close()


def array(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


SQUARE = array(2, 3, 3, dtype="float64") + 2 * np.eye(3)
SYMMETRIC = SQUARE @ SQUARE.swapaxes(-1, -2) + np.eye(3)
TALL, FLAT = array(2, 4, 3, dtype="float64"), array(3, 4, dtype="float64")
RIGHT = array(2, 3, 2, seed=5, dtype="float64")
LINALG: dict[str, tuple[Function, Function, tuple[np.ndarray, ...]]] = {
    "inv": (ps.linalg.inv, np.linalg.inv, (SQUARE,)),
    "solve": (ps.linalg.solve, np.linalg.solve, (SQUARE, RIGHT)),
    "solve a vector": (ps.linalg.solve, lambda a, b: np.linalg.solve(a, b), (SQUARE[0], RIGHT[0, :, 0])),
    "det": (ps.linalg.det, np.linalg.det, (SQUARE,)),
    "det of singular": (ps.linalg.det, np.linalg.det, (np.ones((2, 2)),)),
    "slogdet": (lambda x: ps.linalg.slogdet(x).logabsdet, lambda a: np.linalg.slogdet(a)[1], (SQUARE,)),
    "cholesky": (lambda x: ps.linalg.cholesky((x + x.mT) / 2), np.linalg.cholesky, (SYMMETRIC,)),
    "eigvalsh": (lambda x: ps.linalg.eigvalsh((x + x.mT) / 2), np.linalg.eigvalsh, (SYMMETRIC,)),
    "svdvals": (ps.linalg.svdvals, np.linalg.svdvals, (TALL,)),
    "pinv": (ps.linalg.pinv, np.linalg.pinv, (TALL,)),
    "pinv of flat": (ps.linalg.pinv, np.linalg.pinv, (FLAT,)),
    "matrix_power": (
        lambda x: ps.linalg.matrix_power(x, -3),
        lambda a: np.linalg.matrix_power(a, -3),
        (SQUARE,),
    ),
    "nuc": (
        lambda x: ps.linalg.matrix_norm(x, ord="nuc"),
        lambda a: np.linalg.matrix_norm(a, ord="nuc"),
        (TALL,),
    ),
    "norm 2": (lambda x: ps.linalg.matrix_norm(x, ord=2), lambda a: np.linalg.matrix_norm(a, ord=2), (TALL,)),
    "norm 1": (lambda x: ps.linalg.matrix_norm(x, ord=1), lambda a: np.linalg.matrix_norm(a, ord=1), (TALL,)),
    "vector_norm": (
        lambda x: ps.linalg.vector_norm(x, axis=1, ord=3),
        lambda a: np.linalg.vector_norm(a, axis=1, ord=3),
        (TALL,),
    ),
    "vector_norm by dim": (
        lambda x: ps.linalg.vector_norm(x, 3, dim=1, keepdim=True),
        lambda a: np.linalg.vector_norm(a, axis=1, ord=3, keepdims=True),
        (TALL,),
    ),
    "matrix_norm by dim": (
        lambda x: ps.linalg.matrix_norm(x, 1, dim=(0, 2)),
        lambda a: np.linalg.norm(a, ord=1, axis=(0, 2)),
        (SQUARE,),
    ),
    "diagonal by dim": (
        lambda x: ps.linalg.diagonal(x, offset=1, dim1=0, dim2=2),
        lambda a: np.diagonal(a, 1, 0, 2),
        (SQUARE,),
    ),
    "cross": (
        lambda x, y: ps.linalg.cross(x, y, axis=1),
        lambda a, b: np.linalg.cross(a, b, axis=1),
        (RIGHT, RIGHT[::-1]),
    ),
    "trace": (lambda x: ps.linalg.trace(x, offset=1), lambda a: np.linalg.trace(a, offset=1), (SQUARE,)),
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra(name: str) -> None:
    function, reference, arrays = LINALG[name]
    result = function(*(ps.asarray(array, device="host") for array in arrays))
    np.testing.assert_allclose(result.numpy(), reference(*arrays), rtol=1e-10, atol=1e-10)
    check_gradients(function, *arrays, tolerance=1e-5)


@pytest.mark.parametrize("matrix", [TALL, FLAT, SQUARE], ids=["tall", "flat", "square"])
def test_decompositions(matrix: np.ndarray) -> None:
    x = ps.asarray(matrix, device="host")
    u, s, vh = ps.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose((u @ (s[..., None] * vh)).numpy(), matrix, atol=1e-10)
    q, r = ps.linalg.qr(x)
    np.testing.assert_allclose((q @ r).numpy(), matrix, atol=1e-10)
    assert ps.linalg.svd(x).U.shape == np.linalg.svd(matrix).U.shape
    assert ps.linalg.qr(x, mode="complete").Q.shape == np.linalg.qr(matrix, "complete").Q.shape
    # The sign of a column is free, so only what does not depend on it has a slope.
    check_gradients(lambda x: ps.linalg.svd(x, full_matrices=False).U ** 2, matrix, tolerance=1e-4)
    check_gradients(lambda x: ps.linalg.svd(x, full_matrices=False).Vh ** 2, matrix, tolerance=1e-4)
    check_gradients(lambda x: ps.linalg.qr(x), matrix, tolerance=1e-4)


def test_eigenvectors() -> None:
    values, vectors = ps.linalg.eigh(ps.asarray(SYMMETRIC, device="host"))
    np.testing.assert_allclose((SYMMETRIC @ vectors.numpy()), (vectors * values[:, None]).numpy(), atol=1e-9)
    check_gradients(lambda x: ps.linalg.eigh((x + x.mT) / 2).eigenvectors ** 2, SYMMETRIC, tolerance=1e-4)


def test_decompositions_run_inside_jit_on_every_device(on: Device) -> None:
    x = ps.asarray(SYMMETRIC.astype(np.float32), device=on).requires_grad_()

    @ps.jit
    def step(scale: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        loss = ps.linalg.slogdet(x * scale).logabsdet.sum() + ps.linalg.inv(x).sum()
        return loss, ps.linalg.eigvalsh(x)

    loss, values = step(ps.tensor(2.0, device=on))
    wanted = np.linalg.slogdet(2 * SYMMETRIC)[1].sum() + np.linalg.inv(SYMMETRIC).sum()
    assert loss.item() == pytest.approx(wanted, rel=1e-4)
    np.testing.assert_allclose(values.numpy(), np.linalg.eigvalsh(SYMMETRIC), rtol=1e-4)
    loss.backward()
    assert x.grad is not None
    inverse = np.linalg.inv(SYMMETRIC).swapaxes(-1, -2)
    np.testing.assert_allclose(
        x.grad.numpy(),
        inverse - inverse.sum(-1, keepdims=True) * inverse.sum(-2, keepdims=True),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", [name for name in ps.fft.__all__ if not name.endswith(("shift", "freq"))])
@pytest.mark.parametrize("norm", ["backward", "ortho"])
def test_fourier_transforms(on: Device, name: str, norm: str) -> None:
    a = array(4, 6)
    if name in ("fft", "ifft", "fftn", "ifftn", "irfft", "irfftn", "hfft"):
        a = a + 1j * array(4, 6, seed=1)
    x = ps.asarray(a.astype(np.complex64) if np.iscomplexobj(a) else a, device=on)
    result = getattr(ps.fft, name)(x, norm=norm)
    expected = getattr(np.fft, name)(a, norm=norm)
    assert result.dtype in (ps.complex64, ps.float32)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_fourier_transforms_in_the_words_of_pytorch() -> None:
    a = array(3, 4, 5)
    x = ps.asarray(a)
    np.testing.assert_allclose(ps.fft.fft(x, 6, dim=1).numpy(), np.fft.fft(a, 6, 1), rtol=1e-4, atol=1e-4)
    result = ps.fft.rfftn(x, dim=(0, 1), norm=None).numpy()
    np.testing.assert_allclose(result, np.fft.rfftn(a, axes=(0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ps.fft.fftshift(x, dim=1).numpy(), np.fft.fftshift(a, 1))
    whole = np.arange(4)
    np.testing.assert_allclose(ps.fft.fft(ps.asarray(whole)).numpy(), np.fft.fft(whole), atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (0, 0)])
def test_decompositions_of_nothing(shape: tuple[int, ...]) -> None:
    for full in (True, False):
        result = ps.linalg.svd(ps.zeros(shape), full_matrices=full)
        wanted = np.linalg.svd(np.zeros(shape), full_matrices=full)
        assert [part.numpy().shape for part in result] == [part.shape for part in wanted]


def test_frequencies_and_shifts() -> None:
    assert ps.fft.fftfreq(5, d=0.5).tolist() == np.fft.fftfreq(5, 0.5).astype("f").tolist()
    assert ps.fft.rfftfreq(6).tolist() == np.fft.rfftfreq(6).astype("f").tolist()
    a = array(3, 4)
    x = ps.asarray(a)
    assert ps.fft.fftshift(x).tolist() == np.fft.fftshift(a).tolist()
    assert ps.fft.ifftshift(ps.fft.fftshift(x, axes=1), axes=1).tolist() == a.tolist()
    with pytest.raises(TypeError, match="no gradient passes complex numbers"):
        ps.fft.rfft(x.requires_grad_())
