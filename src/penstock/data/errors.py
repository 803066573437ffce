"""The exception of data."""

from __future__ import annotations

from penstock.errors import PenstockError


class DataError(PenstockError, ValueError):
    """Text, tokens or batches cannot be had from what was given; or a file of them cannot be written.

    >>> try:
    ...     ps.data.Loader([], batch=1)
    ... except ps.data.DataError as error:
    ...     print(error)
    a dataset of 0 samples has no batch of 1
    """
