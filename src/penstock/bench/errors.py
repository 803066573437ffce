"""The exception of benchmarks."""

from __future__ import annotations

from penstock.errors import PenstockError


class BenchmarkError(PenstockError, ValueError):
    """A benchmark cannot be run or compared as requested."""
