"""The settings of a run of a user's own model, as its folder and its report show them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.files import parse_toml, read_text
from penstock.printable import shown
from penstock.train.config import Config

SECTION = "trainer"  # which only these settings have


@dataclass(frozen=True)
class RunSettings:
    """Plain values by section and key. They are shown, and decide nothing: that is up to the program."""

    sections: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, sections: Mapping[str, Mapping[str, Any]]) -> RunSettings:
        """Of values of any kind: those that a file can hold are kept."""
        return cls(
            {
                name: {
                    key: list(value) if isinstance(value, tuple) else value
                    for key, value in values.items()
                    if _is_plain(value)
                }
                for name, values in sections.items()
            }
        )

    def tree(self) -> dict[str, dict[str, Any]]:
        """All values by section and key."""
        return {name: dict(values) for name, values in self.sections.items()}

    def toml(self) -> str:
        """The settings as the text of a file."""
        sections = []
        for name, values in self.sections.items():
            # For these types of value, JSON is valid TOML.
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
            sections.append("\n".join([f"[{name}]", *lines, ""]))
        return "\n".join(sections)

    @property
    def steps(self) -> int:
        """How many steps are planned; 0 if nobody knows."""
        steps = self.sections[SECTION].get("steps")
        return steps if type(steps) is int and steps > 0 else 0


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, (bool, int)) or (isinstance(value, str) and bool(value))


def from_tree(tree: Mapping[str, Any], where: str) -> Config | RunSettings:
    """Settings of either kind of run; a SettingError says what is wrong with them."""
    if SECTION not in tree:
        return Config().changed(tree, where)
    for name, values in tree.items():
        if not isinstance(values, Mapping):
            raise SettingError(f"{where}: [{name}] is a section, and {shown(values)} was given")
    return RunSettings(tree)


def from_file(path: Path) -> Config | RunSettings:
    """The settings that a run's folder has."""
    try:
        tree = parse_toml(read_text(path))
    except (OSError, ValueError):
        tree = {}  # `Config` says what is wrong
    return from_tree(tree, str(path)) if SECTION in tree else Config().with_file(path)
