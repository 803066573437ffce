"""Every sample that PyTorch tests its own operations with, under PyTorch's names: results and gradients.

    python benchmarks/opinfo.py [--dtypes float32,int64,bool] [--verbose] [name ...]

The operations are those of PyTorch's `op_db` whose name is a function here or a method of tensors. A sample
is *passed*, *refused* (an exception that says why), *different* (where we follow the standard, with the
reason), *crashed* (any other exception) or *wrong*. Where float32 differs, PyTorch's float64 decides. Prints
the counts by operation with the first message of each kind, and fails where something is wrong or crashed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
import unittest
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import penstock as ps

# The standard gives these names another meaning if there is no `dim`: see docs/tensors.md.
METHODS_ONLY = {"equal", "nonzero", "repeat", "sort", "squeeze", "std", "var", "where"}
# Drawn at random, or not initialised: shapes and dtypes are compared.
DRAWN = {"dropout", "dropout2d", "dropout3d", "alpha_dropout", "empty", "empty_like", "new_empty"}
DRAWN |= {"rand_like", "randn", "randn_like", "randint", "randint_like", "normal"}
MOST_SAMPLES = 200
# Results that are indices: of equal items any index is right.
TIES = {"argsort": 0, "kthvalue": 1, "median": 1, "sort": 1, "topk": 1}
# Where Penstock follows the array API standard, or the definition, as documented.
DIFFERENT = {
    "arange": "the length is that of the standard, ceil((stop - start) / step), for integers too",
    "linspace": "integers are rounded at the end, not the ends before",
    "linalg.solve": "the standard takes matrices, or one vector; PyTorch a stack of vectors if it can",
    "nn.functional.ctc_loss": "PyTorch's gradient is that by the logits before a log_softmax",
}
REFUSALS: tuple[type[Exception], ...] = (
    TypeError,
    ValueError,
    NotImplementedError,
    IndexError,
    AttributeError,
    OverflowError,
)
REFUSALS += (ps.errors.PenstockError, np.linalg.LinAlgError)
Way = Callable[..., Any]


class NoCounterpart(Exception):
    """An argument that has no meaning here, such as a memory layout."""


class Wrong(AssertionError):
    """A result that is not PyTorch's."""


def converted(torch: Any, value: Any, inputs: list[ps.Tensor]) -> Any:
    """An argument of PyTorch's as ours; tensors with a gradient are noted in order."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise NoCounterpart("a sparse tensor")
        x = ps.asarray(value.detach().resolve_conj().resolve_neg().numpy().copy())
        if value.requires_grad:
            inputs.append(x.requires_grad_())
        return x
    if isinstance(value, torch.dtype):
        return getattr(ps, str(value).removeprefix("torch."))
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)(converted(torch, item, inputs) for item in value)
    if isinstance(value, torch.device) or value == "cpu":
        return "host"
    if type(value).__module__.startswith("torch"):
        raise NoCounterpart(f"{value!r}")
    return value


def leaves(torch: Any, value: Any) -> Iterator[Any]:
    """The tensors of arguments or results, in order."""
    if isinstance(value, (torch.Tensor, ps.Tensor)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(torch, item)
    elif isinstance(value, dict):
        yield from leaves(torch, list(value.values()))


def ways_of(name: str) -> dict[str, Way]:
    """The functions and methods of an operation of PyTorch here, by how they are called."""
    *folder, last = name.split(".")
    owner: Any = {"": ps, "nn.functional": ps.nn.functional, "linalg": ps.linalg, "fft": ps.fft}.get(
        ".".join(folder)
    )
    if owner is None:
        return {}
    result: dict[str, Way] = {}
    function = getattr(owner, last, None) if last in dir(owner) else None
    if function is None and folder == ["nn", "functional"] and last in dir(ps):
        function = getattr(ps, last)
    if callable(function) and (folder or last not in METHODS_ONLY):
        result["function"] = reordered(name, function)
    if not folder and last in dir(ps.Tensor) and callable(vars(ps.Tensor).get(last, None)):
        result["method"] = lambda x, *args, **kwargs: getattr(x, last)(*args, **kwargs)
    return result


def reordered(name: str, function: Way) -> Way:
    """A function for the order in which PyTorch's samples have its arguments."""
    if name in ("nn.functional.embedding", "einsum"):
        return lambda x, given, *args, **kw: (
            function(given, *x, *args, **kw) if name == "einsum" else function(given, x, *args, **kw)
        )
    return function


