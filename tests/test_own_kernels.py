"""User-defined kernels: formulas, functions and raw sources, against NumPy and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import examples, one_opencl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_sources import Imagined
from test_programs import KINDS as DRIVERS

import penstock as ps
from penstock import Device
from penstock.drivers.cuda import compile_text
from penstock.drivers.driver import Kernel, Source
from penstock.errors import CompileError, KernelError
from penstock.testing import assert_fused_equal

pytestmark = one_opencl

SWISH = "x / (1 + exp(-x * beta))"
SOFTMAX = "exp(x - max(x)) / sum(exp(x - max(x)))"
NORM = "weight * (x - mean(x)) / sqrt(var(x) + 1e-5) + bias"


@pytest.fixture(params=[kind for kind in DRIVERS if kind != "opencl-mapped"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


@pytest.fixture(params=[kind for kind in DRIVERS if not kind.startswith("host")])
def compiling(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that takes texts."""
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


@pytest.fixture
def opencl() -> Iterator[Device]:
    made = Device.over(DRIVERS["opencl-device"]())
    yield made
    made.close()


def array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def at(device: Device, *arrays: np.ndarray) -> list[ps.Tensor]:
    return [ps.asarray(array, device=device) for array in arrays]


def swish_of(x: np.ndarray, beta: Any) -> np.ndarray:
    return x / (1 + np.exp(-x * beta))


