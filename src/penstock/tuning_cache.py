"""The tuning cache: results of measurements, in a file for each device and version of a library."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress

from penstock.cache import CacheFolder
from penstock.config import cache_folder
from penstock.files import parse_json

_MAX_ENTRIES = 2048  # in a file; beyond that, the oldest are removed
_VERSION = 1  # of what is measured and how: files of other versions are ignored


def forget_everything() -> None:
    """Remove the files of all devices: measurements are repeated when they are needed."""
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
        """The choice for a problem, if there is one."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known.get(problem)

    def put(self, problem: str, choice: str) -> None:
        """Write a choice."""
        with self._lock:
            known = self._read() | (self._known or {})  # another process may have added entries
            known.pop(problem, None)
            known[problem] = choice
            self._known = dict(list(known.items())[-_MAX_ENTRIES:])
            self._write(self._known)

    def _read(self) -> dict[str, str]:
        try:
            entries = parse_json((self._folder.read(self._name) or b"{}").decode())
        except ValueError:
            return {}
        if not isinstance(entries, dict):
            return {}
        return {key: value for key, value in entries.items() if isinstance(value, str)}

    def _write(self, known: dict[str, str]) -> None:
        """Write the file atomically: another process reads the old file or the new."""
        self._folder.write(self._name, json.dumps(known, indent=0).encode())
