"""Keeps PyOpenCL's cache of invokers in memory and bounded.

For every kernel, PyOpenCL generates Python code that sets its arguments, and keeps it in a database in the
user's cache folder. It never removes any, and if that file is damaged or cannot be written, no kernel can be
created.
"""

from __future__ import annotations

import linecache
import threading
from typing import Any

import pyopencl as cl

from penstock.lru import LRU

_MAX_KERNELS = 1024


class InvokerCache:
    """The code of the most recently used kernels, instead of PyOpenCL's database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._code = LRU[tuple[Any, ...], Any](_MAX_KERNELS)

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        with self._lock:
            self._code.move_to_end(key)
            return self._code[key]

    def store_if_not_present(self, key: tuple[Any, ...], code: Any) -> None:
        """Keep the code of a kernel: a module, and the name of a function in it."""
        with self._lock:
            if key not in self._code:
                self._code[key] = code
        module, name = code
        # Python's linecache would keep its text for ever.
        linecache.cache.pop(module.mod_globals[name].__code__.co_filename, None)


def keep_in_memory() -> None:
    """Replace PyOpenCL's database. With versions of PyOpenCL that have other names, nothing changes."""
    module: Any = cl
    module._PYOPENCL_NO_CACHE = True  # so that the import opens no database
    from pyopencl import invoker

    module._PYOPENCL_NO_CACHE = False
    if not isinstance(getattr(invoker, "invoker_cache", None), InvokerCache):
        invoker.invoker_cache = InvokerCache()  # type: ignore[assignment]
