"""Rotary position embeddings: a rotation of queries and keys by their position, with all usual scalings.

The frequencies are computed here once, in float64; two scalings depend on the length of a sequence, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import CheckpointError
from penstock.models.settings import Settings
from penstock.tensor.arithmetic import cos, exp, log, maximum, sin, where
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.dtypes import float32
from penstock.tensor.manipulation import astype, concat, reshape

Frequencies = tuple[float, ...]
_Scaling = Callable[["Rotary", float, Settings], "Rotary"]


@dataclass(frozen=True)
class Rotary:
    """The frequencies of a rotary embedding, for each pair of items of a head."""

    frequencies: Frequencies
    context: int  # the positions that it is made for
    amplitude: float = 1.0  # of both sine and cosine
    # Sequences that are longer than `length` have other frequencies.
    length: int = 0
    longer: Frequencies = ()  # of longrope
    growth: float = 0.0  # of dynamic scaling: its factor

    def angles(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The cosine and sine of each position, of shape (batch, 1, length, half of a head).

        `positions` and `lengths`, of the whole sequence when a position is computed, are (batch, length).
        """
        batch, count = positions.shape
        half = len(self.frequencies)
        frequencies = reshape(self._row(self.frequencies, positions), (1, 1, half))
        lengths = reshape(astype(lengths, float32), (batch, count, 1))
        if self.longer:
            longer = reshape(self._row(self.longer, positions), (1, 1, half))
            frequencies = where(lengths > float(self.length), longer, frequencies)
        elif self.growth:
            grown = maximum(lengths * (self.growth / self.length) - (self.growth - 1), 1.0)
            powers = tuple(-2 * k / (2 * half - 2) for k in range(half))
            frequencies = frequencies * exp(log(grown) * reshape(self._row(powers, positions), (1, 1, half)))
        each = reshape(frequencies, (frequencies.shape[0], 1, frequencies.shape[1], half))
        angles = reshape(astype(positions, float32), (batch, 1, count, 1)) * each
        return cos(angles) * self.amplitude, sin(angles) * self.amplitude

    @staticmethod
    def _row(values: Frequencies, like: Tensor) -> Tensor:
        return from_numpy(np.array(values, np.float32), like.device)


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads of shape (batch, heads, length, head size), each pair of whose items is turned by its angle."""
    cosine, sine = angles
    half = x.shape[-1] // 2
    first, second = (astype(part, float32) for part in (x[..., :half], x[..., half:]))
    turned = concat([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return astype(turned, x.dtype)


def rotary_of(
    settings: Settings, head_size: int, context: int, kind: str = "", usual: float = 10000.0
) -> Rotary:
    """The rotary embedding of a configuration; `kind`: that of these layers, where they differ.

    `usual` is the base where the configuration has none.

    Version 5 of transformers has all of it in `rope_parameters`, older ones in `rope_theta` and
    `rope_scaling`.
    """
    scaling = _scaling_of(settings, kind)
    base = scaling.positive("rope_theta", settings.positive("rope_theta", usual))
    name = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if name not in _SCALINGS:
        raise scaling.error("rope_type", f"one of {', '.join(_SCALINGS)}")
    if head_size % 2:
        raise CheckpointError(f"{settings.where}: a head of {head_size} items cannot be rotated in pairs")
    settings.fixed(partial_rotary_factor=1.0)
    scaling.fixed(partial_rotary_factor=1.0)
    return _SCALINGS[name](plain(base, head_size, context), base, scaling)


def _scaling_of(settings: Settings, kind: str) -> Settings:
    """The part of a configuration that says how rotary embeddings are scaled."""
    new, old = settings.part("rope_parameters"), settings.part("rope_scaling")
    if kind and new.has(kind):
        return new.part(kind)
    if new.values and not old.values.items() <= new.values.items():
        raise CheckpointError(
            f"{settings.where} has rope_scaling and rope_parameters, which say other things"
        )
    scaling, length = new if new.values else old, "original_max_position_embeddings"
    if not settings.has(length):
        return scaling
    return Settings({**scaling.values, length: settings.values[length]}, scaling.where)


def plain(base: float, head_size: int, context: int) -> Rotary:
    """A rotary embedding without scaling."""
    return Rotary(tuple(base ** (-2 * k / head_size) for k in range(head_size // 2)), context)


def _linear(rotary: Rotary, base: float, scaling: Settings) -> Rotary:
    factor = scaling.positive("factor")
    frequencies = tuple(frequency / factor for frequency in rotary.frequencies)
    return replace(rotary, frequencies=frequencies, context=int(rotary.context * factor))


def _dynamic(rotary: Rotary, base: float, scaling: Settings) -> Rotary:
    factor = scaling.positive("factor")
    return replace(rotary, length=rotary.context, growth=factor, context=int(rotary.context * factor))


def _yarn(rotary: Rotary, base: float, scaling: Settings) -> Rotary:
    """High frequencies stay, low ones are divided, and those between are blended."""
    size = 2 * len(rotary.frequencies)
    length = scaling.integer("original_max_position_embeddings", rotary.context)
    factor = scaling.positive("factor", rotary.context / length)

    def turning(times: float) -> float:
        """The pair that turns so many times along the original context."""
        return size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = turning(scaling.positive("beta_fast", 32.0)), turning(scaling.positive("beta_slow", 1.0))
    if scaling.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = (high - low) or 0.001
    blended = []
    for pair, frequency in enumerate(rotary.frequencies):
        divided = min(max((pair - low) / width, 0.0), 1.0)
        blended.append(frequency / factor * divided + frequency * (1 - divided))
    amplitude = scaling.optional_number("attention_factor")
    if amplitude is None:
        above, below = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
        if not (above and below):  # one of them alone says nothing, as in transformers
            above, below = 1.0, 0.0
        amplitude = _magnitude(factor, above) / _magnitude(factor, below)
    longest = max(rotary.context, int(length * factor))
    return replace(rotary, frequencies=tuple(blended), amplitude=amplitude, context=longest)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def _llama3(rotary: Rotary, base: float, scaling: Settings) -> Rotary:
    """Long wavelengths are divided, short ones stay, and those between are blended."""
    length = scaling.integer("original_max_position_embeddings")
    factor = scaling.positive("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.error("high_freq_factor", "more than low_freq_factor")
    blended = []
    for frequency in rotary.frequencies:
        turns = length * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        blended.append(frequency / factor * (1 - kept) + frequency * kept)
    return replace(rotary, frequencies=tuple(blended))


def _longrope(rotary: Rotary, base: float, scaling: Settings) -> Rotary:
    """Factors of each pair, others for sequences that are longer than the original context."""
    half = len(rotary.frequencies)
    length = scaling.integer("original_max_position_embeddings", rotary.context)
    factor = scaling.positive("factor", rotary.context / length)
    amplitude = scaling.optional_number("attention_factor")
    if amplitude is None:
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    short, long = (
        tuple(
            frequency / divisor
            for frequency, divisor in zip(rotary.frequencies, scaling.numbers(name, half), strict=True)
        )
        for name in ("short_factor", "long_factor")
    )
    return Rotary(short, rotary.context, amplitude, length, long)


_SCALINGS: dict[str, _Scaling] = {
    "default": lambda rotary, base, scaling: rotary,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # its name in older configurations
}
