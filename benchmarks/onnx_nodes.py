"""How many of the `onnx` package's own node tests pass, and why the others are refused.

    python benchmarks/onnx_nodes.py --device opencl:0
    python benchmarks/onnx_nodes.py --device host -k softmax --verbose

A test is a model with inputs and the outputs that the standard expects. It passes, is refused by a clear
exception, or is wrong; the exit status is 1 where any is wrong.
"""

from __future__ import annotations

import argparse
import collections
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

import penstock as ps
from penstock.errors import UnsupportedModel

DRAWN = ("test_bernoulli", "test_training_dropout")  # by another generator: only shapes and dtypes can agree


def cases() -> Iterator[Any]:
    """The node tests of the installed `onnx` package, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, while the package computes the expected outputs
        from onnx.backend.test.loader import load_model_tests

        yield from sorted(load_model_tests(kind="node"), key=lambda case: case.name)


def check(case: Any, device: str | ps.Device) -> str | None:
    """Compare a case's outputs, and raise an AssertionError; the reason, where it is refused."""
    try:
        model = ps.onnx.load(case.model, device=device)
        for inputs, expected in case.data_sets:
            given = [ps.asarray(array(value), device=device) for value in inputs]
            compare(model(*given), [array(value) for value in expected], case)
    except UnsupportedModel as error:
        return error.reason
    return None


def array(value: Any) -> Any:
    """A value of a case as an array; some are tensors as files have them."""
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def is_drawn(case: Any) -> bool:
    """Whether the expected values are random."""
    return case.name.startswith(DRAWN) and "zero_ratio" not in case.name


def compare(results: Any, expected: list[Any], case: Any) -> None:
    """Shapes and dtypes are the same, and values as near as the case asks for."""
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(expected), f"{len(results)} outputs, and {len(expected)} are expected"
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape, f"shape {result.shape}, and {wanted.shape} is expected"
        got = result.numpy()
        assert got.dtype == wanted.dtype, f"dtype {got.dtype}, and {wanted.dtype} is expected"
        if is_drawn(case):
            continue
        # Two units in the last place of a half: kernels do not round between the operations of a group.
        rtol = max(case.rtol, {"bfloat16": 2**-6, "float16": 2**-9}.get(got.dtype.name, 0))
        if got.dtype.name == "bfloat16":
            got, wanted = got.astype(np.float32), wanted.astype(np.float32)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=case.atol)


def main() -> None:
    """Run the tests and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=None, help="the device; the default one if none is named")
    parser.add_argument("-k", default="", help="only tests with this in their names")
    parser.add_argument("--verbose", action="store_true", help="how each wrong test fails")
    given = parser.parse_args()
    device = given.device or ps.default_device()
    passed, drawn, refused, wrong = 0, 0, collections.Counter[str](), {}
    for case in cases():
        if given.k not in case.name:
            continue
        try:
            reason = check(case, device)
        except Exception as error:
            wrong[case.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:180]}"
            if given.verbose:
                traceback.print_exception(error)
            continue
        if reason is None:
            passed += 1
            drawn += is_drawn(case)
        else:
            refused[reason] += 1
    print(
        f"passed {passed}, of {drawn} random ones only the shapes and dtypes\nrefused {sum(refused.values())}"
    )
    for reason, count in sorted(refused.items(), key=lambda entry: (-entry[1], entry[0])):
        print(f"  {count:4} {reason}")
    print(f"wrong {len(wrong)}")
    for name, text in wrong.items():
        print(f"  {name}: {text}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
