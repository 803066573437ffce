"""Snapshots of device memory in the format of PyTorch's memory viewer (pytorch.org/memory_viz).

The viewer shows segments, which an allocator takes from the driver, and blocks inside them. The pool here
splits nothing, so each block is a segment. Addresses are made up, since not every driver tells them.
"""

from __future__ import annotations

import linecache
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.files import atomic_file
from penstock.memory.ledger import Accountable, opened_devices
from penstock.memory.trace import Action, Block

UNTRACED = "(not traced)"  # the owner of blocks that were allocated before tracing started
_ALIGNMENT = 512  # bytes; of made-up addresses
_STREAM = 0
_HIDDEN = "_start"


@dataclass
class History:
    """The allocations and releases of a device up to a snapshot."""

    device: str
    live: Sequence[Block]  # at the end
    idle: Sequence[tuple[int, int]]  # serial and bytes
    untraced_bytes: int  # live, allocated before tracing started
    actions: Sequence[Action] = ()  # in order
    newer_from: int = 0  # the first serial that was allocated while actions were recorded
    epoch: float = 0.0  # added to that clock, gives seconds since 1970
    dropped: int = 0  # earlier actions that were not kept
    most: int = 0  # the maximum of kept actions


def snapshot(path: str | os.PathLike[str]) -> None:
    """Write the present memory of every opened device to a file for PyTorch's memory viewer.

    Blocks are shown with the line of your code that allocated them if tracing is on (`device.trace_memory()`,
    or PENSTOCK_TRACE_MEMORY=1). A profile's `save_memory` also has the history.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "memory.pickle")
    >>> ps.memory.snapshot(path)
    >>> os.path.getsize(path) > 0
    True
    """
    write(path, [_now(device) for device in opened_devices()])


def _now(device: Accountable) -> History:
    live, idle = device.memory_blocks()
    untraced = device.memory_stats().live_bytes - sum(block.nbytes for block in live)
    return History(device.name, live, idle, max(untraced, 0))


def write(path: str | os.PathLike[str], histories: Sequence[History]) -> None:
    """Write the histories of devices."""
    with atomic_file(Path(path)) as file:
        # The viewer reads only pickles of an early protocol with plain values.
        pickle.dump(described(histories), file, protocol=4)


def described(histories: Sequence[History]) -> dict[str, Any]:
    """Histories in the viewer's format."""
    segments: list[dict[str, Any]] = []
    traces = []
    for number, history in enumerate(histories):
        addresses = _Addresses()
        segments += _segments(history, addresses, number)
        traces.append(_trace(history, addresses))
    overflowed = any(history.dropped for history in histories)
    return {
        "segments": segments,
        "device_traces": traces,
        "external_annotations": [],
        "allocator_settings": {
            "devices": [history.device for history in histories],
            "trace_alloc_max_entries": max((history.most for history in histories), default=0),
            "trace_alloc_overflowed": overflowed,
        },
    }


@dataclass
class _Addresses:
    """A made-up address for every allocation."""

    starts: dict[int, int] = field(default_factory=dict)
    end: int = 1 << 32

    def of(self, serial: int, nbytes: int) -> int:
        """The address of an allocation."""
        if serial not in self.starts:
            self.starts[serial] = self.end
            self.end += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        return self.starts[serial]


def _segments(history: History, addresses: _Addresses, device: int) -> list[dict[str, Any]]:
    live = list(history.live)
    if history.untraced_bytes:
        live.append(Block(-1, history.untraced_bytes, history.untraced_bytes, UNTRACED))
    held = {block.serial for block in live}
    idle = [Block(serial, nbytes, nbytes, "") for serial, nbytes in history.idle if serial not in held]
    return [
        *(_segment(block, addresses, device, "active_allocated") for block in live),
        *(_segment(block, addresses, device, "inactive") for block in idle),
    ]


def _segment(block: Block, addresses: _Addresses, device: int, state: str) -> dict[str, Any]:
    address, active = addresses.of(block.serial, block.nbytes), state != "inactive"
    inside = {
        "address": address,
        "size": block.nbytes,
        "requested_size": block.asked,
        "state": state,
        "frames": _frames(block.site) if active else [],
    }
    return {
        "device": device,
        "address": address,
        "total_size": block.nbytes,
        "allocated_size": block.nbytes if active else 0,
        "active_size": block.nbytes if active else 0,
        "requested_size": block.asked if active else 0,
        "stream": _STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [inside],
    }


def _trace(history: History, addresses: _Addresses) -> list[dict[str, Any]]:
    """The actions of blocks, and of their segments."""
    present = {block.serial for block in history.live} | {serial for serial, _ in history.idle}
    last = {action.block.serial: at for at, action in enumerate(history.actions)}
    seen: set[int] = set()
    entries: list[dict[str, Any]] = []
    for at, action in enumerate(history.actions):
        block = action.block

        def add(what: str, action: Action = action, block: Block = block) -> None:
            entries.append(
                {
                    "action": what,
                    "addr": addresses.of(block.serial, block.nbytes),
                    "size": block.nbytes,
                    "stream": _STREAM,
                    "time_us": int((action.seconds + history.epoch) * 1e6),
                    "compile_context": "N/A",
                    "user_metadata": "",
                    "frames": _frames(block.site),
                }
            )

        if action.out:
            if block.serial not in seen and block.serial >= history.newer_from:
                add("segment_alloc")
            add("alloc")
        else:
            add("free_requested")
            add("free_completed")
            if last[block.serial] == at and block.serial not in present:
                add("segment_free")
        seen.add(block.serial)
    return entries


def _frames(site: str) -> list[dict[str, Any]]:
    """A stack of one frame for the viewer, with the text of the line."""
    filename, _, line = site.rpartition(":")
    if not line.isdigit():
        return [{"filename": site, "line": 0, "name": ""}]
    text = linecache.getline(filename, int(line)).strip()
    # The viewer hides frames with this text.
    return [{"filename": filename, "line": int(line), "name": "" if _HIDDEN in text else text}]
