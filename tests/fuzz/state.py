"""Random sequences of what users do to a few tensors, beside a model in NumPy.

Tensors are made, aliased, viewed, changed in place, moved, deleted, differentiated, and given to jitted
functions that read and change tensors from outside. Every line runs in both worlds: after it, everything that
can be read is the same in both, or the line was refused as the documentation says and has changed nothing.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fuzz import model
from fuzz.running import Invalid, Outcome

import penstock as ps
from penstock import Device
from penstock.errors import CaptureError
from penstock.registry import find

TOLERANCE = 2e-3  # errors of float32 grow from line to line; faults are of the size of the values
LARGEST = 8.0
# What the documentation says is refused; in the words of the errors.
REFUSALS = [
    (ValueError, "requires a gradient cannot change"),
    (ValueError, "nothing that this value was computed from requires a gradient"),
    (ValueError, "was changed after this value was computed from it"),
    (ValueError, "donated"),
    (ValueError, "tensors are on"),
    (CaptureError, "runs on one device"),
    (CaptureError, "inside a jitted function"),
    (TypeError, "inside a jitted function would have to go on"),
    (TypeError, "changed a tensor in place to a value that has a gradient"),
    (TypeError, "the result of the jitted function .* has no gradient"),
]
FIXED = {"w0": (3,), "w1": (2, 3), "w2": ()}  # used by jitted functions, and so never another tensor


class StateFuzzer:
    """Programs of users' actions on a device, and on the host beside it."""

    def __init__(self, device: Device, length: int = 30) -> None:
        host = find("host")
        self.devices = [device, ps.devices()[0] if device is host else host]
        self.length = length

    def grow(self, seed: int) -> Outcome:
        writer = Writer(Run(self.devices), random.Random(seed))
        outcome = Outcome(writer.lines)
        try:
            while len(writer.lines) < self.length:
                writer.step()
            writer.read_all()
        except Wrong as error:
            outcome.wrong = str(error)
        outcome.refused = writer.run.refused
        return outcome

    def run(self, lines: Sequence[str]) -> str | None:
        run = Run(self.devices)
        for line in lines:
            wrong = run.line(line)
            if wrong is not None:
                return wrong
        return None


class Wrong(Exception):
    """A line whose effect in Penstock differs from the model."""


class Run:
    """One program in both worlds."""

    def __init__(self, devices: list[Device]) -> None:
        self.real: dict[str, Any] = {"ps": ps, "np": np, "gc": gc, "devices": devices}
        self.model: dict[str, Any] = {
            "ps": model.Namespace,
            "np": np,
            "gc": gc,
            "devices": ["first", "second"],
        }
        self.refused = 0

    def line(self, line: str) -> str | None:
        """Run a line in Penstock and in the model; the difference. Invalid: not defined in the model."""
        before = self._saved()
        must_refuse = False
        if line.startswith("read("):
            text = line.removeprefix("read(").removesuffix(")")
            return self._read(text)
        try:
            exec(line, self.model)
            self._check_sizes()
        except model.MustRefuse:
            must_refuse = True
            self._restore(before)
        except Exception:
            self._restore(before)
            raise Invalid from None
        try:
            exec(line, self.real)
        except NameError:
            raise Invalid from None
        except Exception as error:
            if not documented(error):
                return f"{line}: {type(error).__name__}: {error}"
            if "ps.grad(" in line and "has no gradient, as it" in str(error):  # after the function has run
                for name in set(self.model) - set(before[0]):
                    del self.model[name]
                self.model.update(before[0])
            else:
                self._restore(before)
            self.refused += 1
            return None
        if must_refuse:
            return f"{line}: should have been refused"
        return self._flags(line)

    def _read(self, text: str) -> str | None:
        try:
            expected = eval(text, self.model)
            array = None if expected is None else expected.array
        except model.Gone:
            array = model.Gone
        except Exception:
            raise Invalid from None
        try:
            result = eval(text, self.real)
            values = None if result is None else result.numpy()
        except Exception as error:
            if array is model.Gone and documented(error):
                return None
            return f"read({text}): {type(error).__name__}: {error}"
        if array is model.Gone:
            return f"read({text}): should have been refused"
        if array is None or values is None:
            same = array is None and values is None
        else:
            same = array.shape == values.shape and np.allclose(
                values, array, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
            )
            same = same and bool(np.all((np.signbit(values) == np.signbit(array)) | (np.abs(array) < 10)))
        return None if same else f"{text} is {_shown(values)} instead of {_shown(array)}"

    def _flags(self, line: str) -> str | None:
        """Whether the same tensors require gradients."""
        for name, expected in self.model.items():
            result = self.real.get(name)
            both = isinstance(expected, model.Tensor) and isinstance(result, ps.Tensor)
            if both and not expected.donated and result.requires_grad != expected.requires_grad:
                return f"{line}: {name}.requires_grad is {result.requires_grad}"
        return None

    def _check_sizes(self) -> None:
        for value in self.model.values():
            if isinstance(value, model.Tensor):
                grads = [value.grad] if value.grad is not None else []
                for tensor in (value, *grads):
                    if np.any(np.abs(np.nan_to_num(tensor._array.astype(float))) > LARGEST):
                        raise Invalid

    def _saved(self) -> tuple[dict[str, Any], list[tuple[model.Tensor, Any]]]:
        return dict(self.model), [(tensor, tensor.state()) for tensor in model.alive]

    def _restore(self, saved: tuple[dict[str, Any], list[tuple[model.Tensor, Any]]]) -> None:
        self.model.clear()
        self.model.update(saved[0])
        for tensor, state in saved[1]:
            tensor.restore(state)


