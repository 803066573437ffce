"""The settings in a `config.json` of Hugging Face, read with checks: errors name the file and the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.files import atomic_file, parse_json, read_text
from penstock.printable import shown


class Settings:
    """The content of a configuration; `where` names it in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def has(self, name: str) -> bool:
        """Whether a key is there, and is not null."""
        return self.values.get(name) is not None

    def require(self, *names: str) -> None:
        """Raise if any of these keys is missing."""
        missing = [name for name in names if not self.has(name)]
        if missing:
            raise CheckpointError(f"{self.where} lacks {', '.join(missing)}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer."""
        value = self._value(name, default)
        if type(value) is not int or value < least:
            raise self.error(name, f"an integer of {least} or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise self.error(name, "a number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A number of more than 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self.error(name, "a number of more than 0")
        return value

    def share(self, name: str, default: float) -> float:
        """A number from 0 to less than 1."""
        value = self.number(name, default)
        if not 0 <= value < 1:
            raise self.error(name, "a number from 0 to less than 1")
        return value

    def optional_number(self, name: str, missing: float | None = None) -> float | None:
        """A number, or None where it is null; `missing` where it is not there."""
        return self.number(name) if self.has(name) else None if name in self.values else missing

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of numbers."""
        value = self._value(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or {type(item) for item in value} - {int, float}
        ):
            raise self.error(name, f"a list of {count} numbers")
        return [float(item) for item in value]

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, Any]) -> Any:
        """What stands for a text in a table."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return choices[value]

    def part(self, name: str) -> Settings:
        """The settings inside a key."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Settings(value, f"{self.where}: {name}")

    def fixed(self, **wanted: Any) -> None:
        """Raise where a key has another value than the only one that is supported."""
        for name, value in wanted.items():
            given = self.values.get(name)
            if given is not None and given != value and (given or value):  # any two empty values are the same
                raise CheckpointError(f"{self.where}: {name} has to be {value}, not {shown(given)}")

    def error(self, name: str, wanted: str) -> CheckpointError:
        """What is wrong with a key."""
        return CheckpointError(f"{self.where}: {name} is {wanted}, not {shown(self.values.get(name))}")

    def _value(self, name: str, default: Any) -> Any:
        if self.has(name):
            return self.values[name]
        if default is None:
            raise CheckpointError(f"{self.where} lacks {name}")
        return default


def json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is an object, not {shown(content)}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as a JSON file."""
    with atomic_file(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
