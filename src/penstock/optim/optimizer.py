"""The base of optimizers: parameters are updated in place by their gradients.

Everything that changes from step to step (moments, rates, counts) is a tensor, so a jitted training step is
captured once, and updates run inside the kernels that compute the gradients, or in one kernel after them.
Parameters share a flat allocation, and so do their means, their squares and their master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import CaptureError
from penstock.execution.hosting import move_to_host
from penstock.graph.calls import Subgraph, call, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.node import Node, Shape, placeholder
from penstock.memory.buffer import Buffer
from penstock.nn.parameter import Parameter
from penstock.optim.counting import Counts
from penstock.optim.groups import ParamGroup, Settings, Varied, flat
from penstock.optim.in_place import Step
from penstock.optim.state_shapes import Shapes, check_shapes
from penstock.runtime import Device
from penstock.tensor.arithmetic import divide, isfinite, maximum, minimum, multiply, sqrt, where
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, from_numpy, outside_capture, realize_together
from penstock.tensor.dtypes import float32
from penstock.tensor.gathering import full_gathered, gather, gathered, gathered_as, reading, realize_fitting
from penstock.tensor.keeping import release
from penstock.tensor.leaves import ends_at, sources_of
from penstock.tensor.manipulation import astype, concat, reshape
from penstock.tensor.recording import no_grad, recorded_once
from penstock.tensor.reduction import all as all_
from penstock.tensor.reduction import sum as sum_

Parameters = Iterable[Tensor] | Iterable[Mapping[str, Any]]
_FIRST_SCALE, LEAST_SCALE, _LARGEST_SCALE = 2.0**15, 1.0, 2.0**24  # of the loss
_GROWTH_STEPS = 1000  # without an overflow before the scale of the loss is doubled


# A recorded step: the subgraph, and the positions of the tensors that it takes and of those that it changes.
_Step = tuple[Subgraph, list[int], list[int]]


class Optimizer:
    """The base of optimizers: parameter groups, learning rate, clipping, and master weights.

    Parameters are given as tensors, or as groups: dicts with `params` and settings that differ. Parameters in
    float16 or bfloat16 have a float32 master weight; with float16 `backward` scales the loss, and a step
    whose gradients are not finite changes only the scale.

    >>> optimizer: ps.optim.Optimizer = ps.optim.SGD([ps.nn.Parameter(ps.ones(2))], lr=0.25)
    >>> optimizer.lr
    0.25
    """

    # The step-dependent scalars of each parameter, with their initial values.
    _first_counts: tuple[tuple[str, float], ...] = ()
    elementwise = False  # whether the update of an item depends on no other item of its parameter
    _counted_by: tuple[str, ...] = ()  # settings that these scalars depend on
    # Sums gradients with those of other ranks; by position.
    exchange: Callable[[dict[int, Tensor]], dict[int, Tensor]] | None = None

    def __init__(self, parameters: Parameters, lr: float, clip_norm: float | None, **defaults: Any) -> None:
        if isinstance(parameters, Tensor):
            raise TypeError("an optimizer takes a list of tensors, and a single tensor was given")
        self.defaults = {"lr": lr, **defaults}
        given = list(parameters)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.parameters: list[Tensor] = []
        self._group_of: list[int] = []  # the index of each parameter's group
        self._settings: list[Settings] = []  # of each group
        members: list[list[Tensor]] = []
        rates: list[float] = []
        for index, group in enumerate(groups):
            assert isinstance(group, Mapping)
            if not {"params"} <= set(group) <= {"params", "lr", *defaults}:
                names = ", ".join(["lr", *defaults])
                raise ValueError(f"a group has params and may have {names}; {sorted(group)} were given")
            self._settings.append(flat({name: group.get(name, value) for name, value in defaults.items()}))
            rates.append(group.get("lr", lr))
            params = group["params"]
            members.append([params] if isinstance(params, Tensor) else list(params))
            self.parameters += members[-1]
            self._group_of += [index] * len(members[-1])
        self._check_parameters()
        for settings in self._settings:
            self._check_settings(settings)
        if min(rates) < 0 or (clip_norm is not None and clip_norm <= 0):
            raise ValueError(
                f"lr is 0 or more and clip_norm above 0; {min(rates)} and {clip_norm} were given"
            )
        self.clip_norm = clip_norm
        self._device: Device = self.parameters[0].device
        self._varied = {"lr": Varied(rates, self._device)}
        self.param_groups = [
            ParamGroup(index, tensors, self._settings[index], self._varied)
            for index, tensors in enumerate(members)
        ]
        self._state: dict[str, list[Tensor]] = {}
        self._numbers: dict[str, Tensor] = {}
        kinds = [tuple(self._of(at)[name] for name in self._counted_by) for at in range(len(self.parameters))]
        self._counted = Counts(dict(self._first_counts), kinds, self._device) if self._first_counts else None
        self._masters: dict[int, Tensor] = {}  # by position
        self._device.state_owners.add(self)
        narrow = {at: tensor for at, tensor in enumerate(self.parameters) if tensor._node.dtype.itemsize == 2}
        masters = gathered_as([*narrow.values()], float32, self._device)
        self._masters.update(zip(narrow, masters, strict=True))
        if any(str(tensor.dtype) == "float16" for tensor in narrow.values()):
            self._numbers["scale"] = self._number(_FIRST_SCALE)
            self._numbers["good_steps"] = self._number(0)

    def _check_parameters(self) -> None:
        for tensor in self.parameters:
            known = isinstance(tensor, Tensor) and (tensor.requires_grad or isinstance(tensor, Parameter))
            if not known:
                raise TypeError(f"an optimizer takes tensors that require a gradient, not {tensor!r}")
        if not self.parameters:
            raise ValueError("an optimizer needs a parameter")
        if len({id(tensor) for tensor in self.parameters}) != len(self.parameters):
            raise ValueError("a parameter was given twice")
        if len({tensor.device for tensor in self.parameters}) > 1:
            names = sorted({tensor.device.name for tensor in self.parameters})
            raise ValueError(
                f"an optimizer works on one device, and the parameters are on {' and '.join(names)}"
            )

    def _check_settings(self, settings: Settings) -> None:
        """Raise for invalid settings of a group."""
        numbers = {name: value for name, value in settings.items() if isinstance(value, float)}
        wrong = {name: value for name, value in numbers.items() if value < 0 and name != "beta2_decay"}
        if wrong:
            raise ValueError(f"settings are 0 or more, and {wrong} were given")
        betas = tuple(numbers[name] for name in ("beta1", "beta2") if name in numbers)
        if not all(beta < 1 for beta in betas):
            raise ValueError(f"betas are in [0, 1), and {betas} were given")
        for name in ("momentum", "alpha", "rho"):
            if not numbers.get(name, 0.0) < 1:
                raise ValueError(f"{name} is in [0, 1), and {numbers[name]:g} was given")

    # Public use

    @property
    def lr(self) -> float:
        """The learning rate of the first group. Setting it sets all groups, without a new capture."""
        return self._varied["lr"].numbers[0]

    @lr.setter
    def lr(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of parameters with a new state; the other groups keep theirs.

        Settings that the group does not give are the optimizer's defaults.
        """
        if capture.get() is not None:
            raise CaptureError("a group of parameters was added inside a jitted function; add it before")
        groups = [{key: group[key] for key in group if key != "initial_lr"} for group in self.param_groups]
        more = {**self.defaults, **param_group}
        extended = type(self)([*groups, more], clip_norm=self.clip_norm)  # type: ignore[call-arg]
        for name in self._varied:
            extended.vary(name)
        state = extended.state_dict()
        for name, known in self.state_dict().items():
            if np.shape(known) == np.shape(state[name]):
                state[name] = known
            else:  # a value for each parameter or group, of which there are more now
                state[name][: np.size(known)] = known
        extended.load_state_dict(state)
        for old, new in zip(self.param_groups, extended.param_groups, strict=False):
            vars(old).update(vars(new), _more=old._more)  # schedulers may hold the old groups
        self.param_groups.append(extended.param_groups[-1])
        vars(self).update(vars(extended), defaults=self.defaults, param_groups=self.param_groups)

    def vary(self, name: str) -> None:
        """Make a setting a tensor, like `lr`, so that schedulers can change it without a new capture."""
        if name not in self._varied:
            self._varied[name] = Varied([settings[name] for settings in self._settings], self._device)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for tensor in self.parameters:
            tensor.grad = None

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, with a scaled loss if parameters are float16."""
        scale = self._numbers.get("scale")
        (loss if scale is None else loss * scale).backward()

    def step(self) -> None:
        """Update every parameter that has a gradient, and set the gradients to None.

        Outside of a jitted function the new values are computed immediately, together with the loss: pending
        steps would otherwise be recomputed by each later step.
        """
        if (capturing := capture.get()) is not None:
            # Replays update in place, so flat allocations last. Other steps allocate new values.
            state = (*self.parameters, *chain(*self._state.values()), *self._masters.values())
            outside = [tensor for tensor in state if capturing.stand_in(tensor) is not tensor]
            with outside_capture():
                if outside:
                    realize_fitting(outside)
                self._gather()
            self._divide(self._present())
            capturing.assume(self._settings_key)
            self._record_step()
            return
        # The loss, and what else is in use of the forward pass: after the step it would have to be computed
        # again, from the old parameters.
        grads = [tensor.grad for tensor in self.parameters if tensor.grad is not None]
        sources = [tensor for tensor in sources_of(grads) if tensor.device is self._device]
        tensors = self._all()
        step = Step(tensors)
        try:
            self._repeat_step(tensors)
            # Cohorts may have added tensors.
            realize_together([*self._all(), *sources], repeated=True, replaced=step.replaced())
            release(self._device)
        except BaseException as error:
            step.undo(error)
            raise

    def _all(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        state = chain(*self._state.values(), self._masters.values(), self._numbers.values())
        return [*self.parameters, *state, *([] if self._counted is None else self._counted.tensors)]

    def _present(self) -> list[int]:
        """The parameters that have a gradient."""
        return [at for at, tensor in enumerate(self.parameters) if tensor.grad is not None]

    def _divide(self, present: Collection[int]) -> bool:
        """Prepare a step in which only these parameters have gradients; whether that added state."""
        if self._counted is None:
            return False
        before = len(self._counted.tensors)
        self._counted.divide(present)
        return len(self._counted.tensors) > before

    def _repeat_step(self, state: Sequence[Tensor]) -> None:
        """Like `_record_step`, but the step is recorded once as a subgraph, and called afterwards."""
        present = self._present()
        if self._divide(present):
            state = self._all()
        grads = [tensor.grad for tensor in self.parameters if tensor.grad is not None]
        tensors = [*state, *(varied.tensor for varied in self._varied.values()), *grads]
        known_rule = type(self).__module__.startswith(
            f"{__package__}."
        )  # its update depends on settings only
        elsewhere = any(grad.device is not self._device for grad in grads)  # `_record_step` raises
        if (
            not known_rule
            or elsewhere
            or self.exchange is not None
            or len({*map(id, tensors)}) < len(tensors)
        ):
            self._record_step()  # a tensor that occurs twice may be two tensors in the next step
            return
        nodes = [tensor._node for tensor in tensors]
        kinds = tuple([(node.shape, node.dtype.name) for node in nodes])
        cohorts = () if self._counted is None else tuple(self._counted.cohorts)
        key = type(self), tuple(present), kinds, tuple(self._group_of), cohorts, self._settings_key()
        known = recorded_once(self._device, key, lambda: self._recorded_step(tensors))
        if known is None:
            self._record_step()
            return
        subgraph, taken, changed = known
        results = call(subgraph, [nodes[at] for at in taken])
        for at, node in zip(changed, results, strict=True):
            if tensors[at]._actual_requires_grad:
                ends_at(node, tensors[at])
            tensors[at]._actual_node = node
        self.zero_grad()

    def _recorded_step(self, tensors: Sequence[Tensor]) -> _Step:
        """Record a step on a copy with placeholders: other threads may use the optimizer's tensors."""
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
        assert made is not None, "an update reads a tensor that is not part of the optimizer"
        return made[0], [leaves.index(leaf) for leaf in made[1]], changed

    def _settings_key(self) -> Hashable:
        """The key of a recorded step by its settings."""
        groups = tuple([tuple(group.items()) for group in self._settings])
        return groups, tuple(self._varied), self.clip_norm

    def _record_step(self) -> None:
        with no_grad():
            grads = {
                at: astype(tensor.grad, self._master(at).dtype)
                for at, tensor in enumerate(self.parameters)
                if tensor.grad is not None
            }
            if self.exchange is not None:
                grads = self.exchange(grads)
            sound = self._unscaled(grads)
            if self.clip_norm is not None and grads:
                factor = minimum(self.clip_norm / (self.norm(list(grads.values())) + 1e-6), 1.0)
                grads = {at: grad * factor for at, grad in grads.items()}
            if self._counted is not None:
                self._counted.advance(grads.keys(), sound, self._next_counts)
            for at, grad in grads.items():
                self._change(at, grad, sound)
            self.zero_grad()

    @staticmethod
    def norm(grads: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together."""
        return sqrt(sum_(_together([sum_(multiply(grad, grad)) for grad in grads])))

    def state_nodes(self) -> list[Node]:
        """What holds parameters, their gradients and state."""
        gradients = [grad for tensor in self.parameters if (grad := tensor._actual_grad) is not None]
        return [tensor._actual_node for tensor in (*self._all(), *gradients)]

    def move_to_host(self, but: Collection[Node]) -> bool:
        """Have all of that but some lie at the host until a program wants it, as a limit leaves no room."""
        return move_to_host([node for node in self.state_nodes() if node not in but], self._device)

    # Checkpoints

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Moments, counts, master weights and rates as arrays, by name and position."""
        kinds = self._named()
        waits = [reading(list(tensors.values())) for tensors in kinds]
        state: dict[str, npt.NDArray[Any]] = {}
        for tensors, wait in zip(kinds, waits, strict=True):
            state |= zip(tensors, wait(), strict=True)
        return state | self._counts_and_rates()

    def _counts_and_rates(self) -> dict[str, npt.NDArray[Any]]:
        state = {} if self._counted is None else self._counted.state()
        for name, varied in self._varied.items():
            state[name] = np.array(varied.numbers if len(varied.numbers) > 1 else varied.numbers[0])
        return state

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Restore a `state_dict`; a ValueError names what does not fit."""
        self._check_state(state)
        loaded: list[tuple[Tensor, Tensor]] = []
        for tensors in self._named():
            arrays = [
                np.asarray(state[name]).astype(tensor._node.dtype.numpy) for name, tensor in tensors.items()
            ]
            loaded += zip(tensors.values(), gathered(arrays, self._device), strict=True)
        for tensor, new in loaded:  # after all arrays are converted
            tensor._become(new._node)
        self._gather()
        if self._counted is not None:
            self._counted.load({name: np.asarray(state[name], np.float32) for name in self._counted.names})
        for name in self._varied:
            for group, number in zip(self.param_groups, self._per_group(state[name]), strict=True):
                group[name] = number

    def _per_group(self, numbers: npt.ArrayLike) -> list[float]:
        result: list[float] = np.broadcast_to(np.asarray(numbers), len(self.param_groups)).tolist()
        return result

    def _check_state(self, state: Mapping[str, npt.ArrayLike]) -> None:
        shapes: dict[str, Shapes] = {
            name: (tensor.shape,) for tensors in self._named() for name, tensor in tensors.items()
        }
        # Older checkpoints have a single value for all.
        counts = () if self._counted is None else self._counted.names
        shapes |= dict.fromkeys(counts, ((), (len(self.parameters),)))
        shapes |= dict.fromkeys(self._varied, ((), (len(self.param_groups),)))
        check_shapes(state, shapes, counts)

    # For subclasses

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """The new value of a parameter (`value`), and its new state, by name."""
        raise NotImplementedError

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The next scalars of a parameter with a gradient, in the order of `_first_counts`."""
        raise NotImplementedError

    def _counts_of(self, at: int) -> list[Tensor]:
        """The scalars of a parameter, including this step."""
        assert self._counted is not None
        return self._counted.of(at)

    def _of(self, at: int) -> Settings:
        """The settings of a parameter's group, as plain values."""
        return self._settings[self._group_of[at]]

    def _setting(self, at: int, name: str) -> Any:
        """A setting of a parameter; a tensor if a scheduler varies it."""
        varied = self._varied.get(name)
        return self._of(at)[name] if varied is None else varied.of(self._group_of[at])

    def _rate(self, at: int) -> Tensor:
        """The learning rate of a parameter."""
        return self._varied["lr"].of(self._group_of[at])

    def _decayed(self, at: int, value: Tensor) -> Tensor:
        """A parameter after decoupled weight decay."""
        decay = self._of(at)["weight_decay"]
        return value * (1 - self._rate(at) * decay) if decay else value

    def _with_decay(self, at: int, value: Tensor, grad: Tensor) -> Tensor:
        """A gradient with weight decay added."""
        decay = self._of(at)["weight_decay"]
        return grad + value * decay if decay else grad

    def _any(self, name: str) -> bool:
        """Whether a setting is true, or not 0, in any group."""
        return any(settings[name] for settings in self._settings)

    def _add_state(self, name: str, first: float = 0.0, shapes: Sequence[Shape] | None = None) -> None:
        """Add state for each parameter, by default in its shape."""
        shapes = shapes or [tensor.shape for tensor in self.parameters]
        dtypes = [self._master(at).dtype for at in range(len(shapes))]
        self._state[name] = full_gathered(shapes, first, dtypes, self._device)

    def _number(self, value: float) -> Tensor:
        return from_numpy(np.array(value, np.float32), self._device)

    # Internals

    def _master(self, at: int) -> Tensor:
        return self._masters.get(at, self.parameters[at])

    def _named(self) -> list[dict[str, Tensor]]:
        """The tensors of a state by name, a dict for each kind."""
        kinds = [{f"{name}.{at}": part for at, part in enumerate(row)} for name, row in self._state.items()]
        kinds += [{f"master.{at}": tensor for at, tensor in self._masters.items()}, self._numbers]
        return [tensors for tensors in kinds if tensors]

    def _gather(self) -> None:
        """Move parameters and state into flat allocations, if they have been computed."""
        for tensors in (self.parameters, *self._state.values(), list(self._masters.values())):
            if all(isinstance(tensor._node.value, Buffer) for tensor in tensors):
                gather(tensors)

    def _unscaled(self, grads: dict[int, Tensor]) -> Tensor | None:
        """Divide gradients by the scale of the loss, and adapt the scale; whether they are finite."""
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
    """Tensors without axes as a vector, so that one kernel sums them, and those before it can be fused."""
    return concat([reshape(value, (1,)) for value in values])


def _with_tensors(value: Any, by_tensor: Mapping[int, Tensor]) -> Any:
    """A copy of an optimizer, or of a part of it, with its tensors replaced."""
    if isinstance(value, Tensor):
        return by_tensor.get(id(value), value)
    if isinstance(value, list):
        return [_with_tensors(item, by_tensor) for item in value]
    if isinstance(value, dict):
        return {name: _with_tensors(item, by_tensor) for name, item in value.items()}
    if isinstance(value, (Optimizer, Counts, Varied)):
        replaced = copy(value)
        vars(replaced).update(_with_tensors(vars(value), by_tensor))
        return replaced
    return value
