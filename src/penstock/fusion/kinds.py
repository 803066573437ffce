"""The kinds of group with their traits: fusion and lowering ask for traits, never for a kind by name."""

from __future__ import annotations

from enum import StrEnum


class GroupKind(StrEnum):
    """What the nodes of a group have in common; how each kind is lowered is in `kernels/lower.py`."""

    fuses: bool  # elementwise nodes may join it, and it may be split if it needs too many buffers
    has_loops: bool  # its kernel consists of loops over items, and can be fused horizontally with others
    keeps_items: bool  # nodes that join it can read each item, not only reductions of items
    is_map: bool  # it has no reduction, so it may be recomputed where its values are needed
    reads_whole: bool  # its only kernel reads the inputs in their memory layout, not through views
    has_varied_kernel: bool  # a kernel that serves many sizes is built in another way

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
        """Whether its loops visit all items in order, so that they can also reduce rows of any length."""
        return self.has_loops and self.keeps_items

    @property
    def has_columns(self) -> bool:
        """Whether its loops only keep reductions of the items that they visit."""
        return self.has_loops and not self.keeps_items

    # Elementwise work.
    MAP = "map", "fuses", "has_loops", "keeps_items", "is_map", "has_varied_kernel"
    # Elementwise work and reductions over the trailing axes, row by row.
    ROW = "row", "fuses", "has_loops", "keeps_items", "has_varied_kernel"
    # Reductions over other axes, and what is computed from their results.
    COLUMN = "column", "fuses", "has_loops", "has_varied_kernel"
    # A matrix product with its epilogue.
    MATMUL = "matmul", "fuses", "keeps_items", "has_varied_kernel"
    # The outputs of a kernel of attention.
    ATTENTION = ("attention",)
    # Attention to pages, and what computes its queries, keys and values.
    PAGED = ("paged",)
    # A convolution of images with the channels last.
    CONVOLUTION = "convolution", "reads_whole"
    # The outputs of a user's kernel.
    RAW = "raw", "reads_whole"
    # A single node, computed by a template or by NumPy.
    SINGLE = "single", "reads_whole"
