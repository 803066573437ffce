"""For tests of programs on Penstock: compares the fused form of a function with the unfused form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.execution.realize import realize
from penstock.graph.calls import inline
from penstock.graph.node import Array, DType, Kind, Node, leaf, topological
from penstock.graph.reference import computed
from penstock.runtime import Device
from penstock.tensor.autograd import grad
from penstock.tensor.core import Tensor
from penstock.tensor.creation import asarray
from penstock.tensor.dtypes import checked, float32
from penstock.tensor.jit import jit
from penstock.tensor.manipulation import astype
from penstock.tensor.reduction import sum as sum_

# Tolerances for sums in another order, and for the last digits of functions; integers must be equal.
# float16 and bfloat16 are rounded after every node of the unfused form, but only at the end of a kernel.
_TOLERANCES = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-5, "float64": 1e-11}
_TOLERANCES |= {"complex64": 1e-5, "complex128": 1e-11}
_NOISE = 0.1  # of the tolerance: the error that is allowed if a value should be 0


def assert_fused_equal(
    function: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: bool = True,
    reference: Callable[..., Any] | None = None,
) -> None:
    """Raise AssertionError if the fused form of a function of tensors differs from the unfused form.

    Arrays are passed as tensors, other arguments unchanged. The fused form is that of `ps.jit` on the device
    of the first tensor; in the unfused form, NumPy computes every node separately, and the device computes
    raw kernels. With `gradients`, the gradients of all results with respect to all floating-point tensors are
    compared too. The function must be deterministic: it cannot draw random values.

    A raw kernel is the same in both forms, so it is not checked. With `reference`, a function of NumPy arrays
    that gives the expected results, both forms are compared with these too.

    The tolerances are by dtype; `atol` is relative to the largest value of a result by default.
    """
    given = [asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    positions = [at for at, arg in enumerate(given) if isinstance(arg, Tensor) and arg.dtype.kind == "f"]
    device = next((arg.device for arg in given if isinstance(arg, Tensor)), None)
    if device is None:
        raise TypeError(
            f"assert_fused_equal needs an array or a tensor, not {[type(a).__name__ for a in args]}"
        )

    def run(*inputs: Any) -> tuple[list[Tensor], list[Tensor]]:
        results = [*_tensors(function(*inputs))]
        if not results:
            raise TypeError("assert_fused_equal needs a function that gives a tensor")
        smooth = gradients and positions and any(result.dtype.kind == "f" for result in results)
        return results, [*grad(_weighted(function), tuple(positions))(*inputs)] if smooth else []

    fused, recorded = jit(run)(*given), run(*given)
    names = [f"result {position}" for position in range(len(recorded[0]))]
    names += [f"the gradient by argument {position}" for position in positions][: len(recorded[1])]
    wanted = [*recorded[0], *recorded[1]]
    unfused = _node_by_node([tensor._node for tensor in wanted], device)
    computed_fused = [tensor.numpy() for tensor in (*fused[0], *fused[1])]
    for name, tensor, value, other in zip(names, wanted, computed_fused, unfused, strict=True):
        _compare(name, value, other, _tolerance(tensor.dtype, rtol), atol)
    if reference is not None:
        results = recorded[0]
        expected = _expected(reference, given, [tensor.dtype for tensor in results])
        for form, values in (("fused", computed_fused), ("unfused", unfused)):
            compared = values[: len(results)]
            for name, value, other in zip(names[: len(results)], compared, expected, strict=True):
                _compare(
                    name, value, other, _tolerance(checked(value.dtype), rtol), atol, (form, "reference")
                )


def _expected(reference: Callable[..., Any], given: list[Any], kinds: list[DType]) -> list[Array]:
    """The results of a function of NumPy arrays, in the dtypes of the tensors."""
    arrays = [arg.numpy() if isinstance(arg, Tensor) else arg for arg in given]
    results = [*_flat(reference(*arrays))]
    if len(results) != len(kinds):
        raise TypeError(f"the reference gives {len(results)} results, and the function {len(kinds)}")
    return [np.asarray(array).astype(dtype.numpy) for array, dtype in zip(results, kinds, strict=True)]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts."""
    return (item for item in _flat(value) if isinstance(item, Tensor))


