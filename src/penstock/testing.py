"""What tests of programs on Penstock need: the fused form of a function against the unfused one."""

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

# How much sums in another order, and functions to their last digits, may differ; whole numbers may not.
# float16 and bfloat16 are rounded after every node of the unfused form, but only at the end of a kernel.
_TOLERANCES = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-5, "float64": 1e-11}
_TOLERANCES |= {"complex64": 1e-5, "complex128": 1e-11}
_NOISE = 0.1  # of the tolerance: what may be left where a value should be 0


def assert_fused_equal(
    function: Callable[..., Any],
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: bool = True,
    reference: Callable[..., Any] | None = None,
) -> None:
    """Raise AssertionError if a function of tensors has another value fused than node by node.

    Arrays and tensors are its tensors, other arguments stay what they are. The fused form is that of `ps.jit`
    on the device of the first tensor; in the unfused one, NumPy computes every node by itself, and the device
    raw kernels. With `gradients`, those of all results by all tensors of fractions are compared too. The
    function must give the same whenever it is called: it cannot draw random numbers.

    A raw kernel is the same text in both forms, so what it computes is not judged. With `reference`, a
    function of NumPy arrays that gives what the results should be, both forms are compared with that too.

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
        smooth = gradients and positions and any(one.dtype.kind == "f" for one in results)
        return results, [*grad(_weighted(function), tuple(positions))(*inputs)] if smooth else []

    fused, recorded = jit(run)(*given), run(*given)
    names = [f"result {number}" for number in range(len(recorded[0]))]
    names += [f"the gradient by argument {position}" for position in positions][: len(recorded[1])]
    wanted = [*recorded[0], *recorded[1]]
    unfused = _one_by_one([tensor._node for tensor in wanted], device)
    found = [tensor.numpy() for tensor in (*fused[0], *fused[1])]
    for name, tensor, one, other in zip(names, wanted, found, unfused, strict=True):
        _compare(name, one, other, _tolerance(tensor.dtype, rtol), atol)
    if reference is not None:
        results = recorded[0]
        expected = _expected(reference, given, [tensor.dtype for tensor in results])
        for form, values in (("fused", found), ("unfused", unfused)):
            for name, one, other in zip(names[: len(results)], values[: len(results)], expected, strict=True):
                _compare(name, one, other, _tolerance(checked(one.dtype), rtol), atol, (form, "reference"))


def _expected(reference: Callable[..., Any], given: list[Any], kinds: list[DType]) -> list[Array]:
    """What a function of NumPy arrays gives, in the dtypes of the results."""
    arrays = [arg.numpy() if isinstance(arg, Tensor) else arg for arg in given]
    results = [*_flat(reference(*arrays))]
    if len(results) != len(kinds):
        raise TypeError(f"the reference gives {len(results)} results, and the function {len(kinds)}")
    return [np.asarray(array).astype(dtype.numpy) for array, dtype in zip(results, kinds, strict=True)]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts."""
    return (item for item in _flat(value) if isinstance(item, Tensor))


def _flat(value: Any) -> Iterator[Any]:
    """All that is in tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _weighted(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """One number of all results, in which each item has a weight of its own: none can hide another."""

    def loss(*inputs: Any) -> Tensor:
        total: Any = 0
        for number, result in enumerate(_tensors(function(*inputs))):
            if result.dtype.kind == "f":
                wide = astype(result, float32) if result.dtype.itemsize == 2 else result
                weights = np.random.default_rng(number).uniform(0.5, 1.5, result.shape)
                total = total + sum_(wide * asarray(weights.astype(wide.dtype), device=result.device))
        return total  # type: ignore[no-any-return]

    return loss


def _one_by_one(wanted: Sequence[Node], device: Device) -> list[Array]:
    """The values of nodes, each computed by itself."""
    values: dict[Node, Array] = {}
    wanted = inline(wanted)
    for node in topological(wanted):
        if node.value is not None:
            values[node] = device.download(node.value, node.dtype, node.shape).wait()
            continue
        inputs = [values[parent] for parent in node.inputs]
        if node.primitive.kind is Kind.OPAQUE:
            own = tuple(
                leaf(device.upload(x), parent.shape, parent.dtype)
                for parent, x in zip(node.inputs, inputs, strict=True)
            )
            alone = Node(node.primitive, own, node.attributes)
            realize([alone], device)
            values[node] = device.download(alone.value, node.dtype, node.shape).wait()
        else:
            values[node] = np.ascontiguousarray(computed(node, inputs))
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
    one, other = fused.astype(wide), unfused.astype(wide)
    with np.errstate(all="ignore"):
        same = (one == other) | ((one != one) & (other != other))
        difference = np.where(same, 0, np.abs(one - other)).astype(np.float64)
        difference = np.where(np.isnan(difference), np.inf, difference)
        size = np.abs(other).astype(np.float64)
    if atol is None:
        largest = np.max(size, initial=0, where=np.isfinite(size))
        atol = rtol * max(float(largest), _NOISE)
    allowed = atol + rtol * np.where(np.isfinite(size), size, 0)
    wrong = difference > allowed
    if not wrong.any():
        return
    # Of those that are wrong: another item may differ by more, and be allowed to.
    place = np.unravel_index(np.argmax(np.where(wrong, difference, -1)), fused.shape)
    raise AssertionError(
        f"{differ}, {kind}: by {difference[place]:.6g} at {tuple(int(at) for at in place)}, where the "
        f"{forms[0]} form has {fused[place]} and the {forms[1]} one {unfused[place]}. "
        f"That is the largest difference of {int(wrong.sum())} of {fused.size} items that "
        f"differ by more than rtol={rtol:g} and atol={atol:g} allow"
    )
