"""The operators that the modules of functions give to tensors, for type checkers: see `operators.pyi`."""


class Operators:
    """The operators of tensors; `install` adds them."""

    __slots__ = ()
