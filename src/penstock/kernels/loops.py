"""The loop form: what a kernel does, in the fewest kinds of statement. Renderers print it in a language.

Names are plain identifiers. Indices are texts of whole-number arithmetic, which reads the same in every
language. A value has a dtype and lanes: 1, or the width of a vector on devices whose threads have vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Type:
    """What a value is. Values of half precision are computed in float32, so dtype is never a half."""

    dtype: str
    lanes: int = 1


@dataclass(frozen=True)
class Let:
    """`name` is a primitive operation on names. The inputs have the type `of`, except truth values."""

    name: str
    type: Type
    operation: str
    inputs: tuple[str, ...]
    of: Type


@dataclass(frozen=True)
class Count:
    """`name` is a whole number, given by its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Splat:
    """`name` is a vector with one number in every lane, plus `step` for each lane."""

    name: str
    type: Type
    value: str
    step: int = 0


@dataclass(frozen=True)
class Load:
    """`name` is read from a buffer that stores `stored`; lanes lie `step` items apart."""

    name: str
    type: Type
    buffer: str
    stored: str
    index: str
    step: int


@dataclass(frozen=True)
class Store:
    """A value goes into a buffer that stores `stored`; lanes lie side by side."""

    value: str
    type: Type
    buffer: str
    stored: str
    index: str


@dataclass(frozen=True)
class Choose:
    """`name` is one of two values, by a truth value that all lanes share."""

    name: str
    type: Type
    condition: str
    yes: str
    no: str


@dataclass(frozen=True)
class Random:
    """`name` is the word of random bits with this number, by a state of four words."""

    name: str
    type: Type
    state: tuple[str, ...]
    index: str


@dataclass(frozen=True)
class Array:
    """Memory of a work-group, and so of one thread where a group has one."""

    name: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Variable:
    """`name` starts as the neutral element of a reduction and changes."""

    name: str
    type: Type
    operation: str


@dataclass(frozen=True)
class Update:
    """A variable takes in one more value of a reduction."""

    target: str
    type: Type
    operation: str
    value: str


@dataclass(frozen=True)
class Fold:
    """`name` is the reduction of a variable's lanes, and of all threads of the group where it has many."""

    name: str
    type: Type  # of the variable
    operation: str
    variable: str
    array: str | None  # memory with an item for each thread; None where the group has one thread


@dataclass(frozen=True)
class Loop:
    """A variable from `start` to before `stop`, in steps."""

    name: str
    start: str
    stop: str
    step: str
    body: list[Statement]


Statement = Let | Count | Splat | Load | Store | Choose | Random | Variable | Update | Fold | Loop


@dataclass
class LoopForm:
    """A kernel before it is printed."""

    outputs: list[str] = field(default_factory=list)  # stored dtypes, of buffers out0, out1, ...
    inputs: list[str] = field(default_factory=list)  # stored dtypes, of buffers in0, in1, ...
    scalars: list[str] = field(default_factory=list)  # dtypes, of c0, c1, ...
    arrays: list[Array] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    grid: tuple[int, ...] = (1,)
    group: tuple[int, ...] = (1,)
