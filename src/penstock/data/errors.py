"""The exception of data."""

from __future__ import annotations

from penstock.errors import PenstockError


class DataError(PenstockError, ValueError):
    """Text, tokens or batches cannot be had from what was given; or a file of them cannot be written."""
