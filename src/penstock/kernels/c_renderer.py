"""The loop form in C, as OpenCL and CUDA take it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels.c_expressions import c_type, combine, expression, neutral
from penstock.kernels.c_threads import thread_statements, whole_number
from penstock.kernels.loops import (
    Choose,
    Clip,
    Count,
    Fold,
    Let,
    Load,
    Loop,
    LoopForm,
    Pick,
    Random,
    Splat,
    Statement,
    Store,
    Truth,
    Type,
    Update,
    Variable,
)
from penstock.kernels.source import C_TYPES, KernelSource, declared, head


def render(form: LoopForm, name: str) -> KernelSource:
    """The text of a kernel."""
    outputs = [(dtype, f"out{k}") for k, dtype in enumerate(form.outputs)]
    inputs = [(dtype, f"in{k}") for k, dtype in enumerate(form.inputs)]
    scalars = [(dtype, f"c{k}") for k, dtype in enumerate(form.scalars)]
    # Memory of a group has to be named before anything else.
    arrays = tuple((one.dtype, one.name, one.length) for one in form.arrays)
    opening, *places = head(name, outputs, inputs, scalars).rstrip().split("\n")
    body = statements(form.body, 1) if form.vectors else thread_statements(form.body, form.quick)
    lines = [opening, *(declared(*one) for one in arrays), *places, *body, "}"]
    buffers = (*form.outputs, *form.inputs)
    stored = tuple("uint8" if dtype == "bool" else dtype for dtype in form.scalars)
    return KernelSource(
        name, "\n".join(lines) + "\n", buffers, stored, form.grid, form.group, arrays, form.resident
    )


def statements(body: Sequence[Statement], depth: int) -> list[str]:
    """The lines of statements on single values and vectors, set in by `depth` steps."""
    lines: list[str] = []
    for one in body:
        lines += ["    " * depth + line for line in _lines(one)]
    return lines


def _lines(one: Statement) -> list[str]:
    match one:
        case Count() | Truth() | Pick() | Clip():
            return [whole_number(one)]
        case Let():
            text = expression(one.operation, one.type, one.of, one.inputs)
            assert text is not None, one
            return [f"{c_type(one.type)} {one.name} = {text};"]
        case Splat():
            return [f"{c_type(one.type)} {one.name} = {_splat(one)};"]
        case Choose():
            return [f"{c_type(one.type)} {one.name} = {one.condition} ? {one.yes} : {one.no};"]
        case Random():
            block = f"((((ulong){one.state[3]} << 32) | {one.state[2]}) + (ulong)({one.index} / 4))"
            words = f"{one.state[0]}, {one.state[1]}, (uint){block}, (uint)({block} >> 32)"
            return [f"uint {one.name} = philox({words}, {one.index} % 4);"]
        case Load():
            return [f"{c_type(one.type)} {one.name} = {_load(one)};"]
        case Store():
            return [_store(one)]
        case Variable():
            return [f"{c_type(one.type)} {one.name} = {neutral(one.operation, one.type)};"]
        case Update():
            return [f"{one.target} = {combine(one.operation, one.type, one.target, one.value)};"]
        case Fold():
            return _fold(one)
        case Loop():
            opening = (
                f"for (int {one.name} = {one.start}; {one.name} < {one.stop}; {one.name} += {one.step}) {{"
            )
            return [opening, *statements(one.body, 1), "}"]
        case _:
            raise AssertionError(f"{one} is for the threads of a GPU")


def _splat(one: Splat) -> str:
    if one.type.lanes == 1:
        return one.value
    value = f"-({one.value})" if one.type.dtype == "bool" else one.value
    whole = f"({c_type(one.type)})({value})"
    if not one.step:
        return whole
    return f"{whole} + ({c_type(one.type)})({', '.join(str(k * one.step) for k in range(one.type.lanes))})"


def _load(one: Load) -> str:
    lanes = one.type.lanes
    if lanes > 1 and one.step != 1:
        items = [f"{_item(one, f'{one.index} + {k * one.step}')}" for k in range(lanes)]
        return f"({c_type(one.type)})({', '.join(items)})"
    if lanes == 1:
        return _item(one, one.index)
    if one.stored == "float16":
        return (
            f"from_halves_{lanes}(*({_space(one.buffer)} loose_ushort{lanes} *)({one.buffer} + {one.index}))"
        )
    value = f"*({_space(one.buffer)} loose_{C_TYPES[one.stored]}{lanes} *)({one.buffer} + {one.index})"
    if one.stored == "bfloat16":
        return f"FROM_BFLOAT16_{lanes}({value})"
    return f"(__builtin_convertvector({value}, int{lanes}) != 0)" if one.type.dtype == "bool" else value


def _item(one: Load, index: str) -> str:
    if one.stored == "float16":
        return f"vload_half({index}, {one.buffer})"
    value = f"{one.buffer}[{index}]"
    if one.stored == "bfloat16":
        return f"FROM_BFLOAT16({value})"
    return f"-({value} != 0)" if one.type.dtype == "bool" and one.type.lanes > 1 else value


def _store(one: Store) -> str:
    lanes = one.type.lanes
    if one.stored == "float16":
        return (
            f"vstore_half({one.value}, {one.index}, {one.buffer});"
            if lanes == 1
            else f"*({_space(one.buffer)} loose_ushort{lanes} *)({one.buffer} + {one.index}) "
            f"= to_halves_{lanes}({one.value});"
        )
    value = one.value
    if one.stored == "bfloat16":
        value = f"TO_BFLOAT16({value})" if lanes == 1 else f"TO_BFLOAT16_{lanes}({value})"
    if lanes == 1:
        return f"{one.buffer}[{one.index}] = {value};"
    if one.type.dtype == "bool":
        value = f"__builtin_convertvector({value} & 1, uchar{lanes})"
    target = f"*({_space(one.buffer)} loose_{C_TYPES[one.stored]}{lanes} *)({one.buffer} + {one.index})"
    return f"{target} = {value};"


def _space(buffer: str) -> str:
    """Where a buffer lies: the kernel's parameters are global, arrays are the group's."""
    return "GLOBAL" if buffer.startswith(("in", "out")) else "LOCAL"


def _fold(one: Fold) -> list[str]:
    scalar = Type(one.type.dtype)
    name, lanes, value = one.name, one.type.lanes, one.variable
    lines = []
    while lanes > 1:
        lanes //= 2
        half = Type(one.type.dtype, lanes)
        parts = (f"{value}.lo", f"{value}.hi")
        value = f"{name}_{lanes}"
        lines.append(f"{c_type(half)} {value} = {combine(one.operation, half, *parts)};")
    if one.type.lanes > 1 and one.type.dtype == "bool":
        value = f"({value} & 1)"
    return [*lines, f"{c_type(scalar)} {name} = {value};"]
