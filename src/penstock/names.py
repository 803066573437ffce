"""The names of functions and methods beyond the standard's, from PyTorch and NumPy.

Each row of the table has names and their function. From it come the functions of the namespace, the methods
of tensors, their declarations for type checkers (`python tests/name_stubs.py` writes them) and the list in
docs/tensors.md.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any

from penstock.nn import functional
from penstock.tensor import (
    arithmetic,
    converting,
    creation,
    dtypes,
    linalg,
    linear,
    manipulation,
    ordering,
    padding,
    products,
    random,
    reduction,
    searching,
    selecting,
    shapes,
    special,
    two_ways,
)
from penstock.tensor.arguments import of_tensor
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, install
from penstock.tensor.creation import Where
from penstock.tensor.spelling import differentiable, in_place, loose, loose_sizes, spelled

Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {}
METHODS: dict[str, Function] = {}
LOOSE: set[str] = set()  # methods whose sizes may be separate arguments


@functools.cache
def _recorded_once(function: Function) -> Function:
    """`spelled`, for a function whose nodes depend on shapes, dtypes and the other arguments only."""
    return composite(spelled(function))


def _functions(rows: Iterable[tuple[str, Function]], taken: Callable[[Function], Function] = spelled) -> None:
    for names, function in rows:
        for name in names.split():
            FUNCTIONS[name] = taken(function)


def _methods(rows: Iterable[tuple[str, Function]], taken: Callable[[Function], Function] = spelled) -> None:
    for names, function in rows:
        for name in names.split():
            METHODS[name] = taken(function)


def _both(rows: Iterable[tuple[str, Function]], taken: Callable[[Function], Function] = spelled) -> None:
    rows = list(rows)
    _functions(rows, taken)
    _methods(rows, taken)


def _with_truth(function: Function) -> Function:
    """A function of booleans that takes other numbers too: values other than 0 are true."""

    def of_booleans(*args: Any) -> Tensor:
        return function(*map(special.truth, args))  # type: ignore[no-any-return]

    def unary(x: Any, /) -> Tensor:
        return of_booleans(x)

    def binary(x1: Any, x2: Any, /) -> Tensor:
        return of_booleans(x1, x2)

    made = unary if function is arithmetic.logical_not else binary
    made.__name__ = made.__qualname__ = function.__name__
    made.__doc__ = function.__doc__
    return made


@of_tensor
def softmax(x: Tensor, /, axis: int, *, dtype: Any = None) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis.

    >>> ps.softmax(ps.zeros((2, 4)), 1).tolist()[0]
    [0.25, 0.25, 0.25, 0.25]
    """
    return _along(functional.softmax, x, axis, dtype)


@of_tensor
def log_softmax(x: Tensor, /, axis: int, *, dtype: Any = None) -> Tensor:
    """The logarithm of `softmax`.

    >>> ps.log_softmax(ps.zeros((2, 1)), 1).tolist()
    [[0.0], [0.0]]
    """
    return _along(functional.log_softmax, x, axis, dtype)


def _along(function: Function, x: Tensor, axis: int, dtype: Any) -> Tensor:
    given = x if dtype is None else manipulation.astype(x, dtype)
    if not x.ndim:
        return manipulation.reshape(function(manipulation.reshape(given, 1), 0), ())
    return function(given, axis)  # type: ignore[no-any-return]


@of_tensor
def sigmoid(x: Tensor, /) -> Tensor:
    """1 / (1 + exp(-x)).

    >>> ps.sigmoid(ps.asarray([0.0])).tolist()
    [0.5]
    """
    return functional.sigmoid(x)


