"""Random tensors. A seed gives the same values on every device and under jit.

The same to the last bit: integers, booleans, permutations, and `uniform` from 0 to any number. With other
bounds, `uniform` may differ in the last bit where a device has fused multiply-add. `normal` may differ in the
last bits, as the logarithm and the cosine of devices do, and those of NumPy, which computes small draws
outside of jit.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.graph import elementwise
from penstock.graph import random as graph
from penstock.graph.node import DType, Node
from penstock.runtime import Device
from penstock.tensor import dtypes
from penstock.tensor.arguments import shape_of
from penstock.tensor.capture import Capture, capture
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, outside_capture, record, resolve
from penstock.tensor.manipulation import concat

__all__ = [
    "Generator",
    "bernoulli",
    "default_generator",
    "integers",
    "manual_seed",
    "normal",
    "permutation",
    "rand",
    "randint",
    "randn",
    "set_state",
    "state",
    "uniform",
]

_64_BITS = 1 << 64


class Generator:
    """A stream of random numbers from a seed; each draw continues where the previous draw ended.

    Without a device, numbers are drawn on the current default device.

    >>> generator = ps.random.Generator(seed=1)
    >>> generator.uniform((2, 3)).shape
    (2, 3)
    """

    def __init__(self, seed: int, device: Device | str | None = None) -> None:
        self._device = None if device is None else resolve(device)
        self._lock = threading.Lock()
        # For jitted functions, a tensor on their device holds the state, which replays advance. Before a
        # replay, it is set to the present state unless it holds that counter (`_held`) already.
        self._captured: dict[Device, Tensor] = {}
        self._held: dict[Device, int] = {}
        self.set_state({"seed": seed, "counter": 0})

    @property
    def seed(self) -> int:
        """The seed."""
        return self._seed

    def state(self) -> dict[str, int]:
        """The state, for `set_state`: the seed, and how many blocks of four 32-bit words were drawn.

        >>> sorted(ps.random.state())
        ['counter', 'seed']
        """
        with self._lock:
            return {"seed": self._seed, "counter": self._counter}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue from a `state()` of this or another generator.

        >>> before = ps.random.state()
        >>> first = ps.random.rand(2)
        >>> ps.random.set_state(before)
        >>> (first == ps.random.rand(2)).tolist()
        [True, True]
        """
        if not {"seed", "counter"} <= set(state) <= {"seed", "counter", "captured"}:
            raise ValueError(f"a state has a seed and a counter, and {sorted(state)} were given")
        seed, counter = (_integer(name, state[name], 0, _64_BITS) for name in ("seed", "counter"))
        # Checkpoints of older versions count the draws of jitted functions separately.
        drawn = _integer("captured", state.get("captured", 0), 0, _64_BITS)
        with self._lock:
            self._seed, self._counter = seed, (counter + drawn) % _64_BITS
            self._held.clear()

    def uniform(
        self,
        shape: int | Sequence[int],
        low: float = 0.0,
        high: float = 1.0,
        dtype: DType = dtypes.float32,
        device: Device | str | None = None,
    ) -> Tensor:
        """Uniformly distributed numbers in [low, high).

        >>> ps.random.uniform((2, 3), low=-1, high=1).shape
        (2, 3)
        """
        kind = _floating("uniform", dtype)
        start, stop = _rounded(kind, low, high)
        with np.errstate(all="ignore"):
            span = stop - start
        if not (start < stop and np.isfinite(span)):
            raise ValueError(
                f"uniform needs low < high in {kind}, at a finite distance; {low} and {high} were given"
            )

        def scaled(drawn: Node) -> Node:
            if (start, stop) == (0, 1):
                return drawn
            # Rounding can give `stop`, which is excluded.
            last = elementwise.like(drawn, np.nextafter(stop, start))
            return elementwise.minimum(_scaled(drawn, span, start), last)

        drawn = _made(*self._source(shape, graph.UNIFORM_WORDS[kind], device), graph.uniform, kind)
        return Tensor(scaled(drawn._node), drawn.device)

    def normal(
        self,
        shape: int | Sequence[int],
        mean: float = 0.0,
        std: float = 1.0,
        dtype: DType = dtypes.float32,
        device: Device | str | None = None,
    ) -> Tensor:
        """Normally distributed numbers with mean `mean` and standard deviation `std`.

        >>> ps.random.normal((2, 3), std=0.5).shape
        (2, 3)
        """
        kind = _floating("normal", dtype)
        centre, spread = _rounded(kind, mean, std)
        if not (np.isfinite(centre) and np.isfinite(spread) and spread >= 0):
            raise ValueError(
                f"normal needs numbers that are finite in {kind}, and std >= 0; {mean} and {std} were given"
            )

        drawn = _made(*self._source(shape, graph.NORMAL_WORDS[kind], device), graph.normal, kind)
        if (centre, spread) == (0, 1):
            return drawn
        return Tensor(_scaled(drawn._node, spread, centre), drawn.device)

    def integers(
        self,
        low: int,
        high: int,
        shape: int | Sequence[int],
        dtype: DType = dtypes.int64,
        device: Device | str | None = None,
    ) -> Tensor:
        """Integers in [low, high), uniform up to a bias of (high - low) / 2**64.

        >>> ps.random.integers(0, 10, (2, 3)).shape
        (2, 3)
        """
        kind = dtypes.checked(dtype)
        if kind not in dtypes.KINDS["integral"]:
            raise TypeError(f"integers does not make {kind}")
        bounds = np.iinfo(kind)
        first = _integer("low", low, int(bounds.min), int(bounds.max) + 1)
        end = _integer("high", high, int(bounds.min), int(bounds.max) + 2)
        if end <= first:
            raise ValueError(f"integers needs low < high, and {low} and {high} were given")
        bits, where = self._bits(shape, graph.INTEGERS_WORDS, device)
        return Tensor(graph.integers(bits, first, end, kind), where)

    def bernoulli(
        self, probability: float, shape: int | Sequence[int], device: Device | str | None = None
    ) -> Tensor:
        """True with the given probability, else False.

        >>> ps.random.bernoulli(1.0, 3).tolist()
        [True, True, True]
        """
        chance = float(probability)
        if not 0 <= chance <= 1:
            raise ValueError(f"a probability is between 0 and 1, and {chance} was given")
        bits, where = self._bits(shape, graph.BERNOULLI_WORDS, device)
        return Tensor(graph.bernoulli(bits, chance), where)

    def permutation(self, n: int, device: Device | str | None = None) -> Tensor:
        """The integers from 0 to `n` - 1 in random order.

        >>> sorted(ps.random.permutation(4).tolist())
        [0, 1, 2, 3]
        """
        count = _integer("the length of a permutation", n, 0, 1 << 63)
        return _made(*self._source(count, graph.PERMUTATION_WORDS, device), graph.permutation)

    def _bits(
        self, shape: int | Sequence[int], words: int, where: Device | str | None
    ) -> tuple[Node, Device]:
        """Random bits, for what is made of them with numbers that differ from draw to draw."""
        state, wanted = self._source(shape, words, where)
        return graph.random_bits(state._node, wanted), state.device

    def _source(
        self, shape: int | Sequence[int], words: int, where: Device | str | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """The state for random bits, and their shape, with `words` 32-bit words for each item."""
        wanted = (*shape_of(shape, "a random draw"), words)
        device = resolve(where or self._device)
        return Tensor(
            self._next_state(-(-math.prod(wanted) // graph.WORDS_PER_BLOCK), device), device
        ), wanted

    def _next_state(self, blocks: int, device: Device) -> Node:
        """The state for a draw of so many blocks; the generator advances behind them.

        It is a leaf, so that the graphs of similar draws differ only in its value.
        """
        if (capturing := capture.get()) is not None:
            return self._next_captured_state(blocks, device, capturing)
        with self._lock:
            seed, counter = self._seed, self._counter
            self._counter = (counter + blocks) % _64_BITS
        return _words(seed, counter, device)

    def _next_captured_state(self, blocks: int, device: Device, capturing: Capture) -> Node:
        """Like `_next_state`, inside a jitted function: the state is a tensor that every replay advances."""
        draws = capturing.part((self, device), lambda: _Draws(self, device))
        draws.blocks += blocks
        held = self._captured[device]
        state = record(held._node, held)
        key, low, high = state[:2], state[2:3], state[3:]
        moved = record(elementwise.add(low._node, elementwise.like(low._node, blocks)), low)
        carry = record(elementwise.cast(elementwise.less(moved._node, low._node), graph.WORD), low)
        carried = record(elementwise.add(high._node, carry._node), high)
        held._rebind(concat([key, moved, carried], axis=0))
        return state._node

    def _before_replay(self, device: Device, blocks: int) -> None:
        """Set the state tensor of a device's jitted functions, and advance by the blocks of a replay."""
        with self._lock:
            if self._held.get(device) != self._counter:
                words = _words(self._seed, self._counter, device)
                if device in self._captured:
                    self._captured[device]._become(words)
                else:
                    self._captured[device] = Tensor(words, device)
            self._held[device] = self._counter = (self._counter + blocks) % _64_BITS

    def _after_failure(self, device: Device, blocks: int) -> None:
        """Take back an advance by so many blocks, unless there were other draws since."""
        with self._lock:
            if self._held.pop(device, None) == self._counter:
                self._counter = (self._counter - blocks) % _64_BITS


class _Draws:
    """The draws of a jitted function from a generator in each replay."""

    def __init__(self, generator: Generator, device: Device) -> None:
        self._generator, self._device = generator, device
        self.blocks = 0
        with outside_capture():  # the state tensor belongs to the generator
            self.before_replay()

    def after_capture(self) -> None:
        """See `Capture.part`."""

    def before_replay(self) -> None:
        """Advance the generator for a replay."""
        self._generator._before_replay(self._device, self.blocks)

    def after_failure(self) -> None:
        """Take back the advance for a replay that has not taken effect."""
        self._generator._after_failure(self._device, self.blocks)


@composite
def _made(state: Tensor, shape: tuple[int, ...], make: Callable[..., Node], *kind: Any) -> Tensor:
    """The result of `make` on random bits of a shape, recorded once for each `kind`."""
    return record(make(graph.random_bits(state._node, shape), *kind), state)


def _words(seed: int, counter: int, device: Device) -> Node:
    words = [number >> shift & 0xFFFFFFFF for number in (seed, counter) for shift in (0, 32)]
    return from_numpy(np.array(words, np.uint32), device)._node


def _integer(name: str, value: Any, start: int, stop: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is an integer, and {value!r} was given") from None
    if not start <= number < stop:
        raise ValueError(f"{name} is from {start} to {stop - 1}, and {number} was given")
    return number


def _floating(name: str, dtype: Any) -> DType:
    kind = dtypes.checked(dtype)
    if kind not in dtypes.KINDS["real floating"]:
        raise TypeError(f"{name} does not make {kind}")
    return kind


def _rounded(dtype: DType, *numbers: float) -> Any:
    with np.errstate(all="ignore"):
        return np.array(numbers, np.float64).astype(dtype)


def _scaled(x: Node, factor: float, summand: float) -> Node:
    product = elementwise.multiply(x, elementwise.like(x, factor))
    return elementwise.add(product, elementwise.like(x, summand))


# The generator of this module's functions, seeded by the operating system.
default_generator = Generator(int.from_bytes(os.urandom(8), "little"))
uniform = default_generator.uniform
normal = default_generator.normal
integers = randint = default_generator.integers
bernoulli = default_generator.bernoulli
permutation = default_generator.permutation
state = default_generator.state
set_state = default_generator.set_state


def manual_seed(seed: int) -> None:
    """Restart the default generator from a seed.

    >>> ps.random.manual_seed(1)
    >>> first = ps.random.rand(2)
    >>> ps.random.manual_seed(1)
    >>> (first == ps.random.rand(2)).tolist()
    [True, True]
    """
    default_generator.set_state({"seed": seed, "counter": 0})


def rand(*shape: int) -> Tensor:
    """Uniformly distributed numbers in [0, 1) from the default generator.

    >>> ps.random.rand(2, 3).shape
    (2, 3)
    """
    return uniform(shape)


def randn(*shape: int) -> Tensor:
    """Normally distributed numbers with mean 0 and standard deviation 1 from the default generator.

    >>> ps.random.randn(2, 3).shape
    (2, 3)
    """
    return normal(shape)
