"""Kernels in Penstock's form of WGSL, and their translation to modules of WGSL.

A text is ordinary WGSL, except for its entry points, which are declared as

    kernel NAME(out: array<u32>, x: array<u32>, out_place: i32, x_place: i32, c: f32) { ... }

with buffers first and scalars (`i32`, `u32`, `f32`, `i64`, `u64`) after them. The body may use `GROUP_0`,
`GROUP_1`, `GROUP_2`, `GROUPS_0` (the first axis of the grid), `THREAD` (in the flattened workgroup) and
`THREADS`, all of them `i32`, and `same_binding(out, x)`, a constant. A module is specialized for: the
workgroup size; which buffers of a launch are in the same memory (they share a binding); which memories are
larger than a binding (they take several); whether an axis of the grid is longer than WebGPU permits (then the
grid is folded into a rectangle); and whether scalars are immediates or in a uniform buffer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.drivers.webgpu.windows import end_of, window_name, windowed
from penstock.errors import CompileError

OFFSET_ALIGNMENT = 256  # bytes; the unit of offsets of buffers
_KERNEL = re.compile(r"\bkernel\s+(\w+)\s*\(")
_SAME_BINDING = re.compile(r"\bsame_binding\((\w+), (\w+)\)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# The NumPy dtype of a scalar, and its format for `struct`.
SCALARS = {
    "i32": ("int32", "i"),
    "u32": ("uint32", "I"),
    "f32": ("float32", "f"),
    "i64": ("int64", "q"),
    "u64": ("uint64", "Q"),
}
# The scalars of a folded grid, after all others: workgroups in a row, in total, and in the first two axes.
_FOLD = ("fold_width", "fold_length", "fold_0", "fold_1")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel, with its type in WGSL."""

    name: str
    type: str

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.type.startswith("array")

    @property
    def item_type(self) -> str:
        """The type of a buffer's items."""
        return _split(self.type.removeprefix("array<").removesuffix(">"))[0]


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel of a text: its parameters and body, and the text outside of all kernels."""

    name: str
    parameters: tuple[Parameter, ...]
    body: str
    around: str

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        """The parameters that are buffers."""
        return tuple(parameter for parameter in self.parameters if parameter.is_buffer)

    @property
    def scalars(self) -> tuple[Parameter, ...]:
        """The parameters that are scalars."""
        return tuple(parameter for parameter in self.parameters if not parameter.is_buffer)

    def scalar_format(self, folded: bool) -> str:
        """The format of all scalars for `struct`, including those of a folded grid."""
        return "<" + "".join(SCALARS[scalar.type][1] for scalar in self.scalars) + ("4i" if folded else "")


def parse(source: str) -> dict[str, KernelText]:
    """The kernels of a text, by name."""
    text = _COMMENT.sub("", source)
    around, kernels, end = [], {}, 0
    for match in _KERNEL.finditer(text):
        if match.start() < end:
            continue
        around.append(text[end : match.start()])
        close = _closing(text, match.end(), match[1])
        opening = text.find("{", close)
        if text[close + 1 : opening].strip() or opening < 0:
            raise CompileError(f"kernel {match[1]!r} has no body in braces after its parameters")
        end = _closing(text, opening + 1, match[1]) + 1
        kernels[match[1]] = (text[match.end() : close], text[opening + 1 : end - 1])
    around.append(text[end:])
    outside = "".join(around)
    return {
        name: KernelText(name, _parameters(name, parameters), body, outside)
        for name, (parameters, body) in kernels.items()
    }


def module_text(
    kernel: KernelText,
    group: Sequence[int],
    bindings: Sequence[int],
    folded: bool,
    uniform: bool,
    windows: Sequence[int] = (),
    window_bytes: int = 0,
) -> str:
    """A kernel as WGSL. `bindings`: for each buffer, the first buffer of the launch in the same binding.

    `windows`: if some memories are larger than `window_bytes`, how many bindings each buffer takes.
    """
    body, around = kernel.body, kernel.around
    declared: list[str] = []
    large: dict[str, tuple[str, int]] = {}
    for position, buffer in enumerate(kernel.buffers):
        if bindings[position] == position:
            count = windows[position] if windows else 1
            declared += [
                f"@group(0) @binding({len(declared) + number}) "
                f"var<storage, read_write> {window_name(buffer.name, number)}: {buffer.type};"
                for number in range(count)
            ]
            if count > 1:
                large[buffer.name] = buffer.item_type, count
        else:
            # Not after a dot, where the name is a component of a vector.
            word, same = rf"(?<![\w.]){buffer.name}\b", kernel.buffers[bindings[position]].name
            body, around = re.sub(word, same, body), re.sub(word, same, around)
    body = _SAME_BINDING.sub(lambda match: str(match[1] == match[2]).lower(), body)
    if large:
        texts, functions = windowed((body, around), large, window_bytes)
        body, around = texts
        declared.append(functions)
    fields, values = _scalars(kernel)
    if folded:
        fields += [f"_{name}: i32" for name in _FOLD]
    if fields:
        declared.append(f"struct _Scalars {{ {', '.join(fields)} }}")
        where = "@group(1) @binding(0) var<uniform>" if uniform else "var<immediate>"
        declared.append(f"{where} _scalars: _Scalars;")
    sizes = (*group, *(1,) * (3 - len(group)))
    # Only if it is used, because DX12 has no such value, and wgpu has to pass it with every dispatch.
    counted = "@builtin(num_workgroups) _groups: vec3<u32>, " if "GROUPS_0" in body and not folded else ""
    lines = [
        around,
        *declared,
        f"@compute @workgroup_size({', '.join(map(str, sizes))})",
        f"fn {kernel.name}(@builtin(workgroup_id) _group: vec3<u32>, {counted}"
        f"@builtin(local_invocation_index) _thread: u32) {{",
        *_groups(folded, bool(counted)),
        f"let THREAD = i32(_thread); let THREADS = {sizes[0] * sizes[1] * sizes[2]}i;",
        *values,
        body,
        "}",
    ]
    return "\n".join(lines)


def _scalars(kernel: KernelText) -> tuple[list[str], list[str]]:
    """The fields of the structure that holds a kernel's scalars, and the statements that read them."""
    fields, values = [], []
    for scalar in kernel.scalars:
        name = f"_{scalar.name}"
        if scalar.type in ("i64", "u64"):  # as two words, because structures of 64-bit items are not portable
            fields += [f"{name}_lo: u32", f"{name}_hi: u32"]
            # By way of u64: i64 of a u32 that is 2^31 or more comes out negative on Vulkan.
            words = f"(u64(_scalars.{name}_hi) << 32u) | u64(_scalars.{name}_lo)"
            values.append(f"let {scalar.name} = {scalar.type}({words});")
        else:
            fields.append(f"{name}: {scalar.type}")
            values.append(f"let {scalar.name} = _scalars.{name};")
    return fields, values


