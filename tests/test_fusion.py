"""Groups as pure functions of graphs, and their kernels against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_graph import at

import penstock as ps
from penstock import Device
from penstock.fusion.groups import Group, partition
from penstock.graph import contraction, elementwise, reducing, shaping
from penstock.graph.node import Node
from penstock.kernels import cache
from penstock.kernels.map_kernel import constants, map_kernel, structure, vector_width

ALONE = ("matmul", "sum")


def steps(*wanted: Node) -> list[Group | Node]:
    return partition(wanted, lambda node: node.primitive.name not in ALONE)


def x_(*shape: int) -> Node:
    return at(np.ones(shape or (4, 4), np.float32))


def number(like: Node, value: float) -> Node:
    return elementwise.like(like, value)


def test_a_chain_is_one_group() -> None:
    x, y = x_(), x_()
    out = elementwise.exp(elementwise.add(elementwise.multiply(x, y), number(x, 2)))
    (group,) = steps(out)
    assert isinstance(group, Group)
    assert group.inputs == (x, y)
    assert [node.primitive.name for node in group.nodes] == ["multiply", "full", "add", "exp"]


def test_views_and_broadcasts_are_inside() -> None:
    x = x_(4, 1)
    wide = reducing.expand(x, (4, 4))
    (group,) = steps(elementwise.add(shaping.permute(wide, (1, 0)), wide))
    assert isinstance(group, Group)
    assert group.inputs == (x,)


def test_what_many_need_is_computed_once() -> None:
    shared = elementwise.exp(x_())
    first, second = elementwise.sin(shared), elementwise.cos(shared)
    found = steps(first, second)
    assert [step.output for step in found if isinstance(step, Group)] == [shared, first, second]
    assert found[1].inputs == found[2].inputs == (shared,)


def test_what_costs_nothing_is_computed_again() -> None:
    x = x_()
    moved = shaping.permute(x, (1, 0))
    found = steps(elementwise.sin(moved), elementwise.cos(moved))
    assert [step.inputs for step in found] == [(x,), (x,)]


def test_other_primitives_stand_alone_with_groups_around_them() -> None:
    x = x_()
    product = contraction.matmul(elementwise.exp(x), x)
    found = steps(elementwise.tanh(product))
    assert [type(step) for step in found] == [Group, Node, Group]
    assert found[1] is product


def test_computed_values_are_inputs() -> None:
    y = elementwise.exp(x_())
    y.settle("somewhere")
    (group,) = steps(elementwise.log(y))
    assert group.inputs == (y,)


def test_groups_are_bounded() -> None:
    node = x_()
    for _ in range(300):
        node = elementwise.sin(node)
    found = steps(node)
    assert len(found) == 5
    assert all(isinstance(step, Group) and len(step.nodes) <= 64 for step in found)


def group_of(out: Node) -> Group:
    (group,) = steps(out)
    assert isinstance(group, Group)
    return group


def test_constants_are_arguments_and_not_part_of_the_structure() -> None:
    x = x_()
    one, two = (group_of(elementwise.multiply(x, number(x, value))) for value in (1.0, 2.0))
    assert structure(one) == structure(two)
    assert (constants(one), constants(two)) == ([1.0], [2.0])
    assert map_kernel(one, "k", 1) == map_kernel(two, "k", 1)
    assert structure(one) != structure(group_of(elementwise.add(x, number(x, 1.0))))


def test_vectors_are_for_float32_in_order() -> None:
    x = x_()
    assert vector_width(group_of(elementwise.exp(x)), 16) == 8
    assert vector_width(group_of(elementwise.exp(shaping.permute(x, (1, 0)))), 16) == 1
    assert vector_width(group_of(elementwise.less(x, x)), 16) == 1
    assert vector_width(group_of(elementwise.exp(x)), 1) == 1


# On devices


@pytest.fixture(params=[kind for kind in DRIVERS if kind.startswith("opencl")])
def eager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device that computes groups of any size by kernels, once it has seen them."""
    monkeypatch.setattr(cache, "MIN_ITEMS", 1)
    device = Device.over(DRIVERS[request.param]())
    yield device
    device.close()


def twice(expression: Any, *arrays: Any) -> np.ndarray:
    """The second of two computations: the first only makes the structure known."""
    expression(*arrays).numpy()
    return expression(*arrays).numpy()


def test_kernels_run_on_the_second_time(eager: Device) -> None:
    x = ps.asarray(np.ones(1000, np.float32), device=eager)
    launched: list[str] = []
    real = eager.stream.launch
    eager.stream.launch = lambda kernel, *rest: (launched.append(kernel.name), real(kernel, *rest))  # type: ignore[method-assign, assignment, func-returns-value]
    for count in range(3):
        assert ps.sum(x * 2 + 1).item() == 3000
        assert len(launched) == count