class Sample:
    """A call, with PyTorch's results for it and for the same in float64."""

    def __init__(self, torch: Any, op: Any, given: Any) -> None:
        self._torch, self._op, self.given = torch, op, given
        self.name = op.name
        self.processed = given.output_process_fn_grad  # removes free choices, such as signs
        self.drawn = op.name.split(".")[-1] in DRAWN or bool(given.kwargs.get("dropout_p"))
        self._theirs = self._computed([given.input, list(given.args), dict(given.kwargs)])

    def _computed(self, arguments: list[Any]) -> list[Any]:
        """Results and gradients as PyTorch has them; None where there is no gradient."""
        torch, (x, args, kwargs) = self._torch, arguments
        inputs = [leaf for leaf in leaves(torch, arguments) if leaf.requires_grad]
        result = self.processed(self._op(x, *args, **kwargs))
        results = list(leaves(torch, result)) or [result]
        arrays = [array_of(torch, part) for part in results]
        self._chosen = [
            at
            for at, part in enumerate(results)
            if inputs and isinstance(part, torch.Tensor) and part.requires_grad and not part.is_complex()
        ]
        if not self._chosen:
            return [*arrays, *(None for _ in inputs)]
        slopes = torch.autograd.grad(
            [results[at] for at in self._chosen],
            inputs,
            [torch.from_numpy(up_of(arrays[at])).to(results[at].dtype) for at in self._chosen],
            allow_unused=True,
        )
        return [*arrays, *(None if slope is None else array_of(torch, slope) for slope in slopes)]

    def check(self, way: Way) -> None:
        """Compute it here, and compare."""
        torch, given = self._torch, self.given
        inputs: list[ps.Tensor] = []
        x = converted(torch, given.input, inputs)
        args = [converted(torch, arg, inputs) for arg in given.args]
        kwargs = {key: converted(torch, arg, inputs) for key, arg in given.kwargs.items()}
        result = self.processed(way(x, *args, **kwargs))
        actual = list(leaves(torch, result)) or [result]
        if len(actual) + len(inputs) != len(self._theirs):
            raise Wrong(f"{len(actual)} results, not {len(self._theirs) - len(inputs)}")
        if self._chosen and not self.drawn:
            total = sum(ps.sum(actual[at] * ps.asarray(up_of(self._theirs[at]))) for at in self._chosen)
            if isinstance(total, ps.Tensor) and total.requires_grad:
                total.backward()
        slopes = [ps.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
        ours = [part.numpy() if isinstance(part, ps.Tensor) else np.asarray(part) for part in actual + slopes]
        try:
            self._compare(ours, self._theirs, len(actual))
        except Wrong:  # PyTorch may be wrong: float64 decides
            if not self._chosen:
                raise
            self._compare(ours, self._computed(self._in_float64()), len(actual))

    def _in_float64(self) -> list[Any]:
        torch = self._torch

        def widened(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                return value.detach().double().requires_grad_(value.requires_grad)
            if isinstance(value, (list, tuple)):
                return type(value)(map(widened, value))
            return value

        kwargs = {key: widened(value) for key, value in self.given.kwargs.items()}
        return [widened(self.given.input), [widened(arg) for arg in self.given.args], kwargs]

    def _compare(self, ours: list[Any], theirs: list[Any], results: int) -> None:
        for at, (own, wanted) in enumerate(zip(ours, theirs, strict=True)):
            what = f"result {at}" if at < results else f"gradient {at - results}"
            if wanted is not None and not (self.drawn and at >= results):
                free = self.drawn or (TIES.get(self.name) == at and not self.given.kwargs.get("stable"))
                compare(own, wanted, what, free)


def array_of(torch: Any, part: Any) -> Any:
    """A result of PyTorch's as an array."""
    tensor = isinstance(part, torch.Tensor)
    return np.asarray(part.detach().resolve_conj().resolve_neg().numpy() if tensor else part)


def up_of(array: Any) -> Any:
    """The weights of a result in the sum whose gradient is compared."""
    return np.random.default_rng(1).uniform(0.5, 1.5, array.shape).astype(np.float32)


def compare(ours: Any, theirs: Any, what: str, drawn: bool = False) -> None:
    """Raise for a different shape, dtype or value."""
    if ours.shape != theirs.shape:
        raise Wrong(f"{what}: shape {ours.shape}, not {theirs.shape}")
    if ours.dtype != theirs.dtype and {str(ours.dtype), str(theirs.dtype)} != {"float32", "float64"}:
        raise Wrong(f"{what}: dtype {ours.dtype}, not {theirs.dtype}")
    if drawn or not theirs.size:
        return
    if theirs.dtype.kind not in "fc":
        if (ours != theirs).any():
            raise Wrong(f"{what}: {ours.ravel()[:4]}, not {theirs.ravel()[:4]}")
        return
    largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
    close = np.isclose(ours, theirs, rtol=2e-4, atol=2e-5 * largest, equal_nan=True)
    if not close.all():
        raise Wrong(f"{what}: {ours[~close][:3]}, not {theirs[~close][:3]}")


class Counts:
    """How many samples of an operation ended in each way, with the first messages."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.messages: dict[str, dict[str, str]] = defaultdict(dict)

    def note(self, kind: str, message: str = "", sample: str = "") -> None:
        self.kinds[kind] += 1
        if message:
            self.messages[kind].setdefault(" ".join(message.split())[:150], sample)


def outcome(sample: Sample, ways: dict[str, Way]) -> tuple[str, str]:
    """The worst outcome of all ways to call an operation."""
    refused = ""
    for way, function in ways.items():
        if way == "method" and not isinstance(sample.given.input, sample._torch.Tensor):
            continue
        try:
            sample.check(function)
        except Wrong as error:
            if sample.name in DIFFERENT:
                return "different", DIFFERENT[sample.name]
            return "wrong", f"{way}: {error}"
        except NoCounterpart:
            return "no counterpart", ""
        except ps.errors.DeviceError as error:
            return "crashed", f"{way}: {error}"
        except REFUSALS as error:
            refused = f"{way}: {type(error).__name__}: {error}"
        except Exception as error:  # any other exception is a bug
            return "crashed", f"{way}: {type(error).__name__}: {error}"
    return ("refused", refused) if refused else ("passed", "")


def samples_of(torch: Any, op: Any, dtype: Any) -> Iterator[Sample]:
    """The samples that PyTorch itself computes; of very many, an even selection."""
    gradient = dtype.is_floating_point and op.supports_autograd
    given = list(op.sample_inputs("cpu", dtype, requires_grad=gradient))
    for sample in given[:: -(-len(given) // MOST_SAMPLES) or 1]:
        try:
            yield Sample(torch, op, sample)
        except (RuntimeError, TypeError, NotImplementedError):
            continue


def described(sample: Sample) -> str:
    given = sample.given

    def text(value: Any) -> str:
        if isinstance(value, sample._torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(text, value)) + "]"
        return repr(value)

    return ", ".join(
        [text(given.input), *map(text, given.args), *(f"{k}={text(v)}" for k, v in given.kwargs.items())]
    )


def operations() -> Any:
    """PyTorch's own list. Its test utilities import `expecttest`, which is not needed here."""
    if importlib.util.find_spec("expecttest") is None:
        absent: Any = types.ModuleType("expecttest")
        absent.TestCase = unittest.TestCase
        sys.modules["expecttest"] = absent
    return importlib.import_module("torch.testing._internal.common_methods_invocations").op_db


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", default="float32,int64,bool")
    parser.add_argument("--verbose", action="store_true", help="every distinct message, with its arguments")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch = importlib.import_module("torch")
    op_db = operations()
    ps.use("host")
    totals: Counter[str] = Counter()
    taken: set[str] = set()
    for op in sorted(op_db, key=lambda op: str(op.name)):
        ways = ways_of(op.name)
        if not ways or (given.names and op.name not in given.names):
            continue
        taken.add(op.name)
        for word in given.dtypes.split(","):
            dtype = getattr(torch, word)
            if dtype not in op.supported_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            counts = Counts()
            for sample in samples_of(torch, op, dtype):
                counts.note(*outcome(sample, ways), described(sample))
            totals += counts.kinds
            shown = ", ".join(f"{n} {kind}" for kind, n in counts.kinds.items())
            print(f"{op.name}{' ' + op.variant_test_name if op.variant_test_name else ''} {word}: {shown}")
            for kind in ("wrong", "crashed", "different", "refused"):
                messages = list(counts.messages[kind].items())
                for message, sample_text in messages if given.verbose else messages[:1]:
                    print(f"    {kind}: {message}\n        ({sample_text[:200]})")
            sys.stdout.flush()
    print(f"{len(taken)} operations: " + ", ".join(f"{n} {kind}" for kind, n in totals.items()))
    return 1 if totals["wrong"] or totals["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
