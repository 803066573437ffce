"""Attention to pages of keys and values, through tensors, against NumPy; see also `test_templates.py`."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import Device
from penstock.tensor.paged_attention import paged_attention


def attended(
    query: np.ndarray, cache: np.ndarray, table: np.ndarray, length: int, window: int | None
) -> np.ndarray:
    """What the query of a single sequence attends to, (heads, head size), in float64."""
    first = 0 if window is None else max(length - window, 0)
    page = cache.shape[3]
    result = np.zeros(query.shape)
    for head in range(len(query)):
        own = head // (len(query) // cache.shape[2])
        keys, values = (
            np.array([side[table[at // page], own, at % page] for at in range(first, length)], np.float64)
            for side in cache
        )
        scores = keys @ query[head].astype(np.float64) * 0.5
        weights = np.exp(scores - scores.max())
        result[head] = weights / weights.sum() @ values
    return result


@settings(max_examples=examples(20, quick=4), deadline=None)
@given(data=st.data())
def test_every_sequence_sees_its_own_pages(data: st.DataObject) -> None:
    groups, key_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    width, page, listed = (data.draw(st.integers(1, most)) for most in (9, 5, 4))
    lengths = data.draw(st.lists(st.integers(1, page * listed), min_size=1, max_size=3))
    window = data.draw(st.none() | st.integers(1, page * listed))
    rng, count = np.random.default_rng(data.draw(st.integers(0, 99))), len(lengths)
    pages = count * listed + 1
    query = rng.standard_normal((count, groups * key_heads, width)).astype(np.float32)
    cache = rng.standard_normal((2, pages, key_heads, page, width)).astype(np.float32)
    table = rng.permutation(pages)[: count * listed].reshape(count, listed).astype(np.int32)
    for device in ("host", "opencl"):
        tensors = [
            ps.asarray(each, device=device) for each in (query, cache, table, np.array(lengths, np.int32))
        ]
        got = paged_attention(*tensors, 0.5, window).numpy()
        wanted = [attended(query[at], cache, table[at], length, window) for at, length in enumerate(lengths)]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_it_is_refused_to_differentiate(device: Device) -> None:
    query = ps.ones((1, 2, 4), device=device, requires_grad=True)
    cache = ps.ones((2, 3, 2, 4, 4), device=device)
    table, lengths = (ps.asarray(np.array(each, np.int32), device=device) for each in ([[1, 0]], [5]))
    with pytest.raises(RuntimeError, match="has no gradient"):
        paged_attention(query, cache, table, lengths, 0.5).sum().backward()
