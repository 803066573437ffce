"""RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.onnx.registry import Call, operator

F = ps.nn.functional
Activation = Callable[[ps.Tensor], ps.Tensor]
State = tuple[ps.Tensor, ...]
# Each with the defaults of its alpha and beta.
_ACTIVATIONS: dict[str, tuple[Callable[[ps.Tensor, float, float], ps.Tensor], float, float]] = {
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "elu": (lambda x, a, b: F.elu(x, a), 1.0, 0.0),
    "hardsigmoid": (lambda x, a, b: ps.clip(a * x + b, 0, 1), 0.2, 0.5),
    "leakyrelu": (lambda x, a, b: F.leaky_relu(x, a), 0.01, 0.0),
    "relu": (lambda x, a, b: F.relu(x), 0.0, 0.0),
    "scaledtanh": (lambda x, a, b: a * ps.tanh(b * x), 1.0, 1.0),
    "sigmoid": (lambda x, a, b: F.sigmoid(x), 0.0, 0.0),
    "softplus": (lambda x, a, b: F.softplus(x), 0.0, 0.0),
    "softsign": (lambda x, a, b: F.softsign(x), 0.0, 0.0),
    "tanh": (lambda x, a, b: ps.tanh(x), 0.0, 0.0),
    "thresholdedrelu": (lambda x, a, b: F.threshold(x, a, 0.0), 1.0, 0.0),
}


@operator("RNN", host=(4,))
def rnn(
    call: Call,
    x: ps.Tensor,
    w: ps.Tensor,
    r: ps.Tensor,
    b: ps.Tensor | None = None,
    lengths: Any = None,
    h: ps.Tensor | None = None,
) -> Any:
    """A recurrent layer of one gate."""

    def step(given: ps.Tensor, state: State, weights: _Weights, f: list[Activation]) -> State:
        return (f[0](weights.clip(given + weights.both + state[0] @ weights.r.mT)),)

    return _run(call, x, w, r, b, lengths, (h,), step, ["Tanh"])


@operator("GRU", host=(4,))
def gru(
    call: Call,
    x: ps.Tensor,
    w: ps.Tensor,
    r: ps.Tensor,
    b: ps.Tensor | None = None,
    lengths: Any = None,
    h: ps.Tensor | None = None,
) -> Any:
    """A recurrent layer with an update and a reset gate."""
    late = bool(call.get("linear_before_reset", 0))

    def step(given: ps.Tensor, state: State, weights: _Weights, f: list[Activation]) -> State:
        (hidden,), size = state, weights.r.shape[1]
        own, from_state = given + weights.wb, weights.r
        gates = own[:, : 2 * size] + hidden @ from_state[: 2 * size].mT + weights.rb[: 2 * size]
        gates = f[0](weights.clip(gates))
        update, reset = gates[:, :size], gates[:, size:]
        last, bias = from_state[2 * size :].mT, weights.rb[2 * size :]
        inner = reset * (hidden @ last + bias) if late else (reset * hidden) @ last + bias
        new = f[1](weights.clip(own[:, 2 * size :] + inner))
        return ((1 - update) * new + update * hidden,)

    return _run(call, x, w, r, b, lengths, (h,), step, ["Sigmoid", "Tanh"])


@operator("LSTM", host=(4,))
def lstm(
    call: Call,
    x: ps.Tensor,
    w: ps.Tensor,
    r: ps.Tensor,
    b: ps.Tensor | None = None,
    lengths: Any = None,
    h: ps.Tensor | None = None,
    c: ps.Tensor | None = None,
    peep: ps.Tensor | None = None,
) -> Any:
    """A recurrent layer with a cell, and an input, an output and a forget gate."""
    coupled = bool(call.get("input_forget", 0))

    def step(given: ps.Tensor, state: State, weights: _Weights, f: list[Activation]) -> State:
        (hidden, cell), size = state, weights.r.shape[1]
        gates = given + weights.both + hidden @ weights.r.mT
        i, o, forget, new = (gates[:, n * size : (n + 1) * size] for n in range(4))
        if weights.peep is not None:
            p_i, p_o, p_f = (weights.peep[n * size : (n + 1) * size] for n in range(3))
            i, forget = i + p_i * cell, forget + p_f * cell
        i = f[0](weights.clip(i))
        forget = 1 - i if coupled else f[0](weights.clip(forget))
        cell = forget * cell + i * f[1](weights.clip(new))
        if weights.peep is not None:
            o = o + p_o * cell
        return f[0](weights.clip(o)) * f[2](cell), cell

    return _run(call, x, w, r, b, lengths, (h, c), step, ["Sigmoid", "Tanh", "Tanh"], peep)


class _Weights:
    """The weights of one direction."""

    def __init__(
        self, call: Call, r: ps.Tensor, b: ps.Tensor | None, peep: ps.Tensor | None, number: int
    ) -> None:
        self.r = r[number]
        rows = self.r.shape[0]
        given = ps.zeros((2 * rows,), dtype=r.dtype, device=r.device) if b is None else b[number]
        self.wb, self.rb = given[:rows], given[rows:]
        self.both = self.wb + self.rb
        self.peep = None if peep is None else peep[number]
        self._bound = call.get("clip")

    def clip(self, x: ps.Tensor) -> ps.Tensor:
        """What an activation is given, within the bounds of the attribute."""
        return x if self._bound is None else ps.clip(x, -self._bound, self._bound)


def _run(
    call: Call,
    x: ps.Tensor,
    w: ps.Tensor,
    r: ps.Tensor,
    b: ps.Tensor | None,
    lengths: Any,
    states: tuple[ps.Tensor | None, ...],
    step: Callable[..., State],
    defaults: list[str],
    peep: ps.Tensor | None = None,
) -> Any:
    """All directions over a sequence: all hidden states, and the last of each state."""
    batch_first = bool(call.get("layout", 0))
    if batch_first:
        x = ps.moveaxis(x, 0, 1)
        states = tuple(None if state is None else ps.moveaxis(state, 0, 1) for state in states)
    time, batch, size = x.shape[0], x.shape[1], r.shape[2]
    directions = {"forward": [False], "reverse": [True]}.get(call.get("direction", "forward"), [False, True])
    activations = _activations(call, defaults, len(directions))
    ends = np.full(batch, time) if lengths is None else lengths
    outputs, last = [], []
    for number, backward in enumerate(directions):
        weights = _Weights(call, r, b, peep, number)
        given = (_reversed(call, x, ends) if backward else x) @ w[number].mT
        zeros = ps.zeros((batch, size), dtype=x.dtype, device=x.device)
        state: State = tuple(zeros if initial is None else initial[number] for initial in states)
        rows = []
        for t, part in enumerate(ps.unstack(given, axis=0)):
            new = step(part, state, weights, activations[number])
            if (ends > t).all():
                state, row = new, new[0]
            else:
                runs = call.tensor((ends > t)[:, None])
                state = tuple(ps.where(runs, after, before) for after, before in zip(new, state, strict=True))
                row = ps.where(runs, new[0], zeros)
            rows.append(row)
        stacked = ps.stack(rows, axis=0)
        outputs.append(_reversed(call, stacked, ends) if backward else stacked)
        last.append(state)
    y = ps.stack(outputs, axis=2 if batch_first else 1)
    finals = [ps.stack(list(column), axis=1 if batch_first else 0) for column in zip(*last, strict=True)]
    return (ps.moveaxis(y, 0, 1) if batch_first else y, *finals)


def _activations(call: Call, defaults: list[str], directions: int) -> list[list[Activation]]:
    """The activations of each direction; alphas and betas are given for those that have some, in order."""
    names = call.get("activations", defaults * directions)
    alphas, betas = list(call.get("activation_alpha", [])), list(call.get("activation_beta", []))
    made: list[Activation] = []
    for given in names:
        name = (given.decode() if isinstance(given, bytes) else given).lower()
        if name not in _ACTIVATIONS:
            raise call.refuse(f"the activation {name}", f"{', '.join(_ACTIVATIONS)} are")
        function, alpha, beta = _ACTIVATIONS[name]
        a = alphas.pop(0) if alphas and alpha else alpha
        b = betas.pop(0) if betas and (beta or name == "affine") else beta
        made.append(lambda x, function=function, a=a, b=b: function(x, a, b))  # type: ignore[misc]
    return [made[n * len(defaults) : (n + 1) * len(defaults)] for n in range(directions)]


def _reversed(call: Call, x: ps.Tensor, ends: npt.NDArray[Any]) -> ps.Tensor:
    """Each sequence from its end to its start; what is behind the end stays."""
    if (ends == x.shape[0]).all():
        return ps.flip(x, axis=0)
    position = np.arange(x.shape[0])[:, None]
    index = np.where(position < ends, ends - 1 - position, position)[:, :, None]
    return ps.take_along_axis(x, call.tensor(np.broadcast_to(index, x.shape).copy()), axis=0)
