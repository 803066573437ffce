"""Recurrent layers: each step takes an item of a sequence and the state after the previous item.

The input weights are applied to all items by a single product; only the recurrence runs step by step.
Sequences of several lengths are padded, and beyond the end of a sequence its state does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.dropping import check_probability
from penstock.nn.layers import Where, drawn
from penstock.nn.module import Module
from penstock.nn.utils.rnn import PackedSequence
from penstock.tensor.arithmetic import tanh, where
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, realize_together
from penstock.tensor.creation import zeros
from penstock.tensor.manipulation import concat, expand_dims, moveaxis, reshape, stack
from penstock.tensor.recording import computes

State = tuple[Tensor, ...]  # the hidden state, and the cell state of an LSTM


class _Rule(Module):
    """The computation of a step, which layers and cells share."""

    _gates = 1
    _states = 1

    def _step(self, x: Tensor, h: Tensor, state: State) -> State:
        """The states after a step, from the products with the input and with the hidden state."""
        raise NotImplementedError


class _RnnRule(_Rule):
    nonlinearity: str

    def _choose(self, nonlinearity: str) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"an RNN's nonlinearity is 'tanh' or 'relu', and {nonlinearity!r} was given")
        self.nonlinearity = nonlinearity
        self._activation = F.named_activation(nonlinearity)

    def _step(self, x: Tensor, h: Tensor, state: State) -> State:
        return (self._activation(x + h),)


class _LstmRule(_Rule):
    _gates, _states = 4, 2

    def _step(self, x: Tensor, h: Tensor, state: State) -> State:
        width = state[1].shape[-1]
        gates = x + h
        i, f, g, o = (gates[..., at * width : (at + 1) * width] for at in range(4))
        cell = F.sigmoid(f) * state[1] + F.sigmoid(i) * tanh(g)
        return F.sigmoid(o) * tanh(cell), cell


class _GruRule(_Rule):
    _gates = 3

    def _step(self, x: Tensor, h: Tensor, state: State) -> State:
        width = state[0].shape[-1]
        (xr, xz, xn), (hr, hz, hn) = (
            [part[..., at * width : (at + 1) * width] for at in range(3)] for part in (x, h)
        )
        reset, update = F.sigmoid(xr + hr), F.sigmoid(xz + hz)
        new = tanh(xn + reset * hn)
        return (new + update * (state[0] - new),)


class _Recurrent(_Rule):
    """The base of recurrent layers: weights, layers, directions and lengths."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Where = None,
    ) -> None:
        if min(input_size, hidden_size, num_layers) < 1:
            sizes = f"{input_size}, {hidden_size}, {num_layers}"
            raise ValueError(f"a recurrent layer needs sizes of 1 or more, and {sizes} were given")
        check_probability(dropout)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bias, batch_first
        self.dropout, self.bidirectional = dropout, bidirectional
        bound, rows = 1 / math.sqrt(hidden_size), self._gates * hidden_size
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * len(self._directions)
            for suffix in self._directions:
                name = f"l{layer}{suffix}"
                setattr(self, f"weight_ih_{name}", drawn((rows, width), bound, device))
                setattr(self, f"weight_hh_{name}", drawn((rows, hidden_size), bound, device))
                if bias:
                    setattr(self, f"bias_ih_{name}", drawn((rows,), bound, device))
                    setattr(self, f"bias_hh_{name}", drawn((rows,), bound, device))

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def extra_repr(self) -> str:
        """Its sizes and settings."""
        defaults = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        others = [
            f"{name}={getattr(self, name)}"
            for name, value in defaults.items()
            if getattr(self, name) != value
        ]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *others])

    def forward(self, x: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """The hidden state after each item, and the states after the last.

        `x` is (length, batch, width), (batch, length, width) with `batch_first`, (length, width), or a
        `PackedSequence`.
        """
        lengths: Tensor | None = None
        if isinstance(x, PackedSequence):
            steps, lengths = x.padded, x.lengths
        else:
            steps = self._time_first(x)
        if steps.shape[-1] != self.input_size:
            raise ValueError(
                f"items have a width of {self.input_size}, and the shape {steps.shape} was given"
            )
        alone = not isinstance(x, PackedSequence) and x.ndim == 2
        result, last = self._run(steps, self._first(hx, steps, alone), lengths)
        ends = [part[:, 0] if alone else part for part in last]
        final = ends[0] if self._states == 1 else tuple(ends)
        if isinstance(x, PackedSequence):
            return x.with_values(result), final
        if alone:
            return result[:, 0], final
        return (moveaxis(result, 0, 1) if self.batch_first else result), final

    def _time_first(self, x: Tensor) -> Tensor:
        if x.ndim not in (2, 3):
            raise ValueError(f"sequences have 2 or 3 axes, and the shape {x.shape} was given")
        if x.ndim == 2:
            return expand_dims(x, axis=1)
        return moveaxis(x, 0, 1) if self.batch_first else x

    def _first(self, hx: Any, steps: Tensor, alone: bool) -> list[Tensor]:
        """The initial states, each for all layers and directions."""
        shape = (self.num_layers * len(self._directions), steps.shape[1], self.hidden_size)
        if hx is None:
            return [zeros(shape, dtype=steps.dtype, device=steps.device)] * self._states
        given = [hx] if isinstance(hx, Tensor) else list(hx)
        given = [expand_dims(part, axis=1) for part in given] if alone else given
        if len(given) != self._states or any(part.shape != shape for part in given):
            shapes = [part.shape for part in given]
            raise ValueError(f"{self._states} states of shape {shape} are needed, and {shapes} were given")
        if capture.get() is None and computes():
            realize_together(
                given
            )  # or a loop that carries states would recompute its whole past at each step
        return given

    def _run(
        self, steps: Tensor, first: Sequence[Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        ends: list[State] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                steps = F.dropout(steps, self.dropout, self.training)
            sides = []
            for suffix in self._directions:
                state = tuple(part[len(ends)] for part in first)
                side, end = self._one_way(steps, f"l{layer}{suffix}", state, lengths, bool(suffix))
                sides.append(side)
                ends.append(end)
            steps = sides[0] if len(sides) == 1 else concat(sides, axis=-1)
        return steps, [stack(parts) for parts in zip(*ends, strict=True)]

    def _one_way(
        self, steps: Tensor, name: str, state: State, lengths: Tensor | None, backwards: bool
    ) -> tuple[Tensor, State]:
        """Run a layer in one direction: the hidden states at all times, and the final states."""
        inputs = F.linear(steps, getattr(self, f"weight_ih_{name}"), getattr(self, f"bias_ih_{name}", None))
        weight, bias = getattr(self, f"weight_hh_{name}"), getattr(self, f"bias_hh_{name}", None)
        count = steps.shape[0]
        outputs: list[Tensor] = [state[0]] * count
        for time in reversed(range(count)) if backwards else range(count):
            new = self._step(inputs[time], F.linear(state[0], weight, bias), state)
            if lengths is None:
                outputs[time], state = new[0], new
            else:
                there = reshape(lengths > time, (-1, 1))
                outputs[time] = where(there, new[0], 0.0)
                state = tuple(where(there, part, old) for part, old in zip(new, state, strict=True))
        return stack(outputs), state


class RNN(_RnnRule, _Recurrent):
    """The Elman RNN: h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.

    >>> output, state = ps.nn.RNN(3, 4)(ps.zeros((5, 2, 3)))
    >>> output.shape, state.shape
    ((5, 2, 4), (1, 2, 4))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Where = None,
    ) -> None:
        self._choose(nonlinearity)
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device
        )


class LSTM(_LstmRule, _Recurrent):
    """The long short-term memory, with input, forget, cell and output gates in PyTorch's order.

    >>> output, (h, c) = ps.nn.LSTM(3, 4)(ps.zeros((5, 2, 3)))
    >>> output.shape, h.shape, c.shape
    ((5, 2, 4), (1, 2, 4), (1, 2, 4))
    """


class GRU(_GruRule, _Recurrent):
    """The gated recurrent unit, with reset and update gates and the new state in PyTorch's order.

    >>> output, state = ps.nn.GRU(3, 4)(ps.zeros((5, 2, 3)))
    >>> output.shape, state.shape
    ((5, 2, 4), (1, 2, 4))
    """


class _Cell(_Rule):
    """A single step of a recurrent layer."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, device: Where = None) -> None:
        if min(input_size, hidden_size) < 1:
            raise ValueError(f"a cell needs sizes of 1 or more, and {input_size}, {hidden_size} were given")
        self.input_size, self.hidden_size = input_size, hidden_size
        bound, rows = 1 / math.sqrt(hidden_size), self._gates * hidden_size
        self.weight_ih = drawn((rows, input_size), bound, device)
        self.weight_hh = drawn((rows, hidden_size), bound, device)
        self.bias_ih = drawn((rows,), bound, device) if bias else None
        self.bias_hh = drawn((rows,), bound, device) if bias else None

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias_ih is not None}"

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """The states after an item, of (batch, width) or (width)."""
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(f"items have a width of {self.input_size}, and the shape {x.shape} was given")
        shape = (*x.shape[:-1], self.hidden_size)
        if hx is None:
            state: State = (zeros(shape, dtype=x.dtype, device=x.device),) * self._states
        else:
            state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if len(state) != self._states or any(part.shape != shape for part in state):
            shapes = [part.shape for part in state]
            raise ValueError(f"{self._states} states of shape {shape} are needed, and {shapes} were given")
        inputs = F.linear(x, self.weight_ih, self.bias_ih)
        new = self._step(inputs, F.linear(state[0], self.weight_hh, self.bias_hh), state)
        return new[0] if self._states == 1 else new


class RNNCell(_RnnRule, _Cell):
    """A single step of an `RNN`.

    >>> ps.nn.RNNCell(3, 4)(ps.zeros((2, 3))).shape
    (2, 4)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Where = None,
    ) -> None:
        self._choose(nonlinearity)
        super().__init__(input_size, hidden_size, bias, device)


class LSTMCell(_LstmRule, _Cell):
    """A single step of an `LSTM`.

    >>> h, c = ps.nn.LSTMCell(3, 4)(ps.zeros((2, 3)))
    >>> h.shape, c.shape
    ((2, 4), (2, 4))
    """


class GRUCell(_GruRule, _Cell):
    """A single step of a `GRU`.

    >>> ps.nn.GRUCell(3, 4)(ps.zeros((2, 3))).shape
    (2, 4)
    """
