"""The keys of a JSON object from outside: each is checked when it is taken, and what is left is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.serving.errors import ApiError, refused

_SHOWN = 60  # characters of a value that a message repeats


def parsed(body: bytes) -> Any:
    """The value of a request's body."""
    try:
        return json.loads(body.decode(), parse_constant=_no_number)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except ValueError as error:  # of UTF-8, of JSON, of integers with thousands of digits
        raise refused(f"the body is not JSON in UTF-8: {error}") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


class Fields:
    """The keys of an object. A key whose value is null is as good as absent."""

    def __init__(self, tree: Any, where: str = "") -> None:
        if not isinstance(tree, dict):
            raise refused(f"{where or 'the body'} is an object, and {shown(tree)} was given", where or None)
        self._left = {name: value for name, value in tree.items() if value is not None}
        self._where = f"{where}." if where else ""

    def take(self, name: str) -> Any:
        """The value of a key, whatever it is; None if it is absent."""
        return self._left.pop(name, None)

    def boolean(self, name: str) -> bool:
        """A value that is true or false; false if it is absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """An integer of a range."""
        value = self.take(name)
        if value is not None and not (is_integer(value) and least <= value <= most):
            raise self.wrong(name, f"an integer from {least} to {most}", value)
        return None if value is None else int(value)

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number of a range."""
        value = self.take(name)
        if value is None:
            return None
        if (is_integer(value) or isinstance(value, float)) and least <= value <= most:  # not so for NaN
            return float(value)
        raise self.wrong(name, f"a number from {least:g} to {most:g}", value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def only(self, name: str, harmless: Sequence[Any], instead: str = "") -> None:
        """Refuse a key that is not supported, but for values that ask for nothing."""
        value = self.take(name)
        if value is None or any(type(value) is type(each) and value == each for each in harmless):
            return
        message = f"{self._where}{name} is not supported, and {shown(value)} was given"
        raise refused(f"{message}; {instead}" if instead else message, self._where + name, "unsupported")

    def nothing_else(self) -> None:
        """Refuse the keys that nobody has taken."""
        if self._left:
            name = min(self._left)
            raise refused(
                f"there is no key {shown(self._where + name)}", self._where + name, "unknown_parameter"
            )

    def wrong(self, name: str, wanted: str, value: Any) -> ApiError:
        """The error of a value that is of another kind than it should be."""
        key = self._where + name
        return refused(f"{key} is {wanted}, and {shown(value)} was given", key)


def is_integer(value: Any) -> bool:
    """Whether a value of JSON is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value as a message shows it: in JSON, and not more than its beginning."""
    if is_integer(value) and abs(value) >= 10**_SHOWN:
        return "an integer of many digits"
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):
        return "something nested"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
