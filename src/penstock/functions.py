"""The functions that the table in `penstock.names` gives; for type checkers see `functions.pyi`."""

from penstock import names

globals().update(names.FUNCTIONS)
__all__ = [*names.FUNCTIONS]
