"""Fourier transforms. The last axis has the real part, or the real and the imaginary part."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.registry import Call, operator


@operator("DFT", since=20, host=(1, 2))
def dft(call: Call, x: ps.Tensor, length: Any = None, axis: Any = None) -> ps.Tensor:
    """The Fourier transform along an axis, or its inverse."""
    return _dft(call, x, length, -2 if axis is None else int(axis.item()))


@operator("DFT", since=17, host=(1,))
def dft_by_attribute(call: Call, x: ps.Tensor, length: Any = None) -> ps.Tensor:
    """The same, with an axis that is an attribute, before opset 20."""
    return _dft(call, x, length, call.get("axis", 1))


def _dft(call: Call, x: ps.Tensor, length: Any, axis: int) -> ps.Tensor:
    axis = axis % x.ndim
    count = None if length is None else int(length.item())
    inverse, onesided = call.get("inverse", 0), call.get("onesided", 0)
    if inverse and onesided:
        return ps.expand_dims(ps.fft.irfft(_complex(x), n=count, axis=axis), axis=-1)
    if onesided:
        return _parts(ps.fft.rfft(x[..., 0], n=count, axis=axis), x.dtype)
    function = ps.fft.ifft if inverse else ps.fft.fft
    return _parts(function(_complex(x), n=count, axis=axis), x.dtype)


def _complex(x: ps.Tensor) -> ps.Tensor:
    dtype = ps.complex128 if x.dtype == ps.float64 else ps.complex64
    real = ps.astype(x[..., 0], dtype)
    return real if x.shape[-1] == 1 else real + ps.astype(x[..., 1], dtype) * 1j


def _parts(x: ps.Tensor, dtype: Any) -> ps.Tensor:
    return ps.astype(ps.stack([ps.real(x), ps.imag(x)], axis=-1), dtype)


@operator("STFT", since=17, host=(1, 3))
def stft(
    call: Call, x: ps.Tensor, step: Any, window: ps.Tensor | None = None, length: Any = None
) -> ps.Tensor:
    """The Fourier transforms of pieces of a signal, one beginning a step after the other."""
    if window is None and length is None:
        raise call.refuse("neither a window nor a length", "give either")
    size = int(length.item()) if window is None else window.shape[0]
    hop = int(step.item())
    count = (x.shape[1] - size) // hop + 1
    places = np.arange(count)[:, None] * hop + np.arange(size)
    frames = ps.take(x, call.tensor(places.reshape(-1)), axis=1)
    frames = ps.reshape(frames, (x.shape[0], count, size, x.shape[2]))
    if window is not None:
        frames = frames * window[:, None]
    if call.get("onesided", 1):
        return _parts(ps.fft.rfft(frames[..., 0], axis=2), x.dtype)
    return _parts(ps.fft.fft(_complex(frames), axis=2), x.dtype)
