"""Operations under PyTorch's own names, as PyTorch's own samples call them, with their gradients.

The cases are not part of the project: `cases.py` says where `torch_ops.json` is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from cases import FOLDER, PRESENT, needs_cases
from conftest import examples

import penstock as ps
from penstock.nn import functional as F  # noqa: N812

pytestmark = needs_cases
# Where the standard has the same name for something else, and no `dim` tells them apart: see docs/tensors.md.
METHODS_ONLY = {"sort", "std", "var", "squeeze", "repeat", "where"}
# The layer norm of a single item is 0, and PyTorch's own gradient by its weight is rounding times 316.
ATOL = {"function nn.functional.layer_norm, gradient 1": 3e-5}
Case = dict[str, Any]


@cache
def cases() -> dict[str, list[Case]]:
    result: dict[str, list[Case]] = {}
    for case in json.loads((FOLDER / "torch_ops.json").read_text()):
        result.setdefault(case["op"], []).append(case)
    return result


@cache
def arrays() -> Any:
    return np.load(FOLDER / "torch_ops.npz")


OPERATIONS = sorted(cases()) if PRESENT else [""]


def value(given: Any, inputs: list[ps.Tensor], device: str) -> Any:
    """An argument; tensors that have a gradient are noted in the order in which they come."""
    if isinstance(given, list):
        return [value(item, inputs, device) for item in given]
    if isinstance(given, dict) and "torch" in given:
        return getattr(ps, given["torch"].removeprefix("torch."))
    if not isinstance(given, dict):
        return given
    x = ps.asarray(arrays()[given["array"]], device=device)
    if given["grad"]:
        inputs.append(x.requires_grad_())
    return x


def call(case: Case, way: str, device: str) -> tuple[Any, list[ps.Tensor]]:
    inputs: list[ps.Tensor] = []
    x = value(case["input"], inputs, device)
    args = [value(arg, inputs, device) for arg in case["args"]]
    kwargs = {name: value(arg, inputs, device) for name, arg in case["kwargs"].items()}
    if kwargs.get("device") == "cpu":
        kwargs["device"] = device
    op = case["op"]
    if op == "einsum":
        return ps.einsum(*args, *x), inputs
    if op == "nn.functional.embedding":  # PyTorch's samples have the weight first, its function last
        return F.embedding(*args, x, **kwargs), inputs
    if op.startswith("nn.functional."):
        return function_of(op)(x, *args, **kwargs), inputs
    owner = x if way == "method" else ps
    function = getattr(owner, op)
    return (function(*args, **kwargs) if way == "method" else function(x, *args, **kwargs)), inputs


def function_of(op: str) -> Any:
    name = op.removeprefix("nn.functional.")
    return getattr(F, name, None) or getattr(ps, name)


def compare(result: Any, expected: Any, what: str) -> None:
    wanted = arrays()[expected["array"]]
    got = result.numpy() if isinstance(result, ps.Tensor) else np.asarray(result)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, not {wanted.shape}"
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype}, not {wanted.dtype}"
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=ATOL.get(what, 2e-5), err_msg=what)


def check(case: Case, way: str, device: str) -> None:
    result, inputs = call(case, way, device)
    outputs = [*result] if isinstance(result, (tuple, list)) else [result]
    expected = case["output"] if isinstance(case["output"], list) else [case["output"]]
    assert len(outputs) == len(expected)
    if case["kwargs"].get("dropout_p"):  # drawn anew: no other has the same numbers
        assert [x.shape for x in outputs] == [arrays()[wanted["array"]].shape for wanted in expected]
        return
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        compare(output, wanted, f"{way} {case['op']}, result {number}")
    if not case["grads"]:
        return
    total = sum(ps.sum(output) for output in outputs if output.requires_grad)
    if isinstance(total, ps.Tensor):
        total.backward()
    for number, (x, wanted) in enumerate(zip(inputs, case["grads"], strict=True)):
        if wanted is not None:
            gradient = x.grad if x.grad is not None else ps.zeros_like(x)
            compare(gradient, wanted, f"{way} {case['op']}, gradient {number}")


def ways(case: Case) -> Iterator[str]:
    op = case["op"]
    is_tensor = isinstance(case["input"], dict)
    if is_tensor and hasattr(ps.Tensor, op):
        yield "method"
    if op not in METHODS_ONLY and (op.startswith("nn.") or not is_tensor or hasattr(ps, op)):
        yield "function"


@pytest.mark.parametrize("op", OPERATIONS)
def test_all_samples_of_an_operation(op: str) -> None:
    samples = cases()[op]
    for case in samples[:: 1 + len(samples) // examples(len(samples) + 1, quick=100)]:
        taken = list(ways(case))
        assert taken, f"there is no {op}"
        for way in taken:
            check(case, way, "host")
