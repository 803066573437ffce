"""The parts of a module: a walk over its attributes and containers, with paths."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.tensor.core import Tensor

if TYPE_CHECKING:
    from penstock.nn.module import Module

Part = TypeVar("Part")


def walk(root: Module, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Every module and tensor of a tree with its path, each once, in the order of first use.

    The third item is whether it is in the state_dict.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any, bool]] = [(prefix, root, True)]
    while stack:
        path, value, saved = stack.pop()
        inside = _inside(value, path)
        if id(value) in seen or (inside is None and not isinstance(value, Tensor)):
            continue
        seen.add(id(value))  # also lists and dicts, which may contain themselves
        if _is_part(value):
            yield path, value, saved
        unsaved = value._unsaved if _is_module(value) else ()
        stack += [
            (_joined(path, name), part, saved and name not in unsaved)
            for name, part in reversed(inside or ())
        ]


def all_paths(root: Module) -> Iterator[tuple[str, Tensor]]:
    """Every path to every tensor, including all paths of shared tensors."""
    stack: list[tuple[str, Any, tuple[int, ...]]] = [("", root, ())]
    while stack:
        path, value, above = stack.pop()
        if id(value) in above:
            continue
        if isinstance(value, Tensor):
            yield path, value
        inside = _inside(value, path) or ()
        stack += [(_joined(path, name), part, (*above, id(value))) for name, part in reversed(inside)]


def tensors_inside(root: Module) -> list[Tensor]:
    """Every tensor of a tree, at each of its places: quicker than `walk`, as it makes no paths."""
    from penstock.nn.module import Module

    found: list[Tensor] = []
    seen: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        part = stack.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (Module, list, tuple, dict)) and id(part) not in seen:
            seen.add(id(part))
            inside = vars(part) if isinstance(part, Module) else part
            stack += inside.values() if isinstance(inside, dict) else inside
    return found


def members(module: Module) -> Iterator[tuple[str, Any]]:
    """The direct tensors and modules of a module, including those in containers, each once."""
    seen: set[int] = set()
    stack = [(str(name), part) for name, part in reversed(_inside(module, "") or ())]
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        inside = _inside(value, path)
        if _is_part(value):
            yield path, value
        elif inside is not None:
            stack += [(_joined(path, name), part) for name, part in reversed(inside)]
        else:
            continue
        seen.add(id(value))


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_module(value: Any) -> bool:
    from penstock.nn.module import Module

    return isinstance(value, Module)


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_module(value)


def _inside(value: Any, path: str) -> list[tuple[Any, Any]] | None:
    """The named contents of a module or a container; None for other values."""
    if isinstance(value, Tensor):
        return None
    if _is_module(value):
        return list(value._own_parts().items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    objects = isinstance(value, np.ndarray) and value.dtype == object
    if (isinstance(value, (Set, deque)) and any(map(_is_part, value))) or (
        objects and any(map(_is_part, value.flat))
    ):
        kind = type(value).__name__
        raise TypeError(
            f"{path} is a {kind}, whose items have no names; use a list or a dict for parts of a module"
        )
    return None
