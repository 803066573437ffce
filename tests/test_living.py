"""Objects that are known while they live."""

from __future__ import annotations

import sys
import threading

from penstock.living import Living


class Thing:
    pass


def test_they_are_known_while_others_refer_to_them() -> None:
    known, kept, dropped = Living[Thing](), Thing(), Thing()
    for item in (kept, dropped, kept):
        known.add(item)
    assert {*known} == {kept, dropped}
    del dropped, item
    assert list(known) == [kept]
    known.discard(Thing())
    known.discard(kept)
    assert not list(known)
    known.add(kept)
    known.clear()
    assert not list(known)


def test_threads_read_them_while_objects_come_and_go() -> None:
    """A WeakSet fails here in most runs."""
    known, kept, errors = Living[Thing](), [Thing() for _ in range(20)], list[RuntimeError]()
    for item in kept:
        known.add(item)

    def read() -> None:
        try:
            for _ in range(10_000):
                list(known)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            known.add(Thing())
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert {*known} == {*kept}
