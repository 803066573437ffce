"""The same expression gives the same bits at every call, and a seed the same numbers under jit as outside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import surface

import penstock as ps
from penstock import Device, nn

pytestmark = surface

SHAPE = (300, 130)  # more than what NumPy computes as small

EXPRESSIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "sum": ps.sum,
    "rows": lambda x: ps.sum(x, axis=1),
    "columns": lambda x: ps.mean(x, axis=0),
    "std": ps.std,
    "exp": ps.exp,
    "sin": ps.sin,
    "divide": lambda x: x / 3,
    "square root": lambda x: ps.sqrt(ps.abs(x)),
    "power": lambda x: ps.abs(x) ** 1.7,
    "a product and a sum": lambda x: x * 1.1 + 0.3,
    "softmax": nn.functional.softmax,
    "gelu": nn.functional.gelu,
    "product of matrices": lambda x: x @ x.T,
    "cumulative sum": lambda x: ps.cumulative_sum(x, axis=1),
    "half precision": lambda x: ps.sum(x.astype(ps.float16) * 3, axis=0),
    "moves": lambda x: ps.concat([x, -x], axis=0)[::2] + 1,
    "tanh": ps.tanh,
    "sort": ps.sort,
    "gradient": ps.grad(lambda x: ps.sum(ps.tanh(x) ** 2)),
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_each_call_gives_the_same_bits(device: Device, name: str) -> None:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    results = [EXPRESSIONS[name](ps.asarray(values, device=device)).numpy().tobytes() for _ in range(3)]
    assert results[0] == results[1] == results[2]


@pytest.mark.slow("webgpu")
def test_sorted_items_are_the_same_with_a_gradient(device: Device) -> None:
    values = np.random.default_rng(0).standard_normal((20, 70)).astype(np.float32)
    values[3, :4] = 0.0, -0.0, np.nan, 0.0
    x = ps.asarray(values, device=device)
    plain = ps.sort(x).numpy()
    tracked = x.detach().requires_grad_()
    assert ps.sort(tracked).numpy().tobytes() == plain.tobytes()
    assert plain.tobytes() == np.sort(values, axis=-1, kind="stable").tobytes()
    assert ps.jit(ps.sort)(x).numpy().tobytes() == plain.tobytes()


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("shape", [(3, 32772), (5, 60000), (40, 9000)])  # rows in parts, and whole
def test_so_does_each_of_many_calls(device: Device, shape: tuple[int, int]) -> None:
    """Wherever inputs and results lie, and whatever lay there before."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)]

    def norms(x: ps.Tensor, w: ps.Tensor) -> list[ps.Tensor]:
        centred = x - ps.mean(x, axis=-1, keepdims=True)
        variance = ps.mean(centred * centred, axis=-1, keepdims=True)
        return [nn.functional.softmax(x), centred / ps.sqrt(variance + 1e-5) * w, ps.sum(x * w, axis=-1)]

    jitted = ps.jit(norms)
    x, w = (ps.asarray(array, device=device) for array in arrays)
    first = [result.numpy() for result in jitted(x, w)]
    kept = []
    for call in range(30):
        if call % 3 == 0:  # other memory for the inputs, and for the results, and other values in it
            x, w = (ps.asarray(array, device=device) for array in arrays)
            kept.append(ps.exp(x * call))
            kept = kept[-4:]
        for result, same in zip(jitted(x, w), first, strict=True):
            np.testing.assert_array_equal(result.numpy(), same, err_msg=f"call {call}")


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("size", [50, 40000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_so_does_half_precision_and_a_jitted_function(device: Device, dtype: str, size: int) -> None:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(size).astype(np.float32) for _ in range(3)]
    a, b, c = (ps.asarray(array, device=device).astype(getattr(ps, dtype)) for array in given)
    functions: list[Callable[..., ps.Tensor]] = [
        lambda a, b, c: a * b + c,
        lambda a, b, c: a + b + c,
        lambda a, b, c: a * b * c,
        lambda a, b, c: a + b > c,
    ]
    for function in functions:
        expected = ps.jit(function)(a, b, c).numpy().tobytes()
        assert {function(a, b, c).numpy().tobytes() for _ in range(3)} == {expected}


SLICED: dict[str, tuple[tuple[int, ...], Callable[[ps.Tensor], ps.Tensor]]] = {
    "a block": ((50, 40), lambda x: ps.sum(ps.exp(x[1:48, 3:37]))),
    "a reshaped block": ((65, 5, 20), lambda x: ps.sum(ps.reshape(x[:, :, :16], (65, 80)), axis=1)),
    "odd parts": ((65, 5, 20), lambda x: ps.sum(ps.reshape(x[:, :, :15], (65, 75)), axis=1)),
}


@pytest.mark.parametrize("name", SLICED)
def test_sums_of_slices(device: Device, name: str) -> None:
    shape, function = SLICED[name]
    x = ps.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32), device=device)
    expected = ps.jit(function)(x).numpy().tobytes()
    assert {function(x).numpy().tobytes() for _ in range(12)} == {expected}


