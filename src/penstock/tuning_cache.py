"""The tuning cache: what was found by measuring, in a file for each device and version of a library."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress

from penstock.cache import CacheFolder
from penstock.config import cache_folder
from penstock.files import parse_json

_MAX_ENTRIES = 2048  # in a file; of more, the oldest go
_VERSION = 1  # of what is measured and how: what an older Penstock chose is not looked at


def forget_everything() -> None:
    """Remove all that was kept, of every device: it is measured again when it is needed."""
    with suppress(OSError):
        for path in cache_folder().glob("choices-*.json"):
            path.unlink()


class TuningCache:
    """Choices by problem, in memory and on disk. A file that cannot be read or written counts as empty."""

    def __init__(self, where: str) -> None:
        """`where` names the device and the library, with their versions."""
        self._folder = CacheFolder(cache_folder())
        key = hashlib.sha256(f"{_VERSION} {where}".encode()).hexdigest()[:12]
        self._name = f"choices-{key}.json"
        self._known: dict[str, str] | None = None
        self._lock = threading.Lock()

    def get(self, problem: str) -> str | None:
        """What was chosen before."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known.get(problem)

    def put(self, problem: str, choice: str) -> None:
        """Keep a choice."""
        with self._lock:
            known = self._read() | (self._known or {})  # another process may have added some
            known.pop(problem, None)
            known[problem] = choice
            self._known = dict(list(known.items())[-_MAX_ENTRIES:])
            self._write(self._known)

    def _read(self) -> dict[str, str]:
        try:
            found = parse_json((self._folder.read(self._name) or b"{}").decode())
        except ValueError:
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: value for key, value in found.items() if isinstance(value, str)}

    def _write(self, known: dict[str, str]) -> None:
        """Whole or not at all: a process that reads meanwhile finds the old file."""
        self._folder.write(self._name, json.dumps(known, indent=0).encode())
