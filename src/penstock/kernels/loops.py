"""The loop form: what a kernel does, in the fewest kinds of statement. Renderers print it in a language.

Names are plain identifiers. Indices are texts of whole-number arithmetic, which reads the same in every
language. A value has a dtype and lanes: 1, or the width of a vector on devices whose threads have vectors, or
the items that a thread of a GPU computes side by side.
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
class Truth:
    """`name` is whether a comparison of whole numbers holds. Conditions are such names and comparisons."""

    name: str
    text: str


@dataclass(frozen=True)
class Pick:
    """`name` is one of two whole numbers, given by their texts."""

    name: str
    condition: str
    yes: str
    no: str


@dataclass(frozen=True)
class Clip:
    """`name` is a value as a whole number from 0 to before `length`: the nearest, if it is none of them."""

    name: str
    value: str
    dtype: str
    length: int


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
    aligned: int = 1  # items; the index is a multiple of it
    condition: str = ""  # where it does not hold, nothing is read, and the value is 0


@dataclass(frozen=True)
class Store:
    """A value goes into a buffer that stores `stored`; lanes lie side by side."""

    value: str
    type: Type
    buffer: str
    stored: str
    index: str
    aligned: int = 1  # items; the index is a multiple of it


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
    step: int = 0  # of the number from lane to lane


@dataclass(frozen=True)
class Array:
    """Memory of a work-group, and so of one thread where a group has one."""

    name: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Registers:
    """An array of one thread, which is in registers where every index is a constant in the end."""

    name: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Forget:
    """The compiler is to know no longer what is in registers, or it keeps all that was computed from them."""

    name: str
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
    first: str = ""  # the first lane of the target that takes one, where it has more of them than the value


@dataclass(frozen=True)
class Fold:
    """`name` is the reduction of a variable's lanes, and of the neighbouring threads that share a row."""

    name: str
    type: Type  # of the variable
    operation: str
    variable: str
    array: str | None  # memory with an item for each thread of the group; None where a row has one thread
    threads: int = 1


@dataclass(frozen=True)
class Across:
    """A variable takes in those of the threads `stride`, 2 * `stride` ... after this one, lane by lane.

    Only the first `stride` threads of the group have the result.
    """

    target: str
    type: Type
    operation: str
    array: str  # memory with an item for each lane of each thread
    stride: int
    threads: int  # of the group


@dataclass(frozen=True)
class Loop:
    """A variable from `start` to before `stop`, in steps."""

    name: str
    start: str
    stop: str
    step: str
    body: list[Statement]
    unrolled: int = 0  # times that the body is laid out; 0 leaves it to the compiler
    turns: int = 1  # of a loop that reduces: how often its body is run, at most


@dataclass(frozen=True)
class When:
    """Statements under a condition."""

    condition: str
    body: list[Statement]


@dataclass(frozen=True)
class Barrier:
    """No thread of the group goes on before all have come here."""

    device_memory: bool = False  # whether that orders what they read and write there, too


Statement = (
    Let
    | Count
    | Truth
    | Pick
    | Clip
    | Splat
    | Load
    | Store
    | Choose
    | Random
    | Registers
    | Forget
    | Variable
    | Update
    | Fold
    | Across
    | Loop
    | When
    | Barrier
)


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
    vectors: bool = True  # whether lanes are those of vectors; else each is computed by itself
    resident: int = 1  # groups that a unit of a GPU should have room for at a time
    quick: bool = False  # whether functions may be as exact as halves only, with some digits to spare
