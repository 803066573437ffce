"""Buffers that are larger than a binding: they take several bindings, which are adjacent windows.

WGSL has no pointers that could refer to any of several bindings. So accesses to such a buffer are replaced by
calls of functions that select the window by the index. Uses that cannot be replaced are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import CompileError

# The stride of items in bytes. The sizes of windows are multiples of them.
_ITEM_BYTES = {"f32": 4, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_ITEM_BYTES |= {f"vec{n}<{kind}>": 8 * (n // 2) for n in (2, 4) for kind in ("f32", "i32", "u32")}
_BRACKET = re.compile(r"[][(){};]")
_ATOMIC = re.compile(r"\b(atomic\w+)\s*\(\s*&\s*$")
_ATOMICS = ("Load", "Store", "Add", "Sub", "Max", "Min", "And", "Or", "Xor", "Exchange")
_ADDRESS = re.compile(r"(?:^|[(,={;]|\breturn)\s*&\s*$")
_ASSIGNED = re.compile(r"\s*(?:(\+\+|--)|(<<|>>|[-+*/%&|^])?=(?!=))")
_COMPONENT = re.compile(r"\s*(?:\[|\.\w+\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=)))")


def window_name(name: str, number: int) -> str:
    """The variable of a window of a buffer."""
    return f"_{name}_{number}" if number else name


def windowed(
    texts: Sequence[str], large: Mapping[str, tuple[str, int]], window_bytes: int
) -> tuple[list[str], str]:
    """Texts in which accesses to large buffers are calls of functions, and these functions.

    `large`: for each of those buffers the type of its items, and how many windows it has.
    """
    made: dict[tuple[str, str], None] = {}  # buffers and kinds of access, in the order of use
    for name in large:
        declared = rf"\b(let|var|const)\b\s*(<[^>]*>)?\s*{name}\b|(?<![\w.]){name}\s*:"
        if any(re.search(declared, text) for text in texts):
            raise _cannot(name, "something else has the same name")
    rewriter = _Rewriter(large, made)
    result = [rewriter.rewritten(text) for text in texts]
    functions = [_function(name, verb, *large[name], window_bytes) for name, verb in made]
    return result, "\n".join(functions)


class _Rewriter:
    """Replaces accesses by calls."""

    def __init__(self, large: Mapping[str, tuple[str, int]], made: dict[tuple[str, str], None]) -> None:
        self._name = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, large))})\b\s*")
        self._made = made

    def rewritten(self, text: str) -> str:
        result, at = "", 0
        while match := self._name.search(text, at):
            before, name = text[at : match.start()], match[1]
            if text[match.end() : match.end() + 1] != "[":
                if _ADDRESS.search(before):
                    raise _cannot(name, "its address is taken")
                result, at = result + before + match[0], match.end()
                continue
            close = end_of(text, match.end() + 1, ";")
            index = f"i32({self.rewritten(text[match.end() + 1 : close])})"
            close += 1
            if atomic := _ATOMIC.search(before):
                end = end_of(text, close, ";")
                more = self.rewritten(text[close:end])
                if atomic[1].removeprefix("atomic") not in _ATOMICS or more.strip()[:1] not in ("", ","):
                    raise _cannot(name, f"it is given to {atomic[1]}")
                result += before[: atomic.start()] + self._call(name, atomic[1], index + more)
                at = end + 1
            elif _ADDRESS.search(before):
                raise _cannot(name, "the address of an item is taken")
            elif _COMPONENT.match(text, close):
                raise _cannot(name, "a part of an item is used by itself")
            elif assigned := _ASSIGNED.match(text, close):
                at = end_of(text, assigned.end(), ";")
                value, sign = self.rewritten(text[assigned.end() : at]).strip(), assigned[2]
                if assigned[1]:
                    value, sign = "1", assigned[1][0]
                if sign is None:
                    result += before + self._call(name, "store", f"{index}, {value}")
                else:
                    old = self._call(name, "load", "_at")
                    new = self._call(name, "store", f"_at, {old} {sign} ({value})")
                    result += f"{before}{{ let _at = {index}; {new}; }}"
            else:
                result, at = result + before + self._call(name, "load", index), close
        return result + text[at:]

    def _call(self, name: str, verb: str, given: str) -> str:
        self._made[name, verb] = None
        return f"_{verb}_{name}({given})"


def _cannot(name: str, why: str) -> CompileError:
    return CompileError(f"buffer {name!r} takes several bindings, so only single items can be used; {why}")


def end_of(text: str, start: int, stop: str = "") -> int:
    """The end of the expression at `start`: a closing bracket that it does not open, `stop`, or the end."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if not depth and (match[0] in ")]}" or match[0] == stop):
            return match.start()
        depth += (match[0] in "([{") - (match[0] in ")]}")
    return len(text)


def _function(name: str, verb: str, kind: str, windows: int, window_bytes: int) -> str:
    """The function for an access to an item of any window."""
    item = kind.removeprefix("atomic<").removesuffix(">") if kind.startswith("atomic<") else kind
    if item not in _ITEM_BYTES:
        raise _cannot(name, f"its items are {kind}, and must be one of {', '.join(_ITEM_BYTES)} there")
    items = window_bytes // _ITEM_BYTES[item]
    reads = verb not in ("store", "atomicStore")
    writes = verb not in ("load", "atomicLoad")

    def used(number: int) -> str:
        target = f"{window_name(name, number)}[{f'i - {number * items}' if number else 'i'}]"
        if verb == "store":
            return f"{target} = v;"
        value = target if verb == "load" else f"{verb}(&{target}{', v' if writes else ''})"
        return f"return {value};" if reads else f"{value};"

    parameters = f"i: i32{f', v: {item}' if writes else ''}"
    result = f" -> {item}" if reads else ""
    return f"fn _{verb}_{name}({parameters}){result} {{ {_chosen(0, windows, items, used)} }}"


def _chosen(first: int, end: int, items: int, used: Callable[[int], str]) -> str:
    """The statements that select the window of item `i` by bisection."""
    if end - first == 1:
        return used(first)
    middle = (first + end) // 2
    lower, upper = _chosen(first, middle, items, used), _chosen(middle, end, items, used)
    return f"if (i < {middle * items}) {{ {lower} }} else {{ {upper} }}"
