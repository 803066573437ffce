"""The rates that kernels reach inside training steps: measured once, and kept on disk.

A large product or a copy reaches more than the kernels of a step do, which are smaller and of other shapes.
So a few small steps are run, of several mixes of products, other kernels and launches, and the rates are
those that explain their times best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Cost
from penstock.drivers.rates import StepRates
from penstock.errors import PenstockError
from penstock.measuring import workloads
from penstock.measuring.ceilings import Ceilings
from penstock.measuring.quiet import Record, device_key, measure_quietly
from penstock.measuring.workloads import DTYPES
from penstock.runtime import Device
from penstock.tensor.arithmetic import exp, log, maximum, multiply, sqrt, tanh
from penstock.tensor.attention import attention
from penstock.tensor.autograd import grad
from penstock.tensor.core import Tensor
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype, permute_dims, reshape
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import mean
from penstock.tensor.reduction import sum as sum_
from penstock.tuning_cache import TuningCache

_TRY_SECONDS, _LONG_SECONDS = 0.1, 0.5
_RATES = "step rates"  # the name in the file
_Step = tuple[Any, tuple[Tensor, ...]]  # what `jit` returns, and its arguments
_LEAST_LAUNCH = 1e-7  # seconds
_FASTEST = 1e18  # per second, of what takes no time that could be measured
_FITS = 8  # in which what takes how long is settled
_IN_A_ROW = 4  # steps
_LARGE = 3e12  # operations a second from which on small steps would only measure launches


def step_rates(device: Device, dtypes: Iterable[str] = DTYPES, measure: bool = True) -> StepRates | None:
    """The rates of a device, from the file or measured; None where it cannot be, or is not to be.

    `dtypes` are those of products whose rates are wanted beside that of float32. They relate to that one as
    the best rates of the device do.
    """
    record = Record(TuningCache(device_key("ceilings", device.capabilities)), _RATES)
    value, due = record.get()
    try:
        cached: StepRates | None = _parsed(value)
    except (ValueError, TypeError, KeyError):  # never measured, or a file that somebody changed
        cached = None
    if measure and (cached is None or due):
        try:
            # In a context of its own: this may be asked for while a function is captured.
            new, quiet = measure_quietly(partial(Context().run, measured_rates, device), _faster)
            record.put(asdict(new), quiet)
            cached = new
        except PenstockError:
            pass
    return None if cached is None else _with_dtypes(cached, Ceilings(device), dtypes, measure)


def _with_dtypes(rates: StepRates, ceilings: Ceilings, dtypes: Iterable[str], measure: bool) -> StepRates:
    operations = dict(rates.operations)
    for dtype in (dtype for dtype in dtypes if dtype in DTYPES and dtype not in operations):
        best, plain = (ceilings.operations(name, measure) for name in (dtype, "float32"))
        if best and plain:
            operations[dtype] = rates.product_rate("float32") * best / plain
    return replace(rates, operations=operations)


def _parsed(value: Any) -> StepRates:
    rates = {name: float(value[name]) for name in ("bandwidth", "launch", "link", "attention")}
    operations = {str(dtype): float(rate) for dtype, rate in value["operations"].items()}
    if not all(0 < rate < float("inf") for rate in (*rates.values(), *operations.values())):
        raise ValueError("rates are positive")
    operations["float32"]  # a KeyError where it is not there
    return StepRates(operations=operations, **rates)


def _faster(first: StepRates, second: StepRates) -> StepRates:
    """Of two measurements on a busy machine, that with the shorter times."""
    return min(first, second, key=lambda rates: rates.launch + 1e9 / rates.product_rate("float32"))


def measured_rates(device: Device, clock: Callable[[], float] = perf_counter) -> StepRates:
    """The rates of a device, measured now, in the seconds of a clock; in bfloat16 where it has tensor cores.

    Steps follow one another, as in training, so that the host's work for them is hidden as it is there. With
    tensor cores for so long that the clock falls to what the device's power permits, as it does there, too.
    """
    with workloads.device_for_measuring(device) as own:
        half = own.capabilities.tensor_cores
        dtypes = ("float32", "bfloat16") if half else ("float32",)
        best = {dtype: workloads.product_operations(own, dtype, _TRY_SECONDS) for dtype in dtypes}
        steps = _half_steps(own) if half else _steps(own, 16 if best["float32"] > _LARGE else 1)
        launches = [step.memory_plan(*args).unlimited.launches for step, args in steps]
        seconds = workloads.mean_seconds if half else workloads.best_seconds
        times = []
        for step, args in steps:
            calls = partial(_in_a_row, step, args)
            times.append(seconds(own, calls, _LONG_SECONDS if half else _TRY_SECONDS, clock) / _IN_A_ROW)
        link = workloads.link(own, _TRY_SECONDS)
    rates = fitted(launches, times)
    share = rates.product_rate("float32") / best[dtypes[-1]]
    return replace(rates, operations={dtype: share * rate for dtype, rate in best.items()}, link=link)


def _in_a_row(step: Callable[..., Any], args: Sequence[Tensor]) -> None:
    for _ in range(_IN_A_ROW):
        step(*args)


def fitted(launches: Sequence[Sequence[Cost]], times: Sequence[float]) -> StepRates:
    """The rates that explain the times of some programs best, by their relative errors.

    Whether a product takes as long as its bytes or its operations depends on the rates: first all take as
    long as the operations, then what the rates before say.
    """
    rates = StepRates(_FASTEST, {"float32": 1.0}, _LEAST_LAUNCH, _FASTEST)
    for _ in range(_FITS):
        rows = np.array([_amounts(costs, rates) for costs in launches]) / np.array(times)[:, None]
        scale = np.maximum(rows.max(axis=0), 1 / _FASTEST)
        costs = _nonnegative(rows / scale, np.ones(len(rows))) / scale
        launch, moving, multiplying, attending = np.maximum(costs, 1 / _FASTEST).tolist()
        share = min(multiplying / attending, 1.0) if rows[:, 3].any() else 1.0
        operations = {"float32": 1 / multiplying}
        rates = StepRates(1 / moving, operations, max(launch, _LEAST_LAUNCH), _FASTEST, share)
    return rates


def _amounts(costs: Sequence[Cost], rates: StepRates) -> list[float]:
    """Launches, the bytes that take time, and the operations of products that do: others, and attention's."""
    rate = rates.product_rate("float32")
    moved, products, attended = 0, 0, 0
    for cost in costs:
        share = rates.attention if cost.attends else 1.0
        if not cost.product or cost.operations * rates.bandwidth <= cost.nbytes * rate * share:
            moved += cost.nbytes
        elif cost.attends:
            attended += cost.operations
        else:
            products += cost.operations
    return [len(costs), moved, products, attended]


