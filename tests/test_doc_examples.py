"""The examples in the docstrings of all public names: each name has some, and they give what they say."""

from __future__ import annotations

import doctest
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps

NAMESPACES = {
    "ps": ps,
    "ps.nn": ps.nn,
    "ps.nn.functional": ps.nn.functional,
    "ps.optim": ps.optim,
    "ps.data": ps.data,
    "ps.linalg": ps.linalg,
    "ps.fft": ps.fft,
    "ps.memory": ps.memory,
    "ps.random": ps.random,
    "ps.onnx": ps.onnx,
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class, with its name."""
    for prefix, namespace in NAMESPACES.items():
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if callable(value) and not isinstance(value, types.GenericAlias):
                yield f"{prefix}.{name}", value


@pytest.fixture
def _on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    default = ps.default_device()
    ps.use("host")
    yield
    ps.use(default)


def test_every_public_name_has_an_example() -> None:
    assert [name for name, value in public() if ">>> " not in (value.__doc__ or "")] == []


@pytest.mark.usefixtures("_on_the_host")
def test_examples_give_what_they_say() -> None:
    parser, told, ran = doctest.DocTestParser(), list[str](), set[str]()
    runner = doctest.DocTestRunner(verbose=False)
    for name, value in public():
        text = value.__doc__ or ""
        if text in ran:  # names of the same function
            continue
        ran.add(text)
        test = parser.get_doctest(text, {"ps": ps, "np": np}, name, None, None)
        runner.run(test, out=told.append)
    assert not told, "".join(told)
    assert len(ran) > 400