def test_every_function_agrees_with_numpy(eager: Device) -> None:
    a, b = np.random.default_rng(0).uniform(0.1, 0.9, (2, 999)).astype(np.float32)
    a[:3], b[1:4] = (np.nan, 1, 1), (np.nan, np.nan, 0.5)
    x, y = ps.asarray(a, device=eager), ps.asarray(b, device=eager)
    first = "exp expm1 log log1p log2 log10 sqrt sin cos tan asin"
    second = "acos atan sinh cosh tanh asinh atanh floor ceil trunc abs sign negative round"
    for names in (first.split(), second.split()):
        with np.errstate(all="ignore"):
            aliases = {
                "asin": "arcsin",
                "acos": "arccos",
                "atan": "arctan",
                "asinh": "arcsinh",
                "atanh": "arctanh",
            }
            expected = sum(getattr(np, aliases.get(name, name))(a) for name in names)
        found = twice(lambda x, names=names: _total([getattr(ps, name)(x) for name in names]), x)
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    for name in ["add", "subtract", "multiply", "divide", "maximum", "minimum", "pow"]:
        found = twice(lambda x, y, name=name: getattr(ps, name)(x, y), x, y)
        np.testing.assert_allclose(found, getattr(np, {"pow": "power"}.get(name, name))(a, b), rtol=1e-5)


def _total(parts: list[ps.Tensor]) -> ps.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bool"])
def test_dtypes_and_truth_values(eager: Device, dtype: str) -> None:
    a = (np.arange(300).reshape(20, 15) % 7).astype(dtype)
    x = ps.asarray(a, device=eager)
    with np.errstate(all="ignore"):
        expected = np.where(a[::-1] > a[:, ::-1], a, a[:1]) + a.T.reshape(20, 15)
    found = twice(
        lambda x: ps.where(ps.flip(x, axis=0) > ps.flip(x, axis=1), x, x[:1]) + ps.reshape(x.T, (20, 15)), x
    )
    assert found.dtype == a.dtype
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_views_inside_kernels(eager: Device, data: st.DataObject) -> None:
    a = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    x, expected = ps.asarray(a, device=eager), a
    recorded = []
    for _ in range(data.draw(st.integers(1, 5))):
        verb = data.draw(st.sampled_from(["permute", "slice", "reshape", "broadcast"]))
        if verb == "permute":
            order = data.draw(st.permutations(range(expected.ndim)))
            recorded.append(lambda m, v, o=order: (ps.permute_dims if m is ps else np.transpose)(v, o))
        elif verb == "slice":
            recorded.append(lambda m, v: v[..., ::-1][1:])
        elif verb == "reshape":
            recorded.append(lambda m, v: m.reshape(v, (-1, *v.shape[-1:])))
        else:
            recorded.append(lambda m, v: m.broadcast_to(v[:1], v.shape))
        expected = recorded[-1](np, expected)

    def expression(x: ps.Tensor) -> ps.Tensor:
        for step in recorded:
            x = step(ps, x)
        return x * 2 + 1

    np.testing.assert_array_equal(twice(expression, x), expected * 2 + 1)


def test_explain_names_the_steps(eager: Device) -> None:
    x = ps.asarray(np.ones((64, 64), np.float32), device=eager)
    y = ps.tanh(ps.sum(ps.exp(x) * 2 + 1, axis=1))
    report = ps.explain(y)
    lines = report.splitlines()
    assert len(lines) == 4
    assert "exp multiply add" in lines[0].replace("full ", "")
    assert lines[1].startswith("2. sum")
    assert "16.0 KiB read, 16.0 KiB written" in lines[0]
    assert "3 steps" in lines[3]
    assert ps.explain(x) == "computed already"
    assert y._node.value is None, "explaining computes nothing"


def test_the_tables_of_kernels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_ITEMS", 1)
    monkeypatch.setattr(cache, "_MAX_KERNELS", 2)
    monkeypatch.setattr(cache, "_MAX_SEEN", 4)
    device = Device.over(DRIVERS["opencl-device"]())
    kernels = cache.KernelCache(device)
    for length in range(1, 5):
        group = group_of(elementwise.negative(x_(length)))
        assert kernels.kernel(group) is None
        assert kernels.kernel(group) is not None
    assert (len(kernels._kernels), len(kernels._seen)) == (2, 4)
    device.close()