def slope(function: Callable[[np.ndarray], Any], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of a sum, by finite differences."""
    result = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        result[place] = (np.sum(function(moved[0])) - np.sum(function(moved[1]))) / (2 * step)
    return result


# Formulas


def test_the_result_of_a_formula_is_a_tensor_of_its_own() -> None:
    x = ps.ones((2,), device="host").requires_grad_()
    y = ps.kernel("x")(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]
    before = ps.ones((2,), device="host")
    after = ps.kernel("x")(before)
    after.add_(1)
    assert (before.tolist(), after.tolist()) == ([1, 1], [2, 2])


def test_a_formula_gives_what_numpy_gives(device: Device) -> None:
    swish, x = ps.kernel(SWISH), array(5, 7)
    (tensor,) = at(device, x)
    for result in (
        swish(tensor, beta=1.5),
        swish(tensor, 1.5),
        swish(beta=1.5, x=tensor),
        ps.jit(swish)(tensor, 1.5),
    ):
        np.testing.assert_allclose(result.numpy(), swish_of(x, 1.5), rtol=1e-5, atol=1e-6)
    result = ps.jit(swish)(*at(device, x, array(7, seed=1)))
    np.testing.assert_allclose(result.numpy(), swish_of(x, array(7, seed=1)), rtol=1e-4, atol=1e-5)


def test_a_row_formula_gives_what_numpy_gives(device: Device) -> None:
    x = array(5, 7)
    powers = np.exp(x - x.max(-1, keepdims=True))
    result = ps.jit(ps.kernel(SOFTMAX))(*at(device, x))
    np.testing.assert_allclose(result.numpy(), powers / powers.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert ps.kernel("sum(x * x)")(*at(device, x)).shape == (5, 1)


@pytest.mark.slow("float16", "float64", "opencl-svm")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("formula", [SWISH, SOFTMAX, NORM, "abs(x) ** 1.5 if x > 0 else tanh(x) / 3"])
def test_fused_is_unfused_in_every_dtype(device: Device, dtype: str, formula: str) -> None:
    kernel = ps.kernel(formula)
    rows = {"beta": 1.5, "weight": at(device, array(9, seed=1, dtype=dtype))[0]}
    rows["bias"] = at(device, array(9, seed=2, dtype=dtype))[0]
    names = [name for name in kernel.__signature__.parameters if name != "x"]
    order = [
        at(device, array(4, 9, dtype=dtype))[0] if n == "x" else rows[n]
        for n in kernel.__signature__.parameters
    ]
    assert names == [name for name in rows if name in formula]
    assert_fused_equal(kernel, *order)


def test_gradients_are_those_of_finite_differences(device: Device) -> None:
    x, beta = array(3, 4, dtype=np.float64), array(4, seed=1, dtype=np.float64)
    swish = ps.kernel(SWISH)
    by_x, by_beta = ps.grad(lambda x, beta: swish(x, beta).sum(), (0, 1))(*at(device, x, beta))
    np.testing.assert_allclose(by_x.numpy(), slope(lambda x: swish_of(x, beta), x), atol=1e-7)
    np.testing.assert_allclose(by_beta.numpy(), slope(lambda beta: swish_of(x, beta), beta), atol=1e-7)


def test_whole_numbers_and_truths_have_formulas_too(device: Device) -> None:
    x = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    cases: dict[str, np.ndarray] = {
        "x % 4 + (x // 3 << 1)": x % 4 + (x // 3 << 1),
        "x & 5 | 8 ^ ~x": x & 5 | 8 ^ ~x,
        "-2 < x <= 3": (x > -2) & (x <= 3),
        "x > 2 or not (x < 0 and x != -3)": (x > 2) | ~((x < 0) & (x != -3)),
        "x if x > 0 else -1": np.where(x > 0, x, -1),
        "any(x > 4)": (x > 4).any(-1, keepdims=True),
        "clip(x, -2, 2) * sum(x)": np.clip(x, -2, 2) * x.sum(-1, keepdims=True),
    }
    for formula, expected in cases.items():
        (tensor,) = at(device, x)
        np.testing.assert_array_equal(ps.kernel(formula)(tensor).numpy(), expected, err_msg=formula)


def test_numbers_alone_are_numbers(device: Device) -> None:
    x = array(6, dtype=np.float16)
    (tensor,) = at(device, x)
    gelu = ps.kernel("0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))")
    assert gelu(tensor).dtype == ps.float16  # as sqrt(2 / pi) is no tensor of float32
    inner = np.sqrt(2 / np.pi) * (x.astype(float) + 0.044715 * x.astype(float) ** 3)
    np.testing.assert_allclose(gelu(tensor).numpy(), 0.5 * x * (1 + np.tanh(inner)), atol=3e-3)
    choose = ps.kernel(
        "(exp(x) if beta > 0 else x) * 2 ** -1 + clip(beta, 0, 1) + (not beta) + where(beta < 1, 1, 2)"
    )
    for beta in (0.5, -0.5):
        expected = (np.exp(x) if beta > 0 else x) / 2 + min(max(beta, 0), 1) + 1
        np.testing.assert_allclose(choose(tensor, beta).numpy(), expected, rtol=1e-2)


def test_parameters_stand_in_the_order_that_is_asked_for() -> None:
    assert str(ps.kernel("b * x + a").__signature__) == "(b, x, a)"
    assert str(ps.kernel("b if a > pi else sqrt(c)").__signature__) == "(b, a, c)"
    swapped = ps.kernel("b * x + a", parameters=("x", "a", "b"), name="line")
    assert repr(swapped) == "<kernel line(x, a, b): b * x + a>"
    assert swapped(ps.asarray([2.0]), 1.0, 10.0).tolist() == [21]
    assert ps.kernel("x * e + π", parameters=["x", "e", "π"])(ps.asarray([1.0]), 2.0, 3.0).tolist() == [5]


def test_a_function_gives_a_formula_its_name_and_defaults() -> None:
    @ps.kernel(SWISH)
    def swish(x: Any, beta: float = 1.0) -> Any:
        """A smooth step."""

    assert (swish.__name__, swish.__doc__) == ("swish", "A smooth step.")
    x = array(4)
    np.testing.assert_allclose(swish(ps.asarray(x)).numpy(), swish_of(x, 1), rtol=1e-5)
    with pytest.raises(
        KernelError, match=r"wrong has the parameters \['x', 'alpha'\], .* has \['x', 'beta'\]"
    ):

        @ps.kernel(SWISH)
        def wrong(x: Any, alpha: float) -> Any: ...


def test_a_formula_may_go_over_lines() -> None:
    kernel = ps.kernel("""
        x * scale
        + offset
    """)
    assert kernel(ps.asarray([1.0]), 2.0, 3.0).tolist() == [5]


@pytest.mark.parametrize(
    ("formula", "why", "mark"),
    [
        ("x +", "this is no expression", "   ^"),
        ("(x + 1", "'(' was never closed", "^"),
        ("x / (1 + expp(-x))", "'expp' is no function here; did you mean 'exp'?", "         ^^^^"),
        ("x @ y", "a matrix product (@) is not allowed in a formula", "^^^^^"),
        ("1 + x.T", "a dot is not allowed in a formula", "    ^^^"),
        ("x[0]", "an index is not allowed in a formula", "^^^^"),
        ("x + 'y'", "such a constant is not allowed in a formula", "    ^^^"),
        ("(lambda: x)()", "only functions can be called, by their names", " ^^^^^^^^^"),
        ("__import__('os')", "'__import__' is no function here", "^^^^^^^^^^"),
        ("x.__class__(1)", "only functions can be called, by their names", "^^^^^^^^^^^"),
        (
            "max(x, y)",
            "max takes 1 value, and 2 were given; of two values, item by item, there is maximum",
            "^^^^^^^^^",
        ),
        ("where(x, 1)", "where takes 3 values, and 2 were given", "^^^^^^^^^^^"),
        ("sum(x, axis=0)", "sum takes no keywords in a formula", "            ^"),
        ("x + exp", "'exp' is a function; call it, as in exp(x)", "    ^^^"),
        ("β * x in y", "'in' does not compare items", "^^^^^^^^^^"),
        ("sqrt(2 / pi)", "a formula needs a parameter, and this is a constant", "^^^^^^^^^^^^"),
        ("x +\n  y * soft(x)", "'soft' is no function here", "      ^^^^"),
        ("(y := x)", "an assignment is not allowed in a formula", " ^^^^^^"),
    ],
)
def test_what_is_no_formula_is_refused_at_its_place(formula: str, why: str, mark: str) -> None:
    with pytest.raises(KernelError) as raised:
        ps.kernel(formula)
    first, line, under = str(raised.value).split("\n")
    assert first.startswith(f"formula: {why}") or why in first
    assert line[4:] in formula.split("\n")
    assert under[4:] == mark


def test_parameters_that_cannot_be_are_refused() -> None:
    with pytest.raises(KernelError, match="'y' is not among the parameters \\['x'\\]"):
        ps.kernel("x + y", parameters=["x"])
    with pytest.raises(KernelError, match="does not use the parameter 'z'"):
        ps.kernel("x + y", parameters=["x", "y", "z"])
    with pytest.raises(KernelError, match="cannot be called 'max'"):
        ps.kernel("x", parameters=["max"])
    with pytest.raises(KernelError, match="have a name twice"):
        ps.kernel("x", parameters=["x", "x"])
    with pytest.raises(TypeError, match="a formula or a function, and int"):
        ps.kernel(3)  # type: ignore[call-overload]


def test_arguments_that_cannot_be_are_refused() -> None:
    swish = ps.kernel(SWISH, name="swish")
    x = ps.asarray([1.0])
    with pytest.raises(TypeError, match=r"swish\(x, beta\): missing a required argument: 'beta'"):
        swish(x)
    with pytest.raises(TypeError, match="takes tensors, NumPy arrays and numbers; beta is list"):
        swish(x, [1.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="needs a tensor"):
        swish(1.0, 2.0)
    with pytest.raises(TypeError, match="bitwise_and does not take float32") as raised:
        ps.kernel("x & 1", name="odd")(x)
    assert raised.value.__notes__ == ["in the kernel 'odd': x & 1"]
    with pytest.raises(TypeError, match="goes over the last axis of a tensor, and a tensor without axes"):
        ps.kernel("sum(x)")(ps.asarray(1.0))
    with pytest.raises(TypeError, match=r"and the number 2\.0 was given"):
        ps.kernel("x * sum(y)")(x, 2.0)


# Random formulas


def _grown(parts: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    """Formulas with moderate values and slopes and stable conditions; each also for NumPy."""
    unary = ["sin({})", "cos({})", "tanh({})", "exp(tanh({}))", "sqrt(1 + square({}))", "-{}", "mean(x * {})"]
    binary = ["({} + {})", "({} - {})", "({} * {})", "{} / (2 + sin({}))", "where(x > y, {}, {})"]
    same = [(text, text) for text in (*unary, *binary)]
    how = st.sampled_from([*same, ("({} if x < 0.25 else {})", "where(x < 0.25, {}, {})")])
    return st.builds(lambda how, a, b: tuple(map(str.format, how, a, b)), how, parts, parts)


_LEAVES = st.sampled_from(["x", "y", "beta", "0.5", "2", "max(x)", "min(y)", "sum(x) / 8"])
_NUMPY: dict[str, Any] = {
    name: partial(getattr(np, name), axis=-1, keepdims=True) for name in ("sum", "mean", "max", "min")
}
_NUMPY |= {name: getattr(np, name) for name in ("sin", "cos", "tanh", "exp", "sqrt", "square", "where")}


@settings(max_examples=examples(16, quick=8), deadline=None)
@given(st.recursive(_LEAVES.map(lambda leaf: (leaf, leaf)), _grown, max_leaves=6), st.integers(0, 3))
def test_random_formulas_agree_with_numpy_and_unfused(texts: tuple[str, str], seed: int) -> None:
    x, y = array(6, 8, seed=seed), array(8, seed=seed + 10)
    x[0, 0] = 0.25  # where a condition turns
    formula, own = (f"x * 0.5 + y * beta + {text}" for text in texts)
    kernel = ps.kernel(formula, parameters=("x", "y", "beta"))
    wide = {"x": x.astype(np.float64), "y": y.astype(np.float64), "beta": 0.75}
    expected = eval(own, {**_NUMPY, **wide})
    result = ps.jit(kernel)(ps.asarray(x), ps.asarray(y), 0.75).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert_fused_equal(kernel, x, y, 0.75, rtol=1e-4)


# Fusion


def steps(text: str) -> list[str]:
    return text.split("\n")[:-1]


def test_a_formula_and_its_neighbours_are_one_group(opencl: Device) -> None:
    swish, softmax = ps.kernel(SWISH), ps.kernel(SOFTMAX)
    x, y = at(opencl, array(64, 32), array(64, 32, seed=1))
    (only,) = steps(ps.explain(ps.exp(swish(x + y, 1.5)) * 2))
    assert only.startswith("1. map [")
    (only,) = steps(ps.explain(softmax(swish(x, 0.5) - y) * y))
    assert only.startswith("1. row [")
    backward = ps.grad(lambda x: (swish(x, 1.5) * y).sum())(x)
    assert len(steps(ps.explain(backward))) == 1


def test_a_number_that_changes_compiles_nothing(opencl: Device) -> None:
    from penstock.execution.realize import executables

    swish = ps.kernel(SWISH)
    (x,) = at(opencl, array(256, 256))
    for beta in (0.5, 1.25, 1.5, 2.5):  # 1.0 is in the formula too, and would be the same number there
        swish(x, beta).realize()
    assert len(executables(opencl)._programs) == 1


# Functions


@ps.kernel
def swish_function(x: ps.Tensor, beta: Any = 1.0) -> ps.Tensor:
    """A smooth step."""
    return x / (1 + ps.exp(-x * beta))


@ps.kernel
def norm(x: ps.Tensor, weight: ps.Tensor) -> ps.Tensor:
    centred = x - ps.mean(x, axis=-1, keepdims=True)
    return weight * centred / ps.sqrt(ps.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


def test_a_function_gives_what_it_gives_without(device: Device) -> None:
    x, weight = array(5, 7), array(7, seed=1)
    assert (swish_function.__name__, swish_function.__doc__) == ("swish_function", "A smooth step.")
    (tensor,) = at(device, x)
    np.testing.assert_allclose(
        swish_function(tensor, beta=1.5).numpy(), swish_of(x, 1.5), rtol=1e-5, atol=1e-6
    )
    assert_fused_equal(swish_function, tensor)
    assert_fused_equal(norm, *at(device, x, weight))
    assert_fused_equal(lambda x, w: ps.nn.functional.softmax(norm(x, w)) * x, *at(device, x, weight))
    requiring = tensor.requires_grad_()
    ps.jit(lambda: swish_function(requiring, 1.5).sum().backward())  # not called: only a function
    swish_function(requiring, 1.5).sum().backward()
    assert requiring.grad is not None


def test_networks_functions_are_kernels() -> None:
    x = ps.asarray(array(3, 5))
    for function in ("gelu", "silu", "softmax", "log_softmax", "relu", "sigmoid", "erf"):
        inner = getattr(ps.nn.functional, function)
        kernel = ps.kernel(lambda x, inner=inner: inner(x) * 2)
        np.testing.assert_allclose(kernel(x).numpy(), inner(x).numpy() * 2, rtol=1e-6)
        assert_fused_equal(kernel, x)


def test_a_change_in_place_is_none_of_the_callers() -> None:
    @ps.kernel
    def doubled(x: ps.Tensor) -> ps.Tensor:
        x *= 2
        return x

    x = ps.asarray([1.0, 2.0])
    assert doubled(x).tolist() == [2, 4]
    assert x.tolist() == [1, 2]


def test_kernels_call_kernels_inside_jit() -> None:
    @ps.kernel
    def outer(x: ps.Tensor) -> ps.Tensor:
        return swish_function(x) + ps.kernel("x * 2")(x)

    @ps.jit
    def step(x: ps.Tensor) -> ps.Tensor:
        return outer(x) * x

    x = array(5)
    np.testing.assert_allclose(step(ps.asarray(x)).numpy(), (swish_of(x, 1) + 2 * x) * x, rtol=1e-5)


MATRIX = ps.asarray(array(4, 4))
OUTSIDE = ps.asarray(array(4))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x @ x, "uses matmul"),
        (lambda x: x.T, "uses permute"),
        (lambda x: x[:2], "uses slice"),
        (lambda x: ps.cumulative_sum(x, axis=1), "uses cumulative_sum"),
        (lambda x: ps.concat([x, x]), "uses concat"),
        (lambda x: x + ps.arange(4, dtype=ps.float32), "uses sequence"),
        (lambda x: ps.sum(x, axis=0, keepdims=True), r"reduces the axes \(0,\) of shape \(4, 4\)"),
        (lambda x: x / ps.sum(x), r"reduces the axes \(0, 1\)"),
        (lambda x: x - ps.max(x, axis=1), "keepdims=True"),
        (lambda x: ps.mean(x, axis=-1), "keepdims=True"),
        (lambda x: ps.sum(x, axis=-1) + x[0, :], "uses slice|keepdims=True"),
        (lambda x: ps.reshape(x, (2, 8)), r"makes shape \(2, 8\) of \(4, 4\)"),
        (lambda x: x + OUTSIDE, r"uses float32\[4\], which is not among its arguments"),
        (lambda x: x + ps.random.normal((4, 4)), "which is not among its arguments|uses random"),
        (lambda x: x if ps.sum(x) > 0 else -x, "reads the value of bool"),
        (lambda x: x * x.numpy().max(), r"reads the value of float32\[4, 4\]"),
        (lambda x: x + ps.zeros((3, 1, 1)), r"gives shape \(3, 4, 4\), and its arguments have \(4, 4\)"),
        (lambda x: (x, x), "has to return a tensor, and it returned tuple"),
    ],
)
def test_a_function_that_is_no_kernel_is_refused(function: Callable[..., Any], why: str) -> None:
    function.__name__ = "mine"
    with pytest.raises(KernelError, match=f"kernel 'mine' .*({why})"):
        ps.kernel(function)(MATRIX)
    assert ps.sum(MATRIX).item() != 0  # nothing is left behind that would refuse values


def test_a_function_needs_a_tensor_and_no_options_of_formulas() -> None:
    with pytest.raises(TypeError, match="needs a tensor"):
        swish_function(1.0)
    with pytest.raises(KernelError, match="are for formulas"):
        ps.kernel(lambda x: x, parameters=["x"])  # type: ignore[call-overload]


# Gradients that are given


def test_a_gradient_can_be_given(device: Device) -> None:
    """A gradient that is deliberately not the true one, so that its use shows."""
    x, beta = at(device, array(3, 4), array(4, seed=1))

    def tripled(g: ps.Tensor, y: ps.Tensor, x: ps.Tensor, beta: Any) -> Any:
        return g * 3 * x, None if isinstance(beta, float) else g * y

    @ps.kernel(gradient=tripled)
    def by_function(x: ps.Tensor, beta: Any) -> ps.Tensor:
        return x * beta

    for kernel in (by_function, ps.kernel("x * beta", gradient=tripled)):
        by_x, by_beta = ps.grad(lambda x, beta, kernel=kernel: kernel(x, beta).sum(), (0, 1))(x, beta)
        np.testing.assert_allclose(by_x.numpy(), 3 * x.numpy(), rtol=1e-6)
        np.testing.assert_allclose(
            by_beta.numpy(), np.sum(x.numpy() * beta.numpy(), 0), rtol=1e-5
        )  # as broadcast
        by_x = ps.grad(lambda x, kernel=kernel: kernel(x, 2.0).sum())(x)
        np.testing.assert_allclose(by_x.numpy(), 3 * x.numpy(), rtol=1e-6)


def test_a_gradient_that_cannot_be_is_refused() -> None:
    x = ps.asarray(array(3, 4))
    wrong: dict[str, Callable[..., Any]] = {
        "for each of 2 arguments, and it returned 1": lambda g, y, x, z: g,
        "for each of 2 arguments, and it returned 3": lambda g, y, x, z: (g, g, g),
        r"with respect to argument 1 has to have its shape \(3, 4\), and has \(4,\)": lambda g, y, x, z: (
            g,
            g[0],
        ),
        "with respect to argument 0 has to be a tensor or None, and it is float": lambda g, y, x, z: (1.0, g),
    }
    for why, gradient in wrong.items():
        kernel = ps.kernel("x * z", gradient=gradient, name="mine")
        with pytest.raises(KernelError, match=f"the gradient of 'mine' .*{why}"):
            ps.grad(lambda x, kernel=kernel: kernel(x, x).sum())(x)


# Raw texts

LINE = "out[i] = alpha * x[i] + y[i];"
EVERYWHERE = {"opencl": LINE, "cuda": LINE, "wgsl": LINE}


def line(**options: Any) -> Any:
    how = {"inputs": ("x", "y"), "outputs": {"out": "x"}, "scalars": {"alpha": "float32"}}
    return ps.raw_kernel("line", EVERYWHERE, **{**how, **options})


def with_slope() -> Any:
    return line(gradient=lambda g, out, x, y, alpha: (g * alpha, g))


# Each group sums a row, in memory that its threads share.
ROW_SUMS = {
    "opencl": """
        LOCAL float parts[THREADS];
        float part = 0;
        for (int j = THREAD; j < x_shape_1; j += THREADS) part += x[GROUP_0 * x_shape_1 + j];
        parts[THREAD] = part;
        BARRIER;
        if (THREAD == 0) {
            float total = 0;
            for (int t = 0; t < THREADS; t++) total += parts[t];
            sums[GROUP_0] = total;
        }
    """,
    "wgsl": """
        var part = 0.0;
        for (var j = THREAD; j < x_shape_1; j += THREADS) { part += x[GROUP_0 * x_shape_1 + j]; }
        parts[THREAD] = part;
        workgroupBarrier();
        if (THREAD == 0) {
            var total = 0.0;
            for (var t = 0; t < THREADS; t++) { total += parts[t]; }
            sums[GROUP_0] = total;
        }
    """,
}
ROW_SUMS["cuda"] = ROW_SUMS["opencl"]
SHARED = {"wgsl": "var<workgroup> parts: array<f32, 32>;"}


def row_sums() -> Any:
    return ps.raw_kernel(
        "row_sums",
        ROW_SUMS,
        inputs={"x": "float32"},
        outputs={"sums": (lambda x: x.shape[:1], "float32")},
        grid=lambda x: x.shape[0],
        group=32,
        header=SHARED,
        gradient=lambda g, sums, x: ps.broadcast_to(ps.reshape(g, (-1, 1)), x.shape),
    )


def test_a_raw_kernel_gives_what_its_text_says(compiling: Device) -> None:
    x, y = array(50, 7), array(50, 7, seed=1)
    tensors = at(compiling, x, y)
    for alpha in (2.0, -0.5, 3):
        np.testing.assert_allclose(line()(*tensors, alpha).numpy(), alpha * x + y, atol=1e-6)
    for count in (1, 63, 64, 65, 1000):  # in one group, and in several of which the last is not full
        z = array(count)
        np.testing.assert_allclose(line()(*at(compiling, z, z), alpha=1.0).numpy(), z + z)


def test_a_raw_kernel_among_others_and_in_jit(compiling: Device) -> None:
    kernel, x, y = with_slope(), array(20, 6), array(20, 6, seed=1)
    tensors = at(compiling, x, y)

    def work(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        return kernel(ps.exp(x[::2]), kernel(y[1::2], y.T[1:, :10].T[:, [0, 0, 1, 2, 3, 4]], 0.5), 2.0) * 3

    inner = 0.5 * y[1::2] + y.T[1:, :10].T[:, [0, 0, 1, 2, 3, 4]]
    expected = (2 * np.exp(x[::2]) + inner) * 3
    jitted = ps.jit(work)
    for _ in range(3):
        np.testing.assert_allclose(jitted(*tensors).numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(work(*tensors).numpy(), expected, rtol=1e-5)
    assert_fused_equal(work, *tensors)


def test_constants_views_and_twice_the_same_are_inputs(compiling: Device) -> None:
    kernel, (x,) = line(), at(compiling, array(6, 6))
    ones = ps.ones((6, 6), device=compiling)
    np.testing.assert_allclose(kernel(x, x, 1.0).numpy(), 2 * x.numpy())
    np.testing.assert_allclose(kernel(ones, x.T, 3.0).numpy(), 3 + x.numpy().T)
    both = ps.jit(lambda x: kernel(ps.exp(x), ps.exp(x), 1.0))(x)
    np.testing.assert_allclose(both.numpy(), 2 * np.exp(x.numpy()), rtol=1e-5)
    np.testing.assert_allclose(
        kernel(ps.reshape(x, 36), ps.reshape(x, 36), 1.0).numpy(), 2 * x.numpy().ravel()
    )


def test_names_that_are_parts_of_vectors_too(compiling: Device) -> None:
    text = "{}(x[i], y[i]); out[i] = v.x * 2 + v.y;"
    vectors = {"opencl": "float2 v = (float2)", "cuda": "float2 v = make_float2", "wgsl": "let v = vec2<f32>"}
    sources = {language: text.format(vector) for language, vector in vectors.items()}
    kernel = ps.raw_kernel("parts", sources, inputs=["x", "y"], outputs={"out": "x"})
    (x,) = at(compiling, array(5))
    np.testing.assert_allclose(kernel(x, x).numpy(), 3 * x.numpy(), rtol=1e-6)
    np.testing.assert_allclose(kernel(x, x + 1).numpy(), 3 * x.numpy() + 1, rtol=1e-5, atol=1e-6)


def test_groups_that_work_together(compiling: Device) -> None:
    x = array(9, 100)
    tensors = at(compiling, x)
    np.testing.assert_allclose(row_sums()(*tensors).numpy(), x.sum(1), rtol=1e-4, atol=1e-5)
    assert_fused_equal(lambda x: row_sums()(x * 2) * 3, *tensors)


def test_several_outputs_of_which_some_are_not_needed(compiling: Device) -> None:
    body = "{sign} twice[i] = 2 * x[i];"
    sources = {
        "opencl": body.format(sign="signs[i] = x[i] > 0 ? 1 : -1;"),
        "cuda": body.format(sign="signs[i] = x[i] > 0 ? 1 : -1;"),
        "wgsl": body.format(sign="signs[i] = select(-1, 1, x[i] > 0);"),
    }
    kernel = ps.raw_kernel(
        "split",
        sources,
        inputs=["x"],
        outputs={"signs": (lambda x: x.shape, np.int32), "twice": "x"},
        gradient=lambda g, results, x: g[1] * 2 + results[1] * 0,
    )
    x = array(5, 3)
    (tensor,) = at(compiling, x)
    signs, twice = kernel(tensor)
    assert (signs.dtype, twice.dtype) == (ps.int32, ps.float32)
    np.testing.assert_array_equal(signs.numpy(), np.where(x > 0, 1, -1))
    np.testing.assert_allclose(twice.numpy(), 2 * x)
    for taken in range(2):
        result = ps.jit(lambda x, taken=taken: kernel(x + 1)[taken] * 2)(tensor)
        np.testing.assert_allclose(
            result.numpy(), [np.where(x + 1 > 0, 2, -2), 4 * (x + 1)][taken], rtol=1e-5
        )
    both = ps.jit(lambda x: [item * 2 for item in kernel(x)])(tensor)
    np.testing.assert_allclose(both[1].numpy(), 4 * x)
    by_x = ps.jit(ps.grad(lambda x: (kernel(x)[1] * x).sum()))(tensor)
    np.testing.assert_allclose(by_x.numpy(), 4 * x, rtol=1e-5)


def test_gradients_of_several_outputs_are_summed(opencl: Device) -> None:
    kernel = ps.raw_kernel(
        "powers",
        {"opencl": "square[i] = x[i] * x[i]; cube[i] = x[i] * x[i] * x[i];"},
        inputs=["x"],
        outputs={"square": "x", "cube": "x"},
        gradient=lambda g, results, x: g[0] * 2 * x + g[1] * 3 * results[0],
    )

    def loss(x: ps.Tensor) -> ps.Tensor:
        square, cube = kernel(x)
        return (square * 5 + cube * cube).sum()

    (x,) = at(opencl, array(6, dtype=np.float64))
    expected = slope(lambda x: 5 * x**2 + x**6, x.numpy())
    np.testing.assert_allclose(ps.grad(loss)(x).numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(ps.jit(ps.grad(loss))(x).numpy(), expected, rtol=1e-6)
    own = x.requires_grad_()
    loss(own).backward()
    np.testing.assert_allclose(own.grad.numpy(), expected, rtol=1e-6)
    again = ps.grad(lambda x: ps.checkpoint(loss, x))(x)
    np.testing.assert_allclose(again.numpy(), expected, rtol=1e-6)


def test_second_gradients_pass_through_a_given_one(opencl: Device) -> None:
    kernel = ps.raw_kernel(
        "squared",
        {"opencl": "out[i] = x[i] * x[i];"},
        inputs=["x"],
        outputs={"out": "x"},
        gradient=lambda g, out, x: g * 2 * x,
    )
    (x,) = at(opencl, array(4))
    second = ps.grad(lambda x: ps.grad(lambda x: (kernel(x) * x).sum())(x).sum())
    np.testing.assert_allclose(second(x).numpy(), 6 * x.numpy(), rtol=1e-5)


def test_every_dtype_of_c(opencl: Device) -> None:
    names = [
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        "float32",
        "float64",
    ]
    kernel = ps.raw_kernel(
        "copied", {"opencl": "x_type one = x[i]; out[i] = one;"}, inputs=["x"], outputs={"out": "x"}
    )
    for name in names:
        x = np.arange(-3, 5).astype(name)
        np.testing.assert_array_equal(kernel(*at(opencl, x)).numpy(), x, err_msg=name)
        np.testing.assert_array_equal(ps.jit(lambda x: kernel(x[::-1]))(*at(opencl, x)).numpy(), x[::-1])
    halves = ps.raw_kernel(
        "halved", {"opencl": "vstore_half(vload_half(i, x) / 2, i, out);"}, inputs=["x"], outputs={"out": "x"}
    )
    np.testing.assert_array_equal(
        halves(*at(opencl, array(5, dtype=np.float16))).numpy(), array(5, dtype=np.float16) / 2
    )


def test_scalars_have_their_own_dtypes_and_compile_nothing(compiling: Device) -> None:
    from penstock.execution.realize import executables

    text = "out[i] = x[i] + f32_cast(big) + f32_cast(small) * 0.5f;"
    sources = {
        "opencl": text.replace("f32_cast", "(float)"),
        "cuda": text.replace("f32_cast", "(float)"),
        "wgsl": text.replace("f32_cast", "f32"),
    }
    kernel = ps.raw_kernel(
        "sum_up",
        sources,
        inputs=["x"],
        outputs={"out": "x"},
        scalars={"big": "int32", "small": ps.float32},
    )
    x = array(4)
    for big, small in [(1 << 20, 0.25), (-(1 << 20), 1.5), (3, -1)]:
        result = kernel(*at(compiling, x), big, small=small).numpy()
        np.testing.assert_allclose(result, x + np.float32(big) + np.float32(small) / 2, rtol=1e-6, atol=1e-6)
    assert len(executables(compiling)._programs) == 1
    with pytest.raises(ValueError, match="takes int32 as big, which cannot be 2147483648"):
        kernel(*at(compiling, x), 1 << 31, 0.5)
    with pytest.raises(TypeError, match=r"takes a number of int32 as big, not 1\.5"):
        kernel(*at(compiling, x), 1.5, 0.5)


def test_a_scalar_of_fractions_beside_whole_numbers(opencl: Device) -> None:
    kernel = ps.raw_kernel(
        "rounded",
        {"opencl": "out[i] = (int)(x[i] * scale);"},
        inputs=["x"],
        outputs={"out": "x"},
        scalars={"scale": "float32"},
    )
    assert kernel(*at(opencl, np.array([2, 5, 8], np.int32)), 2.5).tolist() == [5, 12, 20]


def test_threads_grids_and_groups_of_several_axes(opencl: Device) -> None:
    pairs = ps.raw_kernel(
        "pairs",
        {"opencl": "out[2 * i] = x[2 * i + 1]; out[2 * i + 1] = x[2 * i];"},
        inputs=["x"],
        outputs={"out": "x"},
        threads=lambda x: x.size // 2,
        group=(4, 2),
    )
    assert pairs(*at(opencl, np.arange(6))).tolist() == [1, 0, 3, 2, 5, 4]
    transposed = ps.raw_kernel(
        "transposed",
        {
            "opencl": "int r = GROUP_1 * 2 + get_local_id(1), c = GROUP_0 * 3 + get_local_id(0);"
            "out[c * x_shape_0 + r] = x[r * x_shape_1 + c];"
        },
        inputs=["x"],
        outputs={"out": (lambda x: x.shape[::-1], lambda x: x.dtype)},
        grid=lambda x: (x.shape[1] // 3, x.shape[0] // 2),
        group=(3, 2),
    )
    x = array(4, 9)
    np.testing.assert_array_equal(transposed(*at(opencl, x)).numpy(), x.T)


def test_nothing_is_launched_for_empty_outputs(compiling: Device) -> None:
    x, y = at(compiling, array(0, 3), array(0, 3))
    assert with_slope()(x, y, 1.0).numpy().shape == (0, 3)
    copied = ps.raw_kernel(
        "lengths",
        dict.fromkeys(("opencl", "cuda"), "out[i] = x_size;") | {"wgsl": "out[i] = x_size;"},
        inputs=["x"],
        outputs={"out": (3, "int32")},
    )
    assert copied(ps.asarray(np.zeros((0, 3), np.int32), device=compiling)).tolist() == [0, 0, 0]


def test_raw_steps_are_explained_under_their_names(opencl: Device) -> None:
    x, y = at(opencl, array(64, 64), array(64, 64))
    lines = steps(ps.explain(line()(x * 2, y, 1.0) + y))
    assert [text.split(" -> ")[0] for text in lines] == [
        "1. map [full multiply]",
        "2. raw [line]",
        "3. map [add]",
    ]
    assert repr(line()) == "<kernel line(x, y, alpha) in OpenCL C, CUDA C, WGSL>"


def test_kernels_of_one_name_are_told_apart_by_their_texts(opencl: Device) -> None:
    (x,) = at(opencl, array(5))
    for factor in (2, 3):
        text = {"opencl": f"out[i] = twice(x[i]) * {factor};"}
        header = {"opencl": f"float twice(float x) {{ return {factor} * x; }}"}
        kernel = ps.raw_kernel("same", text, header=header, inputs=["x"], outputs={"out": "x"})
        np.testing.assert_allclose(
            ps.jit(lambda x, k=kernel: k(k(x)) + k(x[:5]))(x).numpy(),
            (factor**4 + factor**2) * x.numpy(),
            rtol=1e-5,
        )


def test_a_kernel_without_a_gradient_says_so(opencl: Device) -> None:
    x, y = at(opencl, array(4), array(4))
    with pytest.raises(TypeError, match=r"kernel 'line' has no gradient; pass gradient= to raw_kernel"):
        ps.grad(lambda x: line()(x, y, 1.0).sum())(x)
    own = x.requires_grad_()
    with ps.no_grad():
        assert not line()(own, y, 1.0).requires_grad
    assert ps.grad(lambda y: (line()(x.detach(), x.detach(), 1.0) * y).sum())(y).shape == (4,)


def test_a_device_of_another_language_is_refused() -> None:
    only_cuda = ps.raw_kernel("mine", {"cuda": LINE, "wgsl": LINE}, inputs=["x"], outputs={"out": "x"})
    host, opencl = (Device.over(DRIVERS[kind]()) for kind in ("host", "opencl-device"))
    with pytest.raises(
        KernelError, match="kernel 'mine' has source in CUDA C and WGSL, and host-plain compiles no kernels"
    ):
        only_cuda(*at(host, array(3)))
    with pytest.raises(KernelError, match="has source in CUDA C and WGSL, and opencl-device takes OpenCL C"):
        only_cuda(*at(opencl, array(3)))
    for device in (host, opencl):
        device.close()


def test_a_text_that_does_not_compile_is_named_with_the_compilers_words(compiling: Device) -> None:
    wrong = "int j = 0;\nout[i] = nonsense(x[i]);"
    kernel = ps.raw_kernel(
        "mine",
        {"opencl": wrong, "cuda": wrong, "wgsl": "out[i] = nonsense(x[i]);"},
        inputs=["x"],
        outputs={"out": "x"},
    )
    (x,) = at(compiling, array(3))
    with pytest.raises(CompileError, match=r"(?s)kernel 'mine' does not compile.*nonsense"):
        kernel(x).numpy()
    assert (x + 1).numpy().shape == (3,)


def test_lines_of_a_compiler_are_those_of_the_text(opencl: Device) -> None:
    kernel = ps.raw_kernel(
        "mine", {"opencl": "int j = 0;\nout[i] = nonsense(x[i]);"}, inputs=["x"], outputs={"out": "x"}
    )
    with pytest.raises(CompileError, match=r"error: mine:2:10: .*nonsense"):
        kernel(*at(opencl, array(3))).numpy()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"outputs": {"out": "z"}}, r"output 'out' is like 'z', and the inputs are \['x', 'y'\]"),
        ({"inputs": ("x", "x")}, "'x' would have two meanings"),
        ({"inputs": ("i", "y"), "outputs": {"out": "y"}}, "'i' would have two meanings"),
        ({"scalars": {"x_size": "int32"}}, "'x_size' would have two meanings"),
        ({"inputs": ("x", "a b")}, "'a b' is not a valid name"),
        ({"inputs": ()}, "needs a source, an input and an output"),
        ({"grid": 1, "threads": 1}, "give threads= or grid=, not both"),
        ({"header": {"metal": ""}}, "'metal' is no language"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(KernelError, match=why):
        line(**options)


def test_arguments_of_raw_kernels_that_cannot_be_are_refused(opencl: Device) -> None:
    x, y = at(opencl, array(4), array(4))
    with pytest.raises(TypeError, match=r"line\(x, y, alpha\): missing a required argument: 'alpha'"):
        line()(x, y)
    with pytest.raises(TypeError, match="takes a tensor as y, not float"):
        line()(x, 1.0, 1.0)
    with pytest.raises(TypeError, match="takes float32 as x, and float64 was given"):
        line(inputs={"x": "float32", "y": "float32"})(ps.astype(x, ps.float64), y, 1.0)
    with pytest.raises(TypeError, match="has no arrays of complex64, which x is"):
        line()(ps.astype(x, ps.complex64), y, 1.0)
    with pytest.raises(TypeError, match="has no scalars of float16, which alpha is"):
        line(scalars={"alpha": "float16"})(x, y, 1.0)
    with pytest.raises(
        KernelError, match="has workgroups of 1073741824 threads, and opencl-device allows at most"
    ):
        line(group=1 << 30)(x, y, 1.0)
    with pytest.raises(KernelError, match="threads cannot be 0"):
        line(threads=lambda x, y, alpha: 0)(x, y, 1.0)
    with pytest.raises(KernelError, match=r"the shape of out cannot be \(-1,\)"):
        line(outputs={"out": ((-1,), "float32")})(x, y, 1.0)
    with pytest.raises(TypeError, match=r"grid has to be integers, and is 1\.5"):
        line(grid=1.5)(x, y, 1.0)
    other = Device.over(DRIVERS["opencl-device"]())
    with pytest.raises(ValueError, match="use to_device first"):
        line()(x, *at(other, array(4)), 1.0)
    other.close()


class Compiled(Imagined):
    """A CUDA device that compiles texts, and computes nothing."""

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        assert isinstance(source, str)
        compile_text(source, "sm_90")
        return super().compile(source, signatures)


def test_texts_compile_for_cuda() -> None:
    device = Device.over(Compiled())
    x, y = at(device, array(4, 8), array(4, 8))
    line()(x, y, 2.0).realize()
    row_sums()(x).realize()
    wide = ps.raw_kernel(
        "wide",
        {"cuda": "out[i] = half_up(x[i], (unsigned long long)offset);"},
        header={
            "cuda": "__device__ long long half_up(long long x, unsigned long long y) { return x / 2 + y; }"
        },
        inputs=["x"],
        outputs={"out": "x"},
        scalars={"offset": "int64"},
    )
    wide(*at(device, np.arange(4)), 1).realize()
    bad = ps.raw_kernel("bad", {"cuda": "out[i] = nonsense;"}, inputs=["x"], outputs={"out": "x"})
    with pytest.raises(
        CompileError, match=r'(?s)kernel .bad. does not compile.*bad\(1\).*"nonsense" is undefined'
    ):
        bad(x).realize()
    device.close()


# Fused against unfused


def test_a_difference_is_told_with_its_place() -> None:
    calls = []

    def unstable(x: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        calls.append(1)  # the first call is that of the fused form
        bump = np.zeros((3, 4), np.float32)
        bump[1, 2] = 0.5 if len(calls) == 1 else 0
        return x * 2, x + ps.asarray(bump)

    with pytest.raises(
        AssertionError, match=r"in result 1, float32\[3, 4\]: by 0\.5 at \(1, 2\), .* 1 of 12 items"
    ):
        assert_fused_equal(unstable, np.ones((3, 4), np.float32), gradients=False)
    assert_fused_equal(unstable, np.ones((3, 4), np.float32), gradients=False)


def test_a_difference_of_gradients_is_told_with_the_argument() -> None:
    calls = []

    def unstable(x: ps.Tensor, y: ps.Tensor, factor: int) -> ps.Tensor:
        calls.append(1)
        slope = 2.0 if len(calls) <= 2 else 3.0
        return ps.kernel("x * y", gradient=lambda g, out, x, y: (g, g * slope))(x, y) * factor

    with pytest.raises(AssertionError, match="in the gradient by argument 1, float32"):
        assert_fused_equal(unstable, array(3), array(3, seed=1), 2)


def test_whole_numbers_must_be_equal_and_nans_alike() -> None:
    assert_fused_equal(lambda x: x * 3 + 1, np.arange(5))
    assert_fused_equal(
        lambda x: ps.log(x) / x, np.array([-1, 0, 1, np.inf, np.nan], np.float32), gradients=False
    )
    calls = []

    def off_by_one(x: ps.Tensor) -> ps.Tensor:
        calls.append(1)
        return x + len(calls)

    with pytest.raises(AssertionError, match="by 1 at"):
        assert_fused_equal(off_by_one, np.arange(3) + (1 << 60), rtol=0, atol=0)


def test_tolerances_can_be_given() -> None:
    calls = []

    def near(x: ps.Tensor) -> ps.Tensor:
        calls.append(1)
        return x + (0.01 if len(calls) == 1 else 0)

    assert_fused_equal(near, array(5), atol=0.02, gradients=False)
    calls.clear()
    with pytest.raises(AssertionError, match=r"rtol=1e-05 and atol=0\.001"):
        assert_fused_equal(near, array(5), atol=1e-3, gradients=False)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs an array or a tensor, not \['int'\]"):
        assert_fused_equal(lambda x: x, 3)
    with pytest.raises(TypeError, match="a function that gives a tensor"):
        assert_fused_equal(lambda x: 3, array(2))
