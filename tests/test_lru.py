"""The bounded cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lru import LRU, Key


def test_what_was_not_used_for_longest_goes() -> None:
    table = LRU[str, int](2)
    table["a"], table["b"] = 1, 2
    assert table.use("a") == 1
    table["c"] = 3
    assert dict(table) == {"a": 1, "c": 3}
    table["a"] = 4  # which is a use, too
    table["d"] = 5
    assert dict(table) == {"a": 4, "d": 5}


def test_none_is_a_value() -> None:
    table = LRU[str, None](2)
    table["a"] = table["b"] = None
    assert table.use("a") is None
    table["c"] = None
    assert list(table) == ["a", "c"]
    assert table.use("b") is None
    assert "b" not in table


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))), st.integers(1, 5))
def test_it_is_the_last_used_that_stay(steps: list[tuple[bool, int]], most: int) -> None:
    table, order = LRU[int, int](most), list[int]()
    for writes, key in steps:
        if writes:
            table[key] = key
        known = key in order
        if writes or known:
            order = [*(item for item in order if item != key), key][-most:]
        if not writes:
            assert table.use(key) == (key if known else None)
        assert list(table) == order


def test_long_keys_are_equal_by_their_parts() -> None:
    table = LRU[Key, int](2)
    table[Key(("a", (1, 2)))] = 1
    assert table.use(Key(("a", (1, 2)))) == 1
    assert Key(("a", (1, 3))) not in table
    assert Key("a") != "a"
    with pytest.raises(TypeError, match="unhashable"):
        Key(([],))
