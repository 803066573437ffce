"""Invalid arguments, and tensors without items or axes: a clear error, or NumPy's result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import nn
from penstock.nn import functional as F  # noqa: N812


def test_a_gradient_is_a_tensor_like_its_own() -> None:
    x = ps.ones(3, device="host").requires_grad_()
    for gradient, error, message in (
        (1.0, TypeError, "a gradient is a tensor or None, and float was given"),
        (np.ones(3, np.float32), TypeError, "and ndarray was given"),
        (
            ps.ones(1, device="host"),
            ValueError,
            r"the shape \(1,\) is not for a tensor of float32 and \(3,\)",
        ),
        (ps.ones(3, dtype=ps.float64, device="host"), ValueError, "a gradient of float64"),
        (ps.ones(3, device="opencl:0"), ValueError, "on host and its gradient is on opencl:0"),
    ):
        with pytest.raises(error, match=message):
            x.grad = gradient  # type: ignore[assignment]
    assert x.grad is None
    x.grad = ps.ones(3, device="host")
    x.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_tensors_of_two_devices_are_refused_where_the_host_computes_too() -> None:
    here, there = ps.asarray([1.0, 2.0], device="host"), ps.asarray([1.0, 2.0], device="opencl:0")
    calls: list[Callable[[], Any]] = [
        lambda: ps.searchsorted(here, there),
        lambda: ps.masked_select(here, there > 1),
        lambda: ps.take_along_dim(here, ps.asarray([0], device="opencl:0")),
        lambda: ps.meshgrid(here, there, indexing="ij"),
        lambda: ps.searchsorted(here, np.asarray([1.5]), sorter=there),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"tensors are on .* use to_device first"):
            call()


# What stands behind the tensor in functions that need more.
MORE: dict[str, tuple[Any, ...]] = {
    "astype": (ps.float32,),
    "chunk": (2,),
    "clamp_max": (1,),
    "clamp_min": (1,),
    "cummax": (0,),
    "cummin": (0,),
    "gather": (0, None),
    "histogram": (3,),
    "index_add": (0, None, None),
    "index_select": (0, None),
    "kthvalue": (1,),
    "lerp": (1.0, 0.5),
    "log_softmax": (0,),
    "logcumsumexp": (0,),
    "masked_fill": (None, 0),
    "masked_select": (None,),
    "movedim": (0, 1),
    "narrow": (0, 0, 1),
    "pad": ((1, 1),),
    "permute": ((1, 0),),
    "quantile": (0.5,),
    "repeat_interleave": (2,),
    "scatter": (0, None, None),
    "scatter_add": (0, None, None),
    "softmax": (0,),
    "split": (1,),
    "swapaxes": (0, 1),
    "swapdims": (0, 1),
    "take_along_dim": (None,),
    "tensor_split": (2,),
    "topk": (1,),
    "unflatten": (0, (1, 1)),
    "unsqueeze": (0,),
    "broadcast_to": ((2, 2),),
    "full_like": (1,),
    "moveaxis": (0, 1),
    "permute_dims": ((1, 0),),
    "repeat": (2,),
    "reshape": ((4,),),
    "roll": (1,),
    "squeeze": (0,),
    "take": (ps.asarray([0]),),
    "tile": ((2,),),
}
NOT_OF_TENSORS = """
    advise arange asarray can_cast cat checkpoint cleanup commit concat concatenate default_device devices
    einsum empty explain eye finfo from_dlpack full grad iinfo is_tensor isdtype jit kernel linspace load
    manual_seed matmul_batch no_grad ones profile quantize rand randint randn randperm raw_kernel result_type
    save stack sync tensor use value_and_grad zeros __array_namespace_info__"""
FUNCTIONS = [
    name
    for name in ps.__all__
    if inspect.isfunction(getattr(ps, name)) and name not in NOT_OF_TENSORS.split()
]
REDUCTIONS = ["sum", "prod", "max", "min", "mean", "var", "std", "all", "any", "argmax", "argmin"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_tensor_is_refused_by_name(name: str) -> None:
    function = getattr(ps, name)
    kinds = inspect.signature(function).parameters.values()
    needed = [kind for kind in kinds if kind.kind is kind.POSITIONAL_ONLY and kind.default is kind.empty]
    for wrong in ([1.0, 2.0], (1, 2), None, "a", {1}, object()):
        more = MORE.get(name, (wrong,) * (len(needed) - 1))
        with pytest.raises(TypeError, match=f"{name}|{function.__name__}") as refused:
            function(wrong, *more)
        assert type(wrong).__name__ in str(refused.value)
        assert "attribute" not in str(refused.value)


def test_the_error_for_a_list_says_what_would_work() -> None:
    with pytest.raises(TypeError, match=r"^sum takes a tensor, and list was given; ps\.asarray makes one"):
        ps.sum([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"add needs a tensor, and .*'list', 'list'.* were given; ps.asarray"):
        ps.add([1, 2], [3, 4])


@pytest.mark.parametrize("wrong", [[1.0], 3, ps.jit(lambda x: x)])
def test_what_cannot_be_explained_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"explain takes tensors, and {type(wrong).__name__} was given"):
        ps.explain(wrong)
    two = ps.ones(3, device="host"), ps.ones(3, device="opencl")
    with pytest.raises(ValueError, match=r"tensors of one device, and those of \['host', 'opencl:0'\]"):
        ps.explain(*two)


SHAPED: dict[str, Callable[[Any], Any]] = {
    "zeros": ps.zeros,
    "ones": ps.ones,
    "empty": ps.empty,
    "full": lambda shape: ps.full(shape, 1.0),
    "broadcast_to": lambda shape: ps.broadcast_to(ps.asarray(1.0), shape),
    "reshape": lambda shape: ps.reshape(ps.ones((6,)), shape),
    "tile": lambda shape: ps.tile(ps.ones((2,)), shape),
    "uniform": ps.random.uniform,
    "normal": ps.random.normal,
    "integers": lambda shape: ps.random.integers(0, 5, shape),
    "bernoulli": lambda shape: ps.random.bernoulli(0.5, shape),
    "rand": lambda shape: ps.random.rand(*shape) if isinstance(shape, tuple) else ps.random.rand(shape),
}


@pytest.mark.parametrize("name", SHAPED)
def test_a_shape_has_integers(name: str) -> None:
    for wrong in ((2.5,), (2, 3.0), "23", ("2",), None, 2.5, (None,)):
        with pytest.raises(TypeError, match="a shape is an integer or a tuple of integers, not"):
            SHAPED[name](wrong)
    if name not in ("broadcast_to", "tile"):
        assert SHAPED[name]((np.int64(2), np.uint8(3))).shape == (2, 3)
        assert SHAPED[name](np.int32(6)).shape == (6,)
    if name != "reshape":
        with pytest.raises(ValueError, match="no negative lengths"):
            SHAPED[name]((-2, 3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ps.arange("5"), "arange takes finite real numbers, and '5'"),
        (lambda: ps.arange(0, 5, 1j), "arange takes finite real numbers, and 1j"),
        (lambda: ps.arange(float("nan")), "arange takes finite real numbers, and nan"),
        (lambda: ps.linspace(0, 1, 2.5), "linspace: num is an integer, not 2.5"),
        (lambda: ps.linspace("0", 1, 2), "linspace takes a number, and str"),
        (lambda: ps.eye(2.5), "eye: a shape is an integer or a tuple of integers"),
        (lambda: ps.eye(2, k=0.5), "eye: k is an integer, not 0.5"),
        (lambda: ps.zeros(2, dtype="float99"), "is no dtype of Penstock"),
        (lambda: ps.permute_dims(ps.ones((2, 2)), (0, 1.0)), "permute_dims: an order of axes"),
        (lambda: ps.expand_dims(ps.ones(2), axis=0.5), "expand_dims: an axis is an integer"),
        (lambda: ps.roll(ps.ones(2), 0.5), "roll: a shift is an integer"),
        (lambda: ps.diff(ps.ones(2), n=0.5), "diff: n is an integer"),
    ],
)
def test_numbers_that_do_not_fit_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_axes_are_integers_of_any_kind(name: str) -> None:
    array = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    function = getattr(ps, name)
    result = function(ps.asarray(array), axis=np.int64(1))
    np.testing.assert_allclose(result.numpy(), getattr(np, name)(array, axis=1))
    for wrong in (1.5, "0", (0, 1.0)):
        with pytest.raises(TypeError, match=f"{name}: an axis is an integer or a tuple of integers"):
            function(ps.asarray(array), axis=wrong)


# No axes


@pytest.mark.parametrize(
    "name", [*REDUCTIONS, "sort", "argsort", "flip", "unstack", "cumulative_sum", "diff"]
)
def test_a_tensor_without_axes_has_none(name: str) -> None:
    x, function = ps.asarray(3.0), getattr(ps, name)
    for axis in (0, -1):
        with pytest.raises(IndexError, match=rf"{name}: axis {axis} is out of range for shape \(\)"):
            function(x, axis=axis)
    if name in REDUCTIONS:
        assert function(x).item() == getattr(np, name)(np.float32(3))
        assert function(x, keepdims=True).shape == ()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.softmax(x),
        lambda x: F.log_softmax(x),
        lambda x: ps.tensordot(x, x, axes=([0], [0])),
        lambda x: ps.moveaxis(x, 0, 0),
        lambda x: ps.permute_dims(x, (0,)),
        lambda x: ps.roll(x, 1, axis=0),
        lambda x: ps.squeeze(x, 0),
        lambda x: ps.vecdot(x, x),
        lambda x: ps.concat([x, x]),
        lambda x: ps.take_along_axis(x, x),
        lambda x: ps.repeat(x, 2, axis=0),
    ],
)
def test_other_functions_find_no_axis_either(call: Callable[[ps.Tensor], Any]) -> None:
    with pytest.raises(IndexError, match=r"\(\)"):
        call(ps.asarray(3.0))


def test_tensordot_sums_over_axes_that_are_there() -> None:
    x = ps.ones((2, 3))
    assert ps.tensordot(ps.asarray(2.0), ps.asarray(3.0), axes=0).item() == 6
    for axes in (3, -1):
        with pytest.raises(ValueError, match=r"have no -?[0-9] axes to sum over"):
            ps.tensordot(x, x, axes=axes)


# No items

EMPTY = [((0,), 0), ((2, 0), 1), ((2, 0), 0), ((0, 3), 0), ((0, 3), 1)]


@pytest.mark.parametrize(("shape", "axis"), EMPTY)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_reductions_of_nothing_are_numpys(shape: tuple[int, ...], axis: int) -> None:
    array = np.zeros(shape, np.float32)
    for name in REDUCTIONS:
        for options in ({}, {"axis": axis}, {"axis": axis, "keepdims": True}):
            try:
                expected = getattr(np, name)(array, **options)
            except ValueError:
                with pytest.raises(ValueError, match=f"{name} of nothing"):
                    getattr(ps, name)(ps.asarray(array), **options)
            else:
                np.testing.assert_array_equal(
                    getattr(ps, name)(ps.asarray(array), **options).numpy(), expected
                )


@pytest.mark.parametrize(("shape", "axis"), EMPTY)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_softmax_of_nothing_is_nothing(name: str, shape: tuple[int, ...], axis: int) -> None:
    for wrap in (lambda f: f, ps.jit):
        x = ps.zeros(shape).requires_grad_()
        assert wrap(lambda x: getattr(F, name)(x, axis))(x.detach()).numpy().shape == shape
        ps.sum(getattr(F, name)(x, axis)).backward()
        assert x.grad is not None
        assert x.grad.numpy().shape == shape


def test_attention_without_keys_gives_zeros() -> None:
    query, nothing = ps.ones((1, 1, 2, 4)), ps.zeros((1, 1, 0, 4))
    assert not np.any(F.scaled_dot_product_attention(query, nothing, nothing).numpy())
    assert F.scaled_dot_product_attention(nothing, query, query).numpy().shape == (1, 1, 0, 4)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_masks_without_items_select_nothing(shape: tuple[int, ...]) -> None:
    array, mask = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for key in (mask, ps.asarray(mask)):
        x = ps.asarray(array)
        assert x[key].numpy().shape == array[mask].shape == (0,)
        x[key] = 1.0
        x[key] = ps.zeros((0,))
        assert x.numpy().shape == shape


def test_masks_that_select_nothing() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for mask in (np.zeros((2, 3), bool), np.zeros(2, bool)):
        x = ps.asarray(array)
        assert x[mask].numpy().shape == array[mask].shape
        x[mask] = 7.0
        np.testing.assert_array_equal(x.numpy(), array)
    for wrong in (np.zeros(0, bool), np.zeros((2, 0), bool)):
        with pytest.raises(IndexError, match="does not fit shape"):
            ps.asarray(array)[wrong]
    assert ps.asarray(array)[[]].shape == (0, 3)


# Gradients through functions that leave real numbers as they are


@pytest.mark.slow("float64", "bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda f: f, ps.jit])
def test_gradients_pass_conj_real_and_vecdot(dtype: str, wrap: Any) -> None:
    a, b = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([[0.5, 4.0], [-2.0, 8.0]])
    x, y = (ps.asarray(array, dtype=dtype) for array in (a, b))
    for loss, expected in (
        (lambda x, y: ps.sum(ps.conj(x) * y), (b, a)),
        (lambda x, y: ps.sum(ps.real(x) * y), (b, a)),
        (lambda x, y: ps.sum(ps.vecdot(x, y)), (b, a)),
        (lambda x, y: ps.sum(ps.vecdot(x, y, axis=0)), (b, a)),
        (lambda x, y: ps.sum(ps.tensordot(x, y)), (b, a)),
    ):
        for result, slope in zip(wrap(ps.grad(loss, (0, 1)))(x, y), expected, strict=True):
            np.testing.assert_array_equal(result.numpy().astype(np.float64), slope)


def test_a_gradient_is_not_lost_in_complex_numbers() -> None:
    x = ps.ones((2,)).requires_grad_()
    for use in (lambda: x * 1j, lambda: x.astype(ps.complex64), lambda: x + ps.asarray([1j, 2j])):
        with pytest.raises(TypeError, match="no gradient passes complex numbers"):
            use()
    with ps.no_grad():
        assert (x * 1j).dtype == ps.complex64
    assert (x.detach() * 1j).tolist() == [1j, 1j]


# All devices


def test_sync_commit_and_cleanup_are_for_all_open_devices() -> None:
    devices = [ps.devices()[-1], ps.default_device()]
    squares = [ps.ones((64, 64), device=device) for device in devices]
    results = [(square @ square).realize() for square in squares]
    ps.commit()
    ps.sync()
    assert all(device.stream.idle for device in devices)
    assert all(result.tolist()[0][0] == 64 for result in results)
    del squares, results
    ps.cleanup()
    ps.cleanup()
    assert all(device.pool.stats().total_pooled == 0 for device in devices)
    assert (ps.ones((2,)) + 1).tolist() == [2, 2]


def test_a_failure_of_one_device_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    (ps.ones((2,), device="host") + ps.ones((2,), device="host")).realize()
    (ps.ones((2,)) + 1).realize()
    synced: list[str] = []

    def fail(device: ps.Device) -> None:
        synced.append(device.name)
        raise RuntimeError(device.name)

    monkeypatch.setattr(ps.Device, "sync", fail)
    with pytest.raises(RuntimeError):
        ps.sync()
    assert {"host", ps.default_device().name} <= set(synced)


# What a raw kernel computes


def test_assert_fused_equal_takes_a_reference() -> None:
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    check = ps.testing.assert_fused_equal
    check(lambda x: ps.exp(x) * 2, x, reference=lambda x: np.exp(x) * 2)
    check(lambda x: {"a": x + 1, "b": [x > 0]}, x, reference=lambda x: {"a": x + 1, "b": [x > 0]})
    with pytest.raises(AssertionError, match=r"fused and reference differ in result 0.*at \(2, 3\)"):
        check(lambda x: ps.exp(x) * 2, x, reference=lambda x: np.exp(x) * 2 + (x == 2))
    with pytest.raises(AssertionError, match=r"reference differ in result 1: .*\[3, 4\] and .*\[3\]"):
        check(lambda x: (x, x), x, reference=lambda x: (x, x[:, 0]))
    with pytest.raises(TypeError, match="the reference gives 1 results, and the function 2"):
        check(lambda x: (x, x), x, reference=lambda x: x)


def test_a_wrong_raw_kernel_is_caught_by_a_reference() -> None:
    def kernel(factor: int) -> Any:
        return ps.raw_kernel(
            "scaled", {"opencl": f"out[i] = {factor} * x[i];"}, inputs=["x"], outputs={"out": "x"}
        )

    x = ps.asarray(np.arange(6, dtype=np.float32), device="opencl")
    for factor in (2, 3):
        ps.testing.assert_fused_equal(kernel(factor), x, gradients=False)
    ps.testing.assert_fused_equal(kernel(2), x, gradients=False, reference=lambda x: 2 * x)
    with pytest.raises(AssertionError, match="fused and reference differ in result 0"):
        ps.testing.assert_fused_equal(kernel(3), x, gradients=False, reference=lambda x: 2 * x)


def test_modules_name_what_they_cannot_take() -> None:
    with pytest.raises(TypeError, match="an axis is an integer"):
        nn.Softmax(axis=0.5)(ps.ones((2, 2)))  # type: ignore[arg-type]