def _flat(value: Any) -> Iterator[Any]:
    """The values in tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _weighted(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A weighted sum of all results, with a different weight for each item, so that errors do not cancel."""

    def loss(*inputs: Any) -> Tensor:
        total: Any = 0
        for position, result in enumerate(_tensors(function(*inputs))):
            if result.dtype.kind == "f":
                wide = astype(result, float32) if result.dtype.itemsize == 2 else result
                weights = np.random.default_rng(position).uniform(0.5, 1.5, result.shape)
                total = total + sum_(wide * asarray(weights.astype(wide.dtype), device=result.device))
        return total  # type: ignore[no-any-return]

    return loss


def _node_by_node(wanted: Sequence[Node], device: Device) -> list[Array]:
    """The values of nodes, each computed separately."""
    values: dict[Node, Array] = {}
    wanted = inline(wanted)
    for node in topological(wanted):
        if node.value is not None:
            values[node] = device.download(node.value, node.dtype, node.shape).wait()
            continue
        inputs = [values[parent] for parent in node.inputs]
        if node.primitive.kind is Kind.OPAQUE:
            leaves = tuple(
                leaf(device.upload(x), parent.shape, parent.dtype)
                for parent, x in zip(node.inputs, inputs, strict=True)
            )
            separate = Node(node.primitive, leaves, node.attributes)
            realize([separate], device)
            values[node] = device.download(separate.value, node.dtype, node.shape).wait()
        else:
            values[node] = np.asarray(computed(node, inputs), order="C")
    return [values[node] for node in wanted]


def _tolerance(dtype: DType, rtol: float | None) -> float:
    return _TOLERANCES.get(str(dtype), 0.0) if rtol is None else rtol


def _compare(
    name: str,
    fused: Array,
    unfused: Array,
    rtol: float,
    atol: float | None,
    forms: tuple[str, str] = ("fused", "unfused"),
) -> None:
    kind = f"{fused.dtype}{list(fused.shape)}"
    differ = f"{forms[0]} and {forms[1]} differ in {name}"
    if fused.shape != unfused.shape or fused.dtype != unfused.dtype:
        raise AssertionError(f"{differ}: {kind} and {unfused.dtype}{list(unfused.shape)}")
    if not fused.size:
        return
    wide = np.complex128 if fused.dtype.kind == "c" else object if fused.dtype.kind in "iu" else np.float64
    first, second = fused.astype(wide), unfused.astype(wide)
    with np.errstate(all="ignore"):
        same = (first == second) | ((first != first) & (second != second))
        difference = np.where(same, 0, np.abs(first - second)).astype(np.float64)
        difference = np.where(np.isnan(difference), np.inf, difference)
        size = np.abs(second).astype(np.float64)
    if atol is None:
        largest = np.max(size, initial=0, where=np.isfinite(size))
        atol = rtol * max(float(largest), _NOISE)
    allowed = atol + rtol * np.where(np.isfinite(size), size, 0)
    wrong = difference > allowed
    if not wrong.any():
        return
    # The largest difference of the wrong items: larger differences may be within the tolerance.
    index = np.unravel_index(np.argmax(np.where(wrong, difference, -1)), fused.shape)
    raise AssertionError(
        f"{differ}, {kind}: by {difference[index]:.6g} at {tuple(int(at) for at in index)}, where the "
        f"{forms[0]} form has {fused[index]} and the {forms[1]} form has {unfused[index]}. "
        f"That is the largest difference of {int(wrong.sum())} of {fused.size} items that "
        f"differ by more than rtol={rtol:g} and atol={atol:g} allow"
    )
