"""Formats of bytes, times, rates and other values for display."""

from __future__ import annotations

import math

_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
UNKNOWN = "\N{EN DASH}"


def format_bytes(nbytes: float) -> str:
    """`0 B`, `1.5 KiB`, `2.0 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for a time: its seconds and its name."""
    return next((unit for unit in _TIME_UNITS if seconds >= unit[0]), _TIME_UNITS[-1])


def format_seconds(seconds: float | None) -> str:
    """`1.25 s`, `312 ms`, `4.1 µs`; empty if the time is unknown."""
    if seconds is None:
        return ""
    length, unit = time_unit(seconds)
    return f"{_short(seconds / length)} {unit}"


def format_duration(seconds: float) -> str:
    """`12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes, rest = _clock(seconds)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def format_clock(seconds: float) -> str:
    """`0:12`, `4:05`, `2:07:00`."""
    hours, minutes, rest = _clock(seconds)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _clock(seconds: float) -> tuple[int, int, int]:
    minutes, rest = divmod(round(seconds), 60)
    return *divmod(minutes, 60), rest


def format_bandwidth(bytes_per_second: float) -> str:
    """`52.9 GB/s`."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def format_flops(operations_per_second: float) -> str:
    """`220.1 GFLOP/s`."""
    return f"{operations_per_second / 1e9:.4g} GFLOP/s"


def format_rate(giga_per_second: float | None) -> str:
    """A value in a column of GFLOP/s or GB/s; empty if it is unknown."""
    return _short(giga_per_second) if giga_per_second else ""


def format_share(share: float) -> str:
    """A share in percent; a small share with another digit."""
    if abs(share) < 5e-4:
        return "0%"
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def format_number(value: float) -> str:
    """Three digits, or all before the point: `0.125`, `12,345`, `1.5e-05`."""
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e9:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_digits(value: float) -> str:
    """Three digits, even if they are zeros, so that the values of a column look alike: `1.50`, `12.0`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def counted(count: int, noun: str) -> str:
    """`1 kernel`, `2,000 kernels`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