def draws(generator: ps.random.Generator) -> list[Callable[[], ps.Tensor]]:
    return [
        lambda: generator.uniform((7, 5)),
        lambda: generator.integers(-5, 1000, 33),
        lambda: generator.bernoulli(0.3, (4, 9)),
        lambda: generator.uniform(3, dtype=ps.float16),
        lambda: generator.permutation(11),
    ]


def drawn(device: Device, jitted: Callable[[int], bool]) -> list[list[float]]:
    """Ten draws of five kinds, some of them under jit."""
    functions = draws(ps.random.Generator(5, device))
    inside = [ps.jit(function) for function in functions]
    return [
        (inside if jitted(turn) else functions)[turn % len(functions)]().numpy().tolist()
        for turn in range(10)
    ]


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize(
    "jitted", [lambda turn: True, lambda turn: turn % 3 == 0, lambda turn: turn > 4, lambda turn: turn < 3]
)
def test_a_seed_gives_the_same_numbers_under_jit_as_outside(
    device: Device, jitted: Callable[[int], bool]
) -> None:
    assert drawn(device, jitted) == drawn(device, lambda turn: False)


def test_several_draws_of_one_jitted_function(device: Device) -> None:
    def three(generator: ps.random.Generator) -> list[ps.Tensor]:
        return [generator.uniform(9), generator.bernoulli(0.5, 40), generator.uniform((2, 3))]

    first, second = ps.random.Generator(3, device), ps.random.Generator(3, device)
    jitted = ps.jit(lambda: three(second))
    for _ in range(3):
        for expected, got in zip(three(first), jitted(), strict=True):
            np.testing.assert_array_equal(got.numpy(), expected.numpy())
    assert first.state() == second.state()


def test_jitted_functions_of_one_generator_share_its_sequence(device: Device) -> None:
    eager, captured = ps.random.Generator(3, device), ps.random.Generator(3, device)
    first, second = ps.jit(lambda: captured.uniform(6)), ps.jit(lambda: captured.uniform(6) + 0)
    for function in (first, second, second, first):
        np.testing.assert_array_equal(function().numpy(), eager.uniform(6).numpy())


def test_a_state_goes_on_under_jit_and_outside(device: Device) -> None:
    generator = ps.random.Generator(8, device)
    jitted = ps.jit(lambda: generator.uniform(5))
    jitted(), generator.uniform(2), jitted()
    kept = generator.state()
    expected = [jitted().numpy(), generator.uniform(5).numpy()]
    generator.set_state(kept)
    np.testing.assert_array_equal(generator.uniform(5).numpy(), expected[0])
    np.testing.assert_array_equal(jitted().numpy(), expected[1])


def test_dropout_and_the_weights_of_modules(device: Device) -> None:
    before = ps.default_device()
    ps.use(device)
    try:
        x = ps.ones((40, 50))
        result = []
        for wrap in (lambda f: f, ps.jit):
            ps.random.manual_seed(4)
            layer = wrap(nn.Dropout(0.4).__call__)
            masks = [layer(x).numpy() for _ in range(2)]
            result.append([*masks, nn.Linear(30, 20).weight.numpy()])
        for eager, jitted in zip(*result, strict=True):
            np.testing.assert_array_equal(eager, jitted)
    finally:
        ps.use(before)