def _groups(folded: bool, counted: bool) -> list[str]:
    if not folded:
        return [
            "let GROUP_0 = i32(_group.x); let GROUP_1 = i32(_group.y); let GROUP_2 = i32(_group.z);",
            *(["let GROUPS_0 = i32(_groups.x);"] if counted else []),
        ]
    return [
        "let _place = i32(_group.y) * _scalars._fold_width + i32(_group.x);",
        "if (_place >= _scalars._fold_length) { return; }",
        "let GROUPS_0 = _scalars._fold_0;",
        "let GROUP_0 = _place % GROUPS_0;",
        "let GROUP_1 = _place / GROUPS_0 % _scalars._fold_1;",
        "let GROUP_2 = _place / GROUPS_0 / _scalars._fold_1;",
    ]


def _closing(text: str, start: int, name: str) -> int:
    """Where the bracket before `start` is closed."""
    end = end_of(text, start)
    if end == len(text):
        raise CompileError(f"kernel {name!r} has a {text[start - 1]!r} that is never closed")
    return end


def _parameters(kernel: str, text: str) -> tuple[Parameter, ...]:
    parameters = []
    for part in _split(text):
        name, colon, kind = (piece.strip() for piece in part.partition(":"))
        parameter = Parameter(name, re.sub(r"\s+", "", kind))
        if not colon or not name.isidentifier():
            raise CompileError(
                f"kernel {kernel!r} has a parameter {part.strip()!r}; write it as `name: type`"
            )
        if not parameter.is_buffer and parameter.type not in SCALARS:
            raise CompileError(
                f"kernel {kernel!r} has a parameter of type {kind!r}; a buffer is an `array<...>`, "
                f"a scalar one of {', '.join(SCALARS)}"
            )
        parameters.append(parameter)
    return tuple(parameters)


def _split(text: str) -> list[str]:
    """Parts between commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]
