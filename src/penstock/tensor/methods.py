"""The methods that tensors get from the table in `penstock.names`, for type checkers: see `methods.pyi`."""


class Methods:
    """The methods of tensors under other libraries' names; the table adds them."""

    __slots__ = ()