def documented(error: Exception) -> bool:
    return any(isinstance(error, kind) and re.search(words, str(error)) for kind, words in REFUSALS)


def _shown(values: Any) -> str:
    return "None" if values is None else repr(np.asarray(values).tolist())


class Writer:
    """Chooses lines."""

    def __init__(self, run: Run, choice: random.Random) -> None:
        self.run = run
        self.choice = choice
        self.lines: list[str] = []
        self.functions: dict[str, tuple[int, bool]] = {}  # how many tensors they take, and whether a number
        for name, shape in FIXED.items():
            self.add(f"{name} = {self.array(shape)}")
            if choice.random() < 0.5:
                self.add(f"{name}.requires_grad_()")
        self.add(f"m0 = ps.asarray(np.array({[choice.random() < 0.5 for _ in range(3)]}), device=devices[0])")
        self.add(f"t0 = {self.array((3,))}")
        self.add(f"t1 = {self.array((2, 3))}")

    def add(self, line: str) -> bool:
        """Whether it is part of the program now."""
        try:
            wrong = self.run.line(line)
        except Invalid:
            return False
        self.lines.append(line)
        if wrong is not None:
            raise Wrong(wrong)
        return True

    def read_all(self) -> None:
        for name, value in list(self.run.model.items()):
            if isinstance(value, model.Tensor):
                self.add(f"read({name})")
                if not value.donated:
                    self.add(f"read({name}.grad)")

    def step(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (2, self.make),
            (4, self.alias),
            (6, self.change),
            (4, self.record),
            (3, self.define),
            (9, self.call),
            (3, self.backward),
            (2, self.grad),
            (2, self.toggle),
            (1, self.move),
            (3, self.read),
            (1, self.delete),
            (1, self.clear),
        ]
        weights = [weight for weight, _ in steps]
        self.choice.choices([step for _, step in steps], weights)[0]()

    # Texts

    def array(self, shape: tuple[int, ...]) -> str:
        numbers = np.array([self.choice.randint(-4, 4) / 4 for _ in range(int(np.prod(shape)))])
        if self.choice.random() < 0.15:
            return f"ps.zeros({shape}, device=devices[0])"
        return f"ps.asarray(np.array({numbers.reshape(shape).tolist()}, np.float32), device=devices[0])"

    def tensors(self, names: str = "wtu") -> list[str]:
        return [n for n, v in self.run.model.items() if isinstance(v, model.Tensor) and n[0] in names]

    def any(self, names: str = "wtu") -> str:
        return self.choice.choice(self.tensors(names))

    def target(self) -> str:
        """A name for a new tensor; t names are used again, which lets the old tensor go."""
        return self.choice.choice(["t0", "t1", "t2", "t3", "u0", "u1", "u2"])

    def expression(self, names: list[str], depth: int = 2) -> str:
        a = self.choice.choice(names)
        if depth == 0 or self.choice.random() < 0.2:
            return a
        a, b = (self.expression(names, depth - 1) for _ in range(2))
        return self.choice.choice(
            [
                f"({a} + {b})",
                f"({a} - {b})",
                f"({a} * {b})",
                f"({a} * {b})",
                f"ps.sin({a})",
                f"ps.tanh({a})",
                f"({a} * 0.5)",
                f"({a} + 0.25)",
                f"ps.where(m0, {a}, {b})",
                f"{a}[...]",
                f"(+{a})",
                f"{a}.detach()",
                f"ps.mean({a})",
                f"(ps.sum({a}) * 0.25)",
                f"ps.astype({a}, ps.float32)",
                f"ps.asarray({a}, copy=True)",
                f"ps.broadcast_to({a}, (2, 3))",
                f"ps.matmul(ps.broadcast_to({a}, (2, 3)), ps.broadcast_to({b}, (2, 3)).T)[0, 1]",
            ]
        )

    def changing(self, name: str, names: list[str]) -> str:
        """A statement that changes a tensor in place."""
        value = self.expression(names, 1)
        return self.choice.choice(
            [
                f"{name} += {value}",
                f"{name} -= {value}",
                f"{name} *= {value}",
                f"{name} *= 0.5",
                f"{name} += 1.0",
                f"{name}[...] = {value}",
                f"{name}[..., 1] = 0.25",
                f"{name}[..., 0:2] = {value}[..., 1:3]",
                f"{name}[..., ::-1] = {value}",
                f"{name}[m0] = 0.5",
            ]
        )

    def guarded(self, statement: str) -> str:
        return f"with ps.no_grad(): {statement}" if self.choice.random() < 0.6 else statement

    # Lines

    def make(self) -> None:
        self.add(f"{self.target()} = {self.array(self.choice.choice([(3,), (2, 3), ()]))}")

    def alias(self) -> None:
        x = self.any()
        text = self.choice.choice(
            [
                f"ps.asarray({x}, copy=True)",
                f"ps.asarray({x}, copy=False)",
                f"ps.asarray({x})",
                f"{x}[...]",
                f"+{x}",
                f"ps.astype({x}, {x}.dtype)",
                f"ps.astype({x}, {x}.dtype, copy=False)",
                f"{x}.detach()",
                f"ps.reshape({x}, {x}.shape)",
                x,
                f"{x}.to_device(devices[0])",
            ]
        )
        self.add(f"{self.target()} = {text}")

    def change(self) -> None:
        self.add(self.guarded(self.changing(self.any(), self.tensors())))

    def record(self) -> None:
        self.add(f"{self.target()} = {self.expression(self.tensors())}")

    def define(self) -> None:
        """A jitted function of one or two tensors, maybe a number, and tensors from outside."""
        if len(self.functions) >= 3:
            return
        name = f"f{len(self.functions)}"
        count, number = self.choice.choice([1, 2]), self.choice.random() < 0.4
        arguments = ["a", "b"][:count]
        names = [*arguments, *arguments, *FIXED]
        body: list[str] = []
        for _ in range(self.choice.randint(0, 3)):
            kind = self.choice.random()
            if kind < 0.25:
                body.append(f"x = {self.expression(names)}")
                names.append("x")
            elif kind < 0.75:
                body.append(self.guarded(self.changing(self.choice.choice([*FIXED, *arguments]), names)))
            elif kind < 0.9:
                body.append(f"ps.sum({self.expression(names)}).backward()")
            elif self.functions:
                body.append(f"x = {self.calling(self.choice.choice(list(self.functions)), names)}")
            else:
                body.append(f"{self.choice.choice(list(FIXED))}.grad = None")
        results = [self.expression(names) for _ in range(self.choice.choice([1, 1, 2]))]
        if number:
            results[0] = self.choice.choice(
                [f"({results[0]} * s if s == s else {results[0]})", f"ps.copysign({results[0]}.detach(), s)"]
            )
        body.append(
            f"return {', '.join(results)}" if len(results) == 1 else f"return ({', '.join(results)})[0]"
        )
        donate = self.choice.random() < 0.2
        head = f"{name} = ps.jit(donate=0)(function)" if donate else f"{name} = ps.jit(function)"
        parameters = ", ".join(arguments + ["s"] * number)
        text = "\n".join([f"def function({parameters}):", *(f"    {line}" for line in body), head])
        if self.add(text):
            self.functions[name] = count, number

    def calling(self, function: str, names: list[str]) -> str:
        count, number = self.functions[function]
        given = [self.choice.choice(names) for _ in range(count)]
        if number:
            given.append(self.choice.choice(["0.0", "-0.0", "float('nan')", "0.5", "1", "True", "-1.0"]))
        return f"{function}({', '.join(given)})"

    def call(self) -> None:
        if not self.functions:
            self.define()
            return
        names = self.tensors("t") + (self.tensors("wu") if self.choice.random() < 0.4 else [])
        text = self.calling(self.choice.choice(list(self.functions)), names)
        self.add(
            self.guarded(f"{self.target()} = {text}")
            if self.choice.random() < 0.2
            else f"{self.target()} = {text}"
        )

    def backward(self) -> None:
        self.add(f"ps.sum({self.expression(self.tensors())}).backward()")

    def grad(self) -> None:
        if self.functions and self.choice.random() < 0.6:
            name = self.choice.choice(list(self.functions))
            count, number = self.functions[name]
            rest = [self.any("tu") for _ in range(count - 1)] + ["0.5"] * number
            call = f"ps.sum({name}({', '.join(['x', *rest])}))"
        else:
            call = f"ps.sum({self.expression(['x', 'x', *self.tensors()])})"
        self.add(f"{self.target()} = ps.grad(lambda x: {call})({self.any()}).detach()")

    def toggle(self) -> None:
        name = self.choice.choice([*FIXED, *FIXED, "t0", "t1"])
        value = self.run.model.get(name)
        if isinstance(value, model.Tensor) and (value.leaf is not None or not value.requires_grad):
            self.add(f"{name}.requires_grad_({self.choice.random() < 0.6})")

    def move(self) -> None:
        x = self.any("tu")
        self.add(f"{self.target()} = {x}.detach().to_device(devices[{self.choice.randint(0, 1)}])")

    def read(self) -> None:
        name = self.any()
        self.add(self.choice.choice([f"read({name})", f"read({name}.grad)", f"{name}.realize()"]))

    def delete(self) -> None:
        names = self.tensors("u")
        if names:
            self.add(f"del {self.choice.choice(names)}; gc.collect(0)")

    def clear(self) -> None:
        self.add(f"{self.choice.choice(list(FIXED))}.grad = None")
