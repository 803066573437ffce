"""Optimizers: parameters change in place, by the gradients that `backward` left in them.

Everything that changes from step to step (moments, rates, counts) is a tensor, so a jitted training step is
captured once, and the updates run inside the kernels that compute the gradients, or in one after them all.
Parameters lie side by side in one memory, and so do their means, their squares and their masters.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.graph.calls import Subgraph, call, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.node import placeholder
from penstock.memory.buffer import Buffer
from penstock.optim.correction import NAMES, BiasCorrection
from penstock.runtime import Device
from penstock.tensor.arithmetic import divide, isfinite, maximum, minimum, multiply, sqrt, where
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, ends_at, from_numpy, outside_capture, realize_together, source_of
from penstock.tensor.gathering import gather, gathered, reading
from penstock.tensor.manipulation import astype, concat, reshape
from penstock.tensor.recording import no_grad, recorded_once
from penstock.tensor.reduction import all as all_
from penstock.tensor.reduction import sum as sum_

Parameters = Iterable[Tensor] | Iterable[Mapping[str, Any]]
_FIRST_SCALE, LEAST_SCALE, _LARGEST_SCALE = 2.0**15, 1.0, 2.0**24  # of the loss
_GROWTH_STEPS = 1000  # without an overflow, until the scale of the loss is doubled


# A recorded step: the subgraph, the tensors that it takes, and those that its outputs are for, by number.
_Step = tuple[Subgraph, list[int], list[int]]


class Optimizer:
    """What all optimizers share: groups of parameters, the rate, clipping, masters of half-precision ones.

    Parameters are given as tensors, or as groups: dicts with `params` and what differs for them. For those in
    half precision a float32 master is kept; with float16 `backward` scales the loss, and a step whose
    gradients are not finite changes nothing but the scale.
    """

    def __init__(self, parameters: Parameters, lr: float, clip_norm: float | None, **defaults: float) -> None:
        if isinstance(parameters, Tensor):
            raise TypeError("an optimizer takes a list of tensors, and one tensor was given")
        given = list(parameters)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.parameters: list[Tensor] = []
        self._settings: list[dict[str, float]] = []
        for group in groups:
            assert isinstance(group, Mapping)
            if not {"params"} <= set(group) <= {"params", *defaults}:
                raise ValueError(
                    f"a group has params and may have {', '.join(defaults)}; {sorted(group)} were given"
                )
            settings = {name: float(group.get(name, value)) for name, value in defaults.items()}
            for tensor in group["params"]:
                if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    raise TypeError(f"an optimizer takes tensors that require a gradient, not {tensor!r}")
                self.parameters.append(tensor)
                self._settings.append(settings)
        if not self.parameters:
            raise ValueError("an optimizer needs a parameter")
        if len({id(one) for one in self.parameters}) != len(self.parameters):
            raise ValueError("a parameter was given twice")
        if len({one.device for one in self.parameters}) > 1:
            names = sorted({one.device.name for one in self.parameters})
            raise ValueError(
                f"an optimizer works on one device, and the parameters are on {' and '.join(names)}"
            )
        for settings in self._settings:
            if min(settings.values()) < 0:
                raise ValueError(f"settings are 0 or more, and {settings} were given")
        if lr < 0 or (clip_norm is not None and clip_norm <= 0):
            raise ValueError(f"lr is 0 or more and clip_norm above 0; {lr} and {clip_norm} were given")
        self.clip_norm = clip_norm
        self._device: Device = self.parameters[0].device
        self._lr = self._number(lr)
        self.lr = lr
        self._state: dict[str, list[Tensor]] = {}
        self._numbers: dict[str, Tensor] = {}
        halves = {at: one for at, one in enumerate(self.parameters) if one._node.dtype.itemsize == 2}
        masters = gathered([one.numpy().astype(np.float32) for one in halves.values()], self._device)
        self._masters: dict[int, Tensor] = dict(zip(halves, masters, strict=True))  # by number
        if any(str(one.dtype) == "float16" for one in halves.values()):
            self._numbers["scale"] = self._number(_FIRST_SCALE)
            self._numbers["good_steps"] = self._number(0)

    # Use

    @property
    def lr(self) -> float:
        """The learning rate. Setting it between steps captures nothing anew."""
        return self._rate

    @lr.setter
    def lr(self, rate: float) -> None:
        self._rate = float(rate)
        self._lr._become(self._number(rate)._node)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for tensor in self.parameters:
            tensor.grad = None

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, on a scaled loss where parameters are float16."""
        scale = self._numbers.get("scale")
        (loss if scale is None else loss * scale).backward()
        if scale is not None:
            for tensor in self.parameters:
                if tensor.grad is not None:
                    tensor.grad._source = weakref.ref(loss)

    def step(self) -> None:
        """Change every parameter that has a gradient, and let go of the gradients.

        Outside of a jitted function the new values are computed at once, with the loss that they came from:
        steps that are only recorded would be computed again and again, each with all before it.
        """
        if (capturing := capture.get()) is not None:
            # Replays leave everything in its place. A step that is not captured gives new values new memory.
            state = (*self.parameters, *chain(*self._state.values()), *self._masters.values())
            outside = [tensor for tensor in state if capturing.stand_in(tensor) is not tensor]
            with outside_capture():
                if outside:
                    realize_together(outside)
                self._gather()
            self._divide(self._present())
            self._record_step()
            return
        losses = [source_of(one.grad) for one in self.parameters if one.grad is not None]
        tensors = self._all()
        before = [(tensor, tensor._actual_node, tensor._actual_grad) for tensor in tensors]
        try:
            self._repeat_step(tensors)
            known = [loss for loss in losses if loss is not None]
            realize_together([*self._all(), *known], repeated=True)  # which may be more tensors now
        except BaseException:  # all of it, or nothing
            for tensor, node, gradient in before:
                tensor._actual_node, tensor._actual_grad = node, gradient
            raise

    def _all(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        state = chain(*self._state.values(), self._masters.values(), self._numbers.values())
        return [*self.parameters, *state, *self._counts()]

    def _present(self) -> list[int]:
        """The parameters that have a gradient."""
        return [at for at, tensor in enumerate(self.parameters) if tensor.grad is not None]

    def _repeat_step(self, state: Sequence[Tensor]) -> None:
        """`_record_step`, which records the same in every step: once, and from then on that is called."""
        present = self._present()
        if self._divide(present):
            state = self._all()
        grads = [tensor.grad for tensor in self.parameters if tensor.grad is not None]
        tensors = [*state, self._lr, *grads]
        settings = self._update_settings()
        elsewhere = any(grad.device is not self._device for grad in grads)  # which is refused
        if settings is None or elsewhere or len({*map(id, tensors)}) < len(tensors):
            self._record_step()  # one tensor in two places may be two in the next step
            return
        kinds = tuple([(tensor._node.shape, tensor._node.dtype) for tensor in tensors])
        groups = tuple([tuple(group.values()) for group in self._settings])
        key = type(self), tuple(present), kinds, self.clip_norm, groups, settings
        known = recorded_once(self._device, key, lambda: self._recorded_step(tensors))
        if known is None:
            self._record_step()
            return
        subgraph, taken, changed = known
        results = call(subgraph, [tensors[at]._node for at in taken])
        for at, node in zip(changed, results, strict=True):
            if tensors[at]._actual_requires_grad:
                ends_at(node, tensors[at])
            tensors[at]._actual_node = node
        self.zero_grad()

    def _recorded_step(self, tensors: Sequence[Tensor]) -> _Step:
        """A step of a twin with placeholders for these tensors, which other threads may be using."""
        leaves = [placeholder(tensor.shape, tensor.dtype) for tensor in tensors]
        stand_ins = [Tensor(leaf, self._device) for leaf in leaves]
        by_tensor = {id(tensor): stand_in for tensor, stand_in in zip(tensors, stand_ins, strict=True)}
        for parameter in self.parameters:
            by_tensor[id(parameter)]._actual_grad = by_tensor.get(id(parameter.grad))
        _with_tensors(self, by_tensor)._record_step()
        nodes = [stand_in._actual_node for stand_in in stand_ins]
        changed = [at for at, node in enumerate(nodes) if node is not leaves[at]]
        outputs = decompose([nodes[at] for at in changed], self._device.capabilities)
        made = subgraph_between(dict.fromkeys(leaves), outputs)
        assert made is not None, "an update reads what is no part of the optimizer"
        return made[0], [leaves.index(leaf) for leaf in made[1]], changed

    def _record_step(self) -> None:
        with no_grad():
            grads = {
                at: astype(tensor.grad, self._master(at).dtype)
                for at, tensor in enumerate(self.parameters)
                if tensor.grad is not None
            }
            sound = self._unscaled(grads)
            if self.clip_norm is not None and grads:
                factor = minimum(self.clip_norm / (self.norm(list(grads.values())) + 1e-6), 1.0)
                grads = {at: grad * factor for at, grad in grads.items()}
            self._count(grads.keys(), sound)
            for at, grad in grads.items():
                self._change(at, grad, sound)
            self.zero_grad()

    @staticmethod
    def norm(grads: Sequence[Tensor]) -> Tensor:
        """The length of all gradients as one vector."""
        return sqrt(sum_(_together([sum_(multiply(grad, grad)) for grad in grads])))

    # Checkpoints

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Moments, counts and masters as arrays, by name and the number of the parameter."""
        kinds = self._named()
        waits = [reading(list(tensors.values())) for tensors in kinds]
        found: dict[str, npt.NDArray[Any]] = {}
        for tensors, wait in zip(kinds, waits, strict=True):
            found |= zip(tensors, wait(), strict=True)
        found["lr"] = np.float64(self.lr)  # type: ignore[assignment]
        return found

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Go on from where `state_dict` was taken; a ValueError names what does not fit."""
        self._check_state(state)
        loaded: list[tuple[Tensor, Tensor]] = []
        for tensors in self._named():
            arrays = [np.asarray(state[name]).astype(one._node.dtype.numpy) for name, one in tensors.items()]
            loaded += zip(tensors.values(), gathered(arrays, self._device), strict=True)
        for tensor, new in loaded:  # once all of it is there
            tensor._become(new._node)
        self._gather()
        self.lr = float(np.asarray(state["lr"]))

    def _check_state(self, state: Mapping[str, npt.ArrayLike]) -> None:
        shapes = {name: one.shape for tensors in self._named() for name, one in tensors.items()} | {"lr": ()}
        if set(shapes) != set(state):
            wrong = sorted(set(shapes) ^ set(state))
            raise ValueError(f"the state of another optimizer: {wrong[:5]} differ")
        for name, shape in shapes.items():
            if np.shape(state[name]) != shape:
                raise ValueError(f"{name} has shape {shape}, and {np.shape(state[name])} was given")

    # For subclasses

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """What a parameter becomes (`value`), and what its state becomes, by name."""
        raise NotImplementedError

    def _update_settings(self) -> Hashable | None:
        """What `_update` depends on besides tensors and groups; None: it has to be called in every step."""
        return None

    def _divide(self, present: Collection[int]) -> bool:
        """Get ready for a step in which only these parameters have gradients; whether there is more state."""
        return False

    def _count(self, present: Collection[int], sound: Tensor | None) -> None:
        """Count a step for the parameters that have gradients, unless those are not `sound`."""

    def _counts(self) -> list[Tensor]:
        """What `_count` changes."""
        return []

    def _add_state(self, name: str) -> None:
        """Zeros for each parameter."""
        zeros = [np.zeros(one.shape, self._master(at).dtype.numpy) for at, one in enumerate(self.parameters)]
        self._state[name] = gathered(zeros, self._device)

    def _number(self, value: float) -> Tensor:
        return from_numpy(np.array(value, np.float32), self._device)

    # Inside

    def _master(self, at: int) -> Tensor:
        return self._masters.get(at, self.parameters[at])

    def _named(self) -> list[dict[str, Tensor]]:
        """What a state consists of, by name, kind by kind."""
        kinds = [{f"{name}.{at}": one for at, one in enumerate(row)} for name, row in self._state.items()]
        kinds += [{f"master.{at}": one for at, one in self._masters.items()}, self._numbers]
        return [tensors for tensors in kinds if tensors]

    def _gather(self) -> None:
        """Lay parameters and state side by side, as far as their values have been computed."""
        for tensors in (self.parameters, *self._state.values(), list(self._masters.values())):
            if all(isinstance(tensor._node.value, Buffer) for tensor in tensors):
                gather(tensors)

    def _unscaled(self, grads: dict[int, Tensor]) -> Tensor | None:
        """Take the scale of the loss out of gradients, and adapt it; whether they are finite."""
        scale = self._numbers.get("scale")
        if scale is None or not grads:
            return None
        sound = all_(_together([all_(isfinite(grad)) for grad in grads.values()]))
        for at, grad in grads.items():
            grads[at] = divide(grad, scale)
        steps = where(sound, self._numbers["good_steps"] + 1, 0.0)
        grown = minimum(where(steps >= _GROWTH_STEPS, scale * 2, scale), _LARGEST_SCALE)
        self._numbers["good_steps"]._rebind(where(steps >= _GROWTH_STEPS, 0.0, steps))
        scale._rebind(where(sound, grown, maximum(scale * 0.5, LEAST_SCALE)))
        return sound

    def _change(self, at: int, grad: Tensor, sound: Tensor | None) -> None:
        tensor, master = self.parameters[at], self._master(at)
        for name, value in self._update(at, master, grad).items():
            old = master if name == "value" else self._state[name][at]
            new = value if sound is None else where(sound, value, old)
            old._rebind(new.detach())
        if master is not tensor:
            tensor._rebind(astype(master, tensor.dtype))


def _together(values: Sequence[Tensor]) -> Tensor:
    """Tensors without axes as one: what adds them up is then one kernel, and those before it can be one."""
    return concat([reshape(value, (1,)) for value in values])


def _with_tensors(value: Any, by_tensor: Mapping[int, Tensor]) -> Any:
    """A copy of an optimizer, or of a part of one, with other tensors in the place of its own."""
    if isinstance(value, Tensor):
        return by_tensor.get(id(value), value)
    if isinstance(value, list):
        return [_with_tensors(item, by_tensor) for item in value]
    if isinstance(value, dict):
        return {name: _with_tensors(item, by_tensor) for name, item in value.items()}
    if isinstance(value, (Optimizer, BiasCorrection)):
        twin = copy(value)
        vars(twin).update(_with_tensors(vars(value), by_tensor))
        return twin
    return value


class SGD(Optimizer):
    """Steps against the gradient, with momentum if asked for."""

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is in [0, 1), and {momentum} was given")
        super().__init__(parameters, lr, clip_norm, weight_decay=weight_decay)
        self._momentum = momentum
        if momentum:
            self._add_state("velocity")

    def _update_settings(self) -> Hashable | None:
        return (self._momentum,) if type(self) is SGD else None

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        decay = self._settings[at]["weight_decay"]
        grad = grad + value * decay if decay else grad
        if not self._momentum:
            return {"value": value - grad * self._lr}
        velocity = self._state["velocity"][at] * self._momentum + grad
        return {"velocity": velocity, "value": value - velocity * self._lr}


class Adam(Optimizer):
    """Steps of about the same size in every direction, by the moments of the gradients."""

    _decoupled = False

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are in [0, 1), and {betas} were given")
        super().__init__(parameters, lr, clip_norm, weight_decay=weight_decay)
        self._betas, self._eps = tuple(betas), eps
        self._add_state("mean")
        self._add_state("square")
        self._correction = BiasCorrection(betas, len(self.parameters), self._device)

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Moments, masters and how far the bias correction of each parameter is, as arrays."""
        found = super().state_dict()
        rate = found.pop("lr")
        return found | self._correction.state() | {"lr": rate}

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Go on from where `state_dict` was taken; a ValueError names what does not fit."""
        rest = {name: value for name, value in state.items() if name not in NAMES}
        self._check_state(rest)
        for name in NAMES:
            shapes = ((), (len(self.parameters),))
            if name not in state or np.shape(state[name]) not in shapes:
                given = f"shape {np.shape(state[name])}" if name in state else "nothing"
                raise ValueError(f"{name} has one of the shapes {shapes}, and {given} was given")
        super().load_state_dict(rest)
        self._correction.load({name: np.asarray(state[name], np.float32) for name in NAMES})

    def _update_settings(self) -> Hashable | None:
        known = type(self) in (Adam, AdamW)
        return (self._betas, self._eps, *self._correction.groups) if known else None

    def _divide(self, present: Collection[int]) -> bool:
        before = len(self._correction.tensors)
        self._correction.divide(present)
        return len(self._correction.tensors) > before

    def _count(self, present: Collection[int], sound: Tensor | None) -> None:
        self._correction.advance(present, sound)

    def _counts(self) -> list[Tensor]:
        return self._correction.tensors

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        decay = self._settings[at]["weight_decay"]
        first, second = self._betas
        if decay and not self._decoupled:
            grad = grad + value * decay
        mean = self._state["mean"][at] * first + grad * (1 - first)
        square = self._state["square"][at] * second + grad * grad * (1 - second)
        power1, power2 = self._correction.powers(at)
        size = self._lr / (1 - power1)
        spread = sqrt(square) / sqrt(1 - power2) + self._eps
        if decay and self._decoupled:
            value = value * (1 - self._lr * decay)
        return {"mean": mean, "square": square, "value": value - size * mean / spread}


class AdamW(Adam):
    """Adam whose weight decay does not pass through the moments."""

    _decoupled = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, clip_norm)