def _nonnegative(matrix: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Least squares with no negative coefficient: the best of all choices of those that are not 0."""
    columns = matrix.shape[1]
    best, error = np.zeros(columns), np.inf
    for chosen in range(1, 1 << columns):
        used = [at for at in range(columns) if chosen >> at & 1]
        part, *_ = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)
        left = float(np.square(matrix[:, used] @ part - wanted).sum())
        if (part >= 0).all() and left < error:
            best, error = np.zeros(columns), left
            best[used] = part
    return best


# The steps


class _Maker:
    """Makes training steps in a dtype, each with its arguments."""

    def __init__(self, device: Device, dtype: str) -> None:
        self._device, self._dtype = device, DTYPES[dtype]
        self._rng = np.random.default_rng(0)

    def drawn(self, *shape: int) -> Tensor:
        array = self._rng.standard_normal(shape, np.float32) / 16
        return astype(asarray(array, device=self._device), self._dtype).realize()

    def network(self, rows: int, *widths: int) -> _Step:
        weights = [self.drawn(a, b) for a, b in pairwise(widths)]
        return jit(_trained(_perceptron)), (self.drawn(rows, widths[0]), *weights)

    def transformer(self, batch: int, length: int, width: int, heads: int) -> _Step:
        weights = [self.drawn(*shape) for shape in ((width, 3 * width), (width, width))]
        weights += [self.drawn(*shape) for shape in ((width, 4 * width), (4 * width, width))]
        weights.append(self.drawn(width, 8 * width))
        return jit(_trained(partial(_block, heads))), (self.drawn(batch, length, width), *weights)

    def attention(self, *shape: int) -> _Step:
        return jit(_trained(_attended)), tuple(self.drawn(*shape) for _ in range(3))

    def update(self, items: int) -> _Step:
        return jit(_updated), tuple(self.drawn(items) for _ in range(4))

    def softmax(self, rows: int, columns: int) -> _Step:
        return jit(_softmax), (self.drawn(rows, columns),)


def _steps(device: Device, factor: int) -> list[_Step]:
    """Training steps; all but the first have `factor` times as many rows."""
    make = _Maker(device, "float32")
    return [
        make.network(8, *[16] * 12),
        make.network(64 * factor, 384, 256, 64),
        make.network(512 * factor, 256, 512, 256),
        *([make.network(128 * factor, *[1024] * 3)] if factor > 1 else []),  # products above all
        make.transformer(4 * factor, 64, 96, 4),
        make.transformer(12 * factor, 96, 160, 4),
        make.update(factor << 20),
        make.softmax(1024 * factor, 768),
    ]


def _half_steps(device: Device) -> list[_Step]:
    """Training steps in bfloat16, of the sizes of models that are trained so.

    The first has only launches. In smaller ones the host would take longer than the device.
    """
    make = _Maker(device, "bfloat16")
    return [
        make.network(8, *[16] * 12),
        make.network(8192, *[4096] * 3),
        make.transformer(16, 1024, 768, 12),
        make.transformer(4, 1024, 2048, 32),
        make.attention(16, 12, 1024, 64),
        make.update(64 << 20),
    ]


def _trained(loss_of: Callable[..., Tensor]) -> Callable[..., Any]:
    """A step of gradient descent by all arguments but the first."""

    def step(x: Tensor, *weights: Tensor) -> Any:
        slopes = grad(loss_of, tuple(range(1, 1 + len(weights))))(x, *weights)
        return [weight - multiply(slope, 1e-3) for weight, slope in zip(weights, slopes, strict=True)]

    return step


def _perceptron(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = maximum(matmul(x, weight), 0.0)
    return mean(x * x)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    seen = attention(query, key, value, True, query.shape[-1] ** -0.5)
    return mean(seen * seen)


def _block(
    heads: int, x: Tensor, mixed: Tensor, out: Tensor, up: Tensor, down: Tensor, classes: Tensor
) -> Tensor:
    """A block of a transformer, and a loss over classes."""
    batch, length, width = x.shape
    parts = reshape(matmul(_norm(x), mixed), (batch, length, 3, heads, width // heads))
    q, k, v = (permute_dims(parts[:, :, at], (0, 2, 1, 3)) for at in range(3))
    seen = attention(q, k, v, True, (width // heads) ** -0.5)
    x = x + matmul(reshape(permute_dims(seen, (0, 2, 1, 3)), x.shape), out)
    inner = matmul(_norm(x), up)
    x = x + matmul(inner * (1.0 + tanh(inner * 0.8)) * 0.5, down)
    logits = reshape(matmul(_norm(x), classes), (batch * length, -1))
    logits = logits - max_(logits, axis=-1, keepdims=True)
    return mean(log(sum_(exp(logits), axis=-1)) - logits[:, 0])


def _norm(x: Tensor) -> Tensor:
    x = x - mean(x, axis=-1, keepdims=True)
    return x / sqrt(mean(x * x, axis=-1, keepdims=True) + 1e-5)


def _softmax(x: Tensor) -> Tensor:
    powers = exp(x - max_(x, axis=-1, keepdims=True))
    return powers / sum_(powers, axis=-1, keepdims=True)


def _updated(weight: Tensor, slope: Tensor, first: Tensor, second: Tensor) -> Any:
    """Adam."""
    first, second = first * 0.9 + slope * 0.1, second * 0.99 + slope * slope * 0.01
    return weight - first / (sqrt(second * second) + 1e-8), first, second
