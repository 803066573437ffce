"""The kinds of group, each with its traits: fusion and lowering ask for these, never for a kind by name."""

from __future__ import annotations

from enum import StrEnum


class GroupKind(StrEnum):
    """What the nodes of a group have in common; how each kind is lowered is in `kernels/lower.py`."""

    fuses: bool  # elementwise nodes may join it, and it may be divided where it takes too many buffers
    has_loops: bool  # its kernel is loops over items, which may run beside other kernels in one launch
    keeps_items: bool  # each item is at hand for what is computed from it, not only reductions of items
    is_map: bool  # it has no reduction, so it may be recomputed where its values are needed
    reads_whole: bool  # its one kernel takes the inputs of its nodes as they lie in memory, not through views
    has_varied_kernel: bool  # where a kernel is to serve many sizes, another one is built

    def __new__(cls, name: str, *traits: str) -> GroupKind:
        """A kind with the traits that are named."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        assert cls.__annotations__.keys() >= set(traits), traits
        for trait in cls.__annotations__:
            setattr(kind, trait, trait in traits)
        return kind

    @property
    def has_rows(self) -> bool:
        """Whether it goes over all items in order, so that rows of any length can be reduced on the way."""
        return self.has_loops and self.keeps_items

    @property
    def has_columns(self) -> bool:
        """Whether it only keeps reductions of items that it goes over."""
        return self.has_loops and not self.keeps_items

    # Every item by itself.
    MAP = "map", "fuses", "has_loops", "keeps_items", "is_map"
    # Elementwise work and reductions over the trailing axes: row after row is read, reduced and written.
    ROW = "row", "fuses", "has_loops", "keeps_items"
    # Reductions over other axes, and what is computed from their results.
    COLUMN = "column", "fuses", "has_loops"
    # A matrix product, and what is done to each of its items.
    MATMUL = "matmul", "fuses", "keeps_items", "has_varied_kernel"
    # What kernels of attention compute together.
    ATTENTION = ("attention",)
    # What a kernel of the user's own computes.
    RAW = "raw", "reads_whole"
    # One node by itself, computed by a template or by NumPy.
    SINGLE = "single", "reads_whole"