@of_tensor
def relu(x: Tensor, /) -> Tensor:
    """`x` where it is positive, else 0.

    >>> ps.relu(ps.asarray([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return functional.relu(x)


def arange(
    start: float, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: Where = None
) -> Tensor:
    """The numbers from `start` to below `stop`, at distance `step`; `arange(n)` starts at 0.

    >>> ps.arange(2, 8, 2).tolist()
    [2, 4, 6]
    """
    return creation.arange(start, stop, step, dtype=dtype, device=device)


# Elementwise functions, of the standard and under other names

_STANDARD = {name: getattr(arithmetic, name) for name in arithmetic.__all__ if name not in ("where", "equal")}
_ELEMENTWISE = [
    *_STANDARD.items(),
    ("absolute", arithmetic.abs),
    ("arccos", arithmetic.acos),
    ("arccosh", arithmetic.acosh),
    ("arcsin", arithmetic.asin),
    ("arcsinh", arithmetic.asinh),
    ("arctan", arithmetic.atan),
    ("arctan2", arithmetic.atan2),
    ("arctanh", arithmetic.atanh),
    ("bitwise_not invert", arithmetic.bitwise_invert),
    ("clamp", arithmetic.clip),
    ("clamp_max", special.clamp_max),
    ("clamp_min", special.clamp_min),
    ("conjugate", arithmetic.conj),
    ("fix", arithmetic.trunc),
    ("ge", arithmetic.greater_equal),
    ("gt", arithmetic.greater),
    ("le", arithmetic.less_equal),
    ("lt", arithmetic.less),
    ("eq", arithmetic.equal),
    ("ne", arithmetic.not_equal),
    ("mul", arithmetic.multiply),
    ("neg", arithmetic.negative),
    ("power", arithmetic.pow),
    ("true_divide", arithmetic.divide),
    ("add", special.scaled_add),
    ("sub subtract", special.scaled_subtract),
    ("div", special.div),
    ("round", special.rounded),
    ("addcdiv", special.addcdiv),
    ("addcmul", special.addcmul),
    ("digamma", special.digamma),
    ("exp2", special.exp2),
    ("fmod", special.fmod),
    ("frac", special.frac),
    ("isclose", special.isclose),
    ("lerp", special.lerp),
    ("lgamma", special.lgamma),
    ("logit", special.logit),
    ("nan_to_num", special.nan_to_num),
    ("rsqrt", special.rsqrt),
    ("sigmoid", sigmoid),
    ("relu", relu),
]
_LOGICAL = ("logical_and", "logical_not", "logical_or", "logical_xor")
_both(_ELEMENTWISE)
_both((name, _with_truth(getattr(arithmetic, name))) for name in _LOGICAL)
_both([("allclose", special.allclose), ("where", two_ways.where)])
_functions([("equal", arithmetic.equal)])
_methods([("equal", special.same), ("where", two_ways.where_method)])

# Reductions and scans along axes

_both(
    [
        ("all", reduction.all),
        ("amax", reduction.max),
        ("amin", reduction.min),
        ("any", reduction.any),
        ("argmax", reduction.argmax),
        ("argmin", reduction.argmin),
        ("argsort", searching.argsort),
        ("count_nonzero", reduction.count_nonzero),
        ("cumprod cumulative_prod", reduction.cumulative_prod),
        ("cumsum cumulative_sum", reduction.cumulative_sum),
        ("diff", reduction.diff),
        ("log_softmax", log_softmax),
        ("logcumsumexp", ordering.logcumsumexp),
        ("logsumexp", ordering.logsumexp),
        ("max", two_ways.max),
        ("mean", reduction.mean),
        ("min", two_ways.min),
        ("prod", reduction.prod),
        ("softmax", softmax),
        ("sum", reduction.sum),
    ],
    _recorded_once,
)
_both(
    [
        ("bincount", selecting.bincount),
        ("cummax", ordering.cummax),
        ("cummin", ordering.cummin),
        ("histogram", ordering.histogram),
        ("kthvalue", ordering.kthvalue),
        ("median", ordering.median),
        ("norm", linalg.torch_norm),
        ("quantile", ordering.quantile),
        ("topk", ordering.topk),
        ("unique", ordering.unique),
    ]
)
_functions([("nonzero", two_ways.nonzero)])
_functions([("sort", two_ways.sort), ("std", two_ways.std), ("var", two_ways.var)], _recorded_once)
_methods([("nonzero", ordering.nonzero_places)])
_methods(
    [("sort", two_ways.sort_method), ("std", two_ways.std_method), ("var", two_ways.var_method)],
    _recorded_once,
)

# Shapes, items and products

_both(
    [
        ("addmm", products.addmm),
        ("astype", manipulation.astype),
        ("baddbmm", products.baddbmm),
        ("bmm", products.bmm),
        ("broadcast_to", manipulation.broadcast_to),
        ("chunk", shapes.chunk),
        ("diag", selecting.diag),
        ("diag_embed", selecting.diag_embed),
        ("diagonal", selecting.diagonal),
        ("dot", products.dot),
        ("flatten", shapes.flatten),
        ("flip", manipulation.flip),
        ("gather", selecting.gather),
        ("index_add", selecting.index_add),
        ("index_select", selecting.index_select),
        ("masked_fill", selecting.masked_fill),
        ("masked_select", selecting.masked_select),
        ("matmul", linear.matmul),
        ("mm", products.mm),
        ("moveaxis movedim", manipulation.moveaxis),
        ("mv", products.mv),
        ("narrow", selecting.narrow),
        ("outer", products.outer),
        ("permute permute_dims", manipulation.permute_dims),
        ("ravel", shapes.flatten),
        ("repeat_interleave", shapes.repeat_interleave),
        ("reshape", manipulation.reshape),
        ("roll", manipulation.roll),
        ("scatter", selecting.scatter),
        ("scatter_add", selecting.scatter_add),
        ("split", shapes.split),
        ("swapaxes swapdims", shapes.swapaxes),
        ("t", shapes.t),
        ("take", manipulation.take),
        ("take_along_axis", manipulation.take_along_axis),
        ("take_along_dim", selecting.take_along_dim),
        ("tensor_split", shapes.tensor_split),
        ("tile", manipulation.tile),
        ("trace", selecting.trace),
        ("transpose", shapes.transpose),
        ("tril", creation.tril),
        ("triu", creation.triu),
        ("unbind", shapes.unbind),
        ("unflatten", shapes.unflatten),
        ("unsqueeze", shapes.unsqueeze),
    ]
)
_functions(
    [
        ("cat", shapes.cat),
        ("concat concatenate", manipulation.concat),
        ("einsum", products.einsum),
        ("interpolate", padding.interpolate),
        ("one_hot", selecting.one_hot),
        ("pad", padding.pad),
        ("repeat", manipulation.repeat),
        ("squeeze", two_ways.squeeze),
        ("stack", manipulation.stack),
        ("tensordot", products.tensordot),
        ("unstack", manipulation.unstack),
        ("vecdot", linear.vecdot),
    ]
)
_methods(
    [
        ("expand", shapes.expand),
        ("expand_as", shapes.expand_as),
        ("repeat", manipulation.tile),
        ("squeeze", two_ways.squeeze_method),
        ("unfold", selecting.unfold),
        ("view", shapes.view),
    ]
)
for _name in ("expand", "flip", "permute", "repeat", "reshape", "tile", "view"):
    METHODS[_name] = loose(METHODS[_name])
    LOOSE.add(_name)

# Dtypes, devices, and creation of tensors

DTYPES = {
    "double": dtypes.float64,
    "float": dtypes.float32,
    "half": dtypes.float16,
    "int": dtypes.int32,
    "long": dtypes.int64,
    "short": dtypes.int16,
}
_methods(
    [
        *((name, converting.converting(dtype)) for name, dtype in DTYPES.items()),
        ("bfloat16", converting.converting(dtypes.bfloat16)),
        ("bool", converting.converting(dtypes.bool_)),
        ("byte", converting.converting(dtypes.uint8)),
        ("char", converting.converting(dtypes.int8)),
        ("clone", converting.clone),
        ("contiguous", converting.contiguous),
        ("cpu", converting.cpu),
        ("cuda", converting.cuda),
        ("dim ndimension", converting.dim),
        ("element_size", converting.element_size),
        ("nelement", converting.numel),
        ("new_full", converting.new_full),
        ("to", converting.to),
        ("type_as", converting.type_as),
    ]
)
for _name in ("new_ones", "new_zeros"):
    METHODS[_name] = loose(getattr(converting, _name))
    LOOSE.add(_name)
_both(
    [
        ("is_complex", converting.is_complex),
        ("is_floating_point", converting.is_floating_point),
        ("numel", converting.numel),
    ]
)
_functions([("is_tensor", converting.is_tensor), ("manual_seed", random.manual_seed)])
MADE: dict[str, Function] = {  # they also take `requires_grad`
    "arange": arange,
    "empty": creation.empty,
    "empty_like": creation.empty_like,
    "eye": creation.eye,
    "full": creation.full,
    "full_like": creation.full_like,
    "linspace": creation.linspace,
    "ones": creation.ones,
    "ones_like": creation.ones_like,
    "rand": converting.rand,
    "rand_like": converting.rand_like,
    "randint": converting.randint,
    "randn": converting.randn,
    "randn_like": converting.randn_like,
    "randperm": converting.randperm,
    "tensor": converting.tensor,
    "zeros": creation.zeros,
    "zeros_like": creation.zeros_like,
}
LOOSE_FUNCTIONS = ("empty", "ones", "rand", "randn", "zeros")
for _name, _function in MADE.items():
    _taken = loose_sizes(_function) if _name in LOOSE_FUNCTIONS else spelled(_function)
    FUNCTIONS[_name] = differentiable(_taken)

# Methods that apply a function in place.

IN_PLACE: dict[str, Function] = {
    **{name: METHODS[name] for names, _ in _ELEMENTWISE for name in names.split()},
    **{name: METHODS[name] for name in ("index_add", "masked_fill", "scatter", "scatter_add")},
    "copy": converting.replaced,
    "fill": converting.filled,
    "normal": converting.normal_like,
    "uniform": converting.uniform_like,
    "zero": converting.zeroed,
}
for _name, _function in IN_PLACE.items():
    METHODS[f"{_name}_"] = in_place(_function)

for _name, _function in METHODS.items():
    install(_name, _function)

# Names of PyTorch and NumPy that do not exist here, and what to use instead.

_OF_BOTH = {
    "cholesky": "ps.linalg.cholesky",
    "cross": "ps.linalg.cross",
    "det": "ps.linalg.det",
    "hstack": "ps.cat(tensors, dim=1)",
    "index_put": "x[indices] = value",
    "inverse": "ps.linalg.inv",
    "pinverse": "ps.linalg.pinv",
    "svd": "ps.linalg.svd",
    "vstack": "ps.cat(tensors, dim=0)",
}
OF_FUNCTIONS = {
    **_OF_BOTH,
    "FloatTensor": "ps.tensor(data, dtype=ps.float32)",
    "LongTensor": "ps.tensor(data, dtype=ps.int64)",
    "array": "ps.asarray",
    "as_strided": "slices, or x.unfold(dim, size, step)",
    "as_tensor": "ps.asarray",
    "autocast": "x.to(ps.bfloat16)",
    "backends": "ps.devices()",
    "cdist": "ps.linalg.vector_norm(x[:, None] - y, axis=-1)",
    "compile": "ps.jit",
    "cuda": 'ps.use("cuda"), ps.devices() and ps.sync()',
    "device": 'the name of a device, such as "cuda"',
    "expand": "x.expand(2, 3)",
    "from_numpy": "ps.asarray",
    "inference_mode": "ps.no_grad()",
    "ndarray": "ps.Tensor",
    "set_default_device": "ps.use",
    "set_default_dtype": "dtype= where a tensor is made",
    "unfold": "x.unfold(dim, size, step)",
    "view": "x.view(2, 3)",
}
OF_METHODS = {
    **_OF_BOTH,
    "as_strided": "slices, or x.unfold(dim, size, step)",
    "copy": "x.clone()",
    "data": "x.detach()",
    "get_device": "x.device",
    "index_copy_": "x[index] = value",
    "index_put_": "x[indices] = value",
    "is_cuda": "x.device",
    "stride": "x.shape: layouts in memory are not visible",
    "type": "x.to(dtype), or x.dtype",
    "view_as": "x.reshape(other.shape)",
}


def missing(name: str, known: Iterable[str]) -> AttributeError:
    """The error for a function that does not exist, with what to use instead."""
    if name in OF_FUNCTIONS:
        hint = f"use {OF_FUNCTIONS[name]}"
    elif close := difflib.get_close_matches(name, list(known), n=3, cutoff=0.75):
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = "docs/tensors.md lists what there is"
    return AttributeError(f"penstock has no {name!r}; {hint}")


class _Missing:
    """A method that does not exist. A `__getattr__` would make every attribute of a tensor slower."""

    def __init__(self, name: str, instead: str) -> None:
        self._message = f"a tensor has no {name!r}; use {instead}"

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError(self._message)


for _name, _instead in OF_METHODS.items():
    install(_name, _Missing(_name, _instead))
