"""From a group to its loop form: which thread computes what, in which loops, and where every item lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.device.driver import Capabilities
from penstock.fusion.groups import COSTLY, VIEWS, Group
from penstock.fusion.index import (
    ZERO,
    Index,
    Place,
    SplitNeeded,
    Variables,
    flat,
    source_place,
    unflatten,
    variable,
)
from penstock.graph.contraction import GATHER
from penstock.graph.creating import SEQUENCE
from penstock.graph.dtypes import HALVES
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import Node
from penstock.graph.random import RANDOM_BITS
from penstock.graph.reducing import REDUCTIONS
from penstock.graph.shaping import CONCAT, PAD
from penstock.kernels.c_expressions import COMBINE, expression, has_vectors
from penstock.kernels.loops import (
    Array,
    Choose,
    Count,
    Fold,
    Let,
    Load,
    Loop,
    LoopForm,
    Random,
    Splat,
    Statement,
    Store,
    Type,
    Update,
    Variable,
)

_GROUP = 256  # threads of a work-group on a GPU
_LANES = 8  # PoCL names 16 on CPUs with registers for 8, and its functions of 16 crash its compiler
_BLOCK = 256  # columns that a thread of a CPU reduces at a time
_TASKS = 4  # for each compute unit of a CPU, so that none waits long for the last
_MIN_TASK = 4096  # items; less is not worth a thread of its own
_KEPT_BYTES = 1 << 15  # of one row, which is to stay in a CPU's nearest cache


class LanesImpossible(Exception):
    """Neighbouring items lie at places that no vector can be read from."""


@dataclass(frozen=True)
class Value:
    """A value in a kernel: its name, its type, and the scope that it is computed in."""

    name: str
    type: Type
    depth: int


def computed_dtype(node: Node) -> str:
    """The dtype in which a kernel computes a node's values: halves are widened."""
    return "float32" if node.dtype in HALVES else str(node.dtype)


@dataclass(frozen=True)
class Lowered:
    """A group's loop form, and which inputs each output may be written over."""

    form: LoopForm
    over: tuple[tuple[int, ...], ...]  # for each output: numbers of inputs


def lower(group: Group, capabilities: Capabilities) -> Lowered:
    """The loop form of a map, row or column group. (A matmul's is made around its template.)"""
    vectors = all(has_vectors(computed_dtype(node)) for node in (*group.nodes, *group.inputs))
    lanes = _LANES if capabilities.vector_width > 1 and vectors else 1
    splits: list[tuple[str, int]] = []
    kind = {"map": _Map, "row": _Row, "column": _Column}[group.kind]
    while True:
        try:
            trial = kind(group, capabilities, 1, splits, [])
            trial.write()
            final = kind(group, capabilities, lanes, splits, trial.merges())
            return final.write()
        except SplitNeeded as needed:
            splits.append((needed.name, needed.inner))
        except LanesImpossible:
            lanes = 1


@dataclass(frozen=True)
class Merge:
    """Two neighbouring variables that run as one, because every index uses them as one."""

    name: str
    outer: str
    inner: str
    length: int  # of the inner one

    def applied(self, index: Index) -> Index:
        """The index with the one variable instead of the two."""
        both = variable(self.outer) * self.length + variable(self.inner)
        factor = index.factor(self.inner)
        return index + both * -factor + variable(self.name) * factor


class Scopes:
    """Writes the statements of a kernel. Every value is computed once, in the outermost loop where it can be.

    Scope 0 is before the innermost loop, scope 1 inside it.
    """

    def __init__(self, group: Group, variables: Variables) -> None:
        self.group = group
        self.variables = variables
        self.form = LoopForm(
            outputs=[str(node.dtype) for node in group.outputs],
            inputs=[str(node.dtype) for node in group.inputs],
        )
        self.bodies: list[list[Statement]] = [[], []]
        self.lanes = 1
        self.vector = ""  # the variable whose neighbouring values are the lanes
        self.lane_steps: dict[str, int] = {}  # how variables differ from lane to lane; absent: not at all
        self.depth_of: dict[str, int] = {}  # the scope of each variable
        self.given: dict[Node, Value] = {}  # values that are at hand whatever the place
        self.kept: dict[tuple[Node, Place], tuple[str, Index]] = {}  # values in memory of the group
        self.used: set[Index] = set()
        self.merged: list[Merge] = []
        self.loads: dict[int, set[tuple[int, Index]]] = {}  # of each input: the stages, and where
        self.stage = 0
        self._values: dict[tuple[Node, Place], Value] = {}
        self._names: dict[Statement, Value] = {}
        self._count = 0
        self._scalars: dict[Node, list[str]] = {}
        for node in group.nodes:
            number = {FULL: 1, SEQUENCE: 2}.get(node.primitive, 0)
            first = len(self.form.scalars)
            self._scalars[node] = [f"c{first + k}" for k in range(number)]
            self.form.scalars += [computed_dtype(node)] * number

    def leave(self) -> list[Statement]:
        """End the inner scope: what it held is its statements, and nothing in it is known any more."""
        body, self.bodies[1] = self.bodies[1], []
        self._values = {key: value for key, value in self._values.items() if value.depth == 0}
        self._names = {key: value for key, value in self._names.items() if value.depth == 0}
        for name in [name for name, depth in self.depth_of.items() if depth == 1]:
            if name in self.variables.computed or name.startswith("k"):
                del self.depth_of[name]
                self.lane_steps.pop(name, None)
        return body

    def name(self, prefix: str = "v") -> str:
        """A new name."""
        self._count += 1
        return f"{prefix}{self._count}"

    # Whole numbers

    def text(self, index: Index) -> tuple[str, int, int]:
        """An index as text, the scope in which it is known, and its step from lane to lane."""
        depth = step = 0
        self.used.add(index)
        for merge in self.merged:
            index = merge.applied(index)
        for name, factor in index.terms:
            self._define(name)
            depth = max(depth, self.depth_of[name])
            step += factor * self.lane_steps.get(name, 0)
        return str(index), depth, step

    def _define(self, name: str) -> None:
        """Compute a quotient or remainder before its first use."""
        if name in self.depth_of:
            return
        whole, operation, divisor = self.variables.computed[name]
        text, depth, step = self.text(whole)
        if step:
            raise LanesImpossible
        self.bodies[depth].append(Count(name, f"{text} {operation} {divisor}"))
        self.depth_of[name] = depth

    def count(self, text: str, depth: int, length: int, step: int = 0) -> Index:
        """A new variable with the value of a text."""
        name = self.name("k")
        self.bodies[depth].append(Count(name, text))
        self.variables.lengths[name] = length
        self.depth_of[name] = depth
        if step:
            self.lane_steps[name] = step
        return variable(name)

    # Values

    def value(self, node: Node, place: Place) -> Value:
        """A node's value at a place."""
        while node.primitive in VIEWS and node not in self.group.inputs:  # a chain of them may be long
            place = source_place(node, place, self.variables)
            node = node.inputs[0]
        if node in self.given:
            return self.given[node]
        key = (node, place)
        if key in self.kept:
            array, index = self.kept[key]
            return self._load(array, computed_dtype(node), computed_dtype(node), index)
        if key not in self._values:
            self._values[key] = self._value(node, place)
        return self._values[key]

    def _value(self, node: Node, place: Place) -> Value:
        if node in self.group.inputs:
            number, index = self.group.inputs.index(node), flat(place, node.shape)
            self.loads.setdefault(number, set()).add((self.stage, index))
            return self._load(f"in{number}", computed_dtype(node), str(node.dtype), index)
        primitive = node.primitive
        if primitive is FULL:
            return Value(self._scalars[node][0], Type(computed_dtype(node)), 0)
        if primitive is SEQUENCE:
            return self._sequence(node, place)
        if primitive is RANDOM_BITS:
            return self._random(node, place)
        if primitive is PAD:
            return self._pad(node, place)
        if primitive is CONCAT:
            return self._concat(node, place)
        if primitive is GATHER:
            return self._gather(node, place)
        assert primitive not in REDUCTIONS, node
        values = [self.value(parent, place) for parent in node.inputs]
        return self.apply(node, values)

    def apply(self, node: Node, values: Sequence[Value]) -> Value:
        """A primitive on values."""
        lanes = max((value.type.lanes for value in values), default=1)
        wide = [self.widened(value, lanes) for value in values]
        depth = max(value.depth for value in wide)
        result, of = Type(computed_dtype(node), lanes), wide[-1].type
        operation = node.primitive.name
        inputs = tuple(value.name for value in wide)
        if lanes > 1 and expression(operation, result, of, inputs) is None:
            raise LanesImpossible
        if node.primitive is CAST and result.dtype == of.dtype:
            value = wide[0]  # between halves and floats, which are the same inside a kernel
        else:
            value = self.let(Let("", result, operation, inputs, of), depth)
        if node.primitive is CAST and node.dtype in HALVES:  # whoever asks for a half wants it rounded
            value = self.let(Let("", result, f"round_{node.dtype}", (value.name,), result), depth)
        return value

    def let(self, statement: Let | Load | Splat | Random, depth: int) -> Value:
        """Enter a statement that names a value, unless an equal one is there."""
        if statement not in self._names:
            name = self.name()
            self.bodies[depth].append(replace(statement, name=name))
            self._names[statement] = Value(name, statement.type, depth)
        return self._names[statement]

    def widened(self, value: Value, lanes: int) -> Value:
        """The same in every lane of a vector."""
        if value.type.lanes == lanes:
            return value
        return self.let(Splat("", Type(value.type.dtype, lanes), value.name), value.depth)

    def _load(self, buffer: str, dtype: str, stored: str, index: Index) -> Value:
        text, depth, step = self.text(index)
        lanes = self.lanes if step else 1
        return self.let(Load("", Type(dtype, lanes), buffer, stored, text, step), depth)

    def item(self, array: str, node: Node, index: Index) -> Value:
        """An item of memory of the group, which changes: it is read anew each time."""
        text, depth, step = self.text(index)
        dtype = computed_dtype(node)
        name, kind = self.name(), Type(dtype, self.lanes if step else 1)
        self.bodies[depth].append(Load(name, kind, array, dtype, text, step))
        return Value(name, kind, depth)

    def combined(self, reduction: Node, one: Value, other: Value) -> Value:
        """A reduction of two values."""
        operation = COMBINE[reduction.primitive.name]
        depth = max(one.depth, other.depth)
        return self.let(Let("", one.type, operation, (one.name, other.name), one.type), depth)

    def computed(self, nodes: Sequence[Node]) -> list[tuple[tuple[Node, Place], Value]]:
        """The values of nodes that the inner scope has computed, each at its one place."""
        wanted = set(nodes)
        found = [(key, value) for key, value in self._values.items() if key[0] in wanted and value.depth == 1]
        return [one for one in found if sum(other[0][0] is one[0][0] for other in found) == 1]

    def _sequence(self, node: Node, place: Place) -> Value:
        start, step = (Value(name, Type(computed_dtype(node)), 0) for name in self._scalars[node])
        position = self.number(place[0] if node.ndim else ZERO, start.type.dtype)
        lanes = position.type.lanes
        scaled = self.let(
            Let(
                "", position.type, "multiply", (position.name, self.widened(step, lanes).name), position.type
            ),
            position.depth,
        )
        first = self.widened(start, lanes)
        return self.let(
            Let("", position.type, "add", (first.name, scaled.name), position.type), position.depth
        )

    def number(self, index: Index, dtype: str) -> Value:
        """An index as a value."""
        text, depth, step = self.text(index)
        lanes = self.lanes if step else 1
        return self.let(Splat("", Type(dtype, lanes), text, step), depth)

    def _random(self, node: Node, place: Place) -> Value:
        text, depth, step = self.text(flat(place, node.shape))
        if step:
            raise LanesImpossible
        state = node.inputs[0]
        words = []
        for word in range(4):
            words.append(self.value(state, (Index((), word),)).name)
        return self.let(Random("", Type("uint32"), tuple(words), text), depth)

    def _inside(self, index: Index, start: int, count: int) -> tuple[str, Index, int]:
        """Whether an index lies in a range of an axis, its number there, and the scope; 0 if it does not."""
        moved = index + Index((), -start)
        low, high = self.variables.bounds(moved)
        if low >= 0 and high < count:
            return "1", moved, 0
        text, depth, step = self.text(moved)
        if step:
            others = [factor for name, factor in index.terms if not self.lane_steps.get(name)]
            whole = step == 1 and all(n % self.lanes == 0 for n in (start, count, index.constant, *others))
            if not whole:
                raise LanesImpossible  # a vector could be half inside
        condition = self.count(f"({text} >= 0 && {text} < {count})", depth, 2)
        return str(condition), self.count(f"{condition} ? {text} : 0", depth, count, step), depth

    def _pad(self, node: Node, place: Place) -> Value:
        source, inside, conditions, depth = node.inputs[0], [], [], 0
        for index, (start, count, step) in zip(place, node.attributes["slices"], strict=True):
            first = start if step > 0 else start + (count - 1) * step
            extent = (count - 1) * abs(step) + 1
            condition, moved, scope = self._inside(index, first, extent)
            if abs(step) > 1:
                on, moved = self._on_step(moved, abs(step))
                conditions.append(on)
                scope = max(scope, self.text(moved)[1])
            conditions.append(condition)
            depth = max(depth, scope)
            inside.append(moved if step > 0 else moved * -1 + Index((), count - 1))
        value = self.value(source, tuple(inside))
        real = [condition for condition in conditions if condition != "1"]
        if not real:
            return value
        zero = self.let(Splat("", value.type, "0"), 0)
        return self._choose(" && ".join(real), depth, value, zero)

    def _on_step(self, index: Index, step: int) -> tuple[str, Index]:
        """Whether a number is a multiple of a step, and its part."""
        text, depth, lane_step = self.text(index)
        if lane_step:
            raise LanesImpossible
        length = self.variables.bounds(index)[1] // step + 1
        return f"{text} % {step} == 0", self.count(f"{text} / {step}", depth, length)

    def _concat(self, node: Node, place: Place) -> Value:
        axis, start, result = node.attributes["axis"], 0, None
        for part in node.inputs:
            length = part.shape[axis]
            if not length:
                continue
            condition, moved, depth = self._inside(place[axis], start, length)
            value = self.value(part, (*place[:axis], moved, *place[axis + 1 :]))
            result = value if result is None else self._choose(condition, depth, value, result)
            start += length
        assert result is not None
        return result

    def _choose(self, condition: str, depth: int, yes: Value, no: Value) -> Value:
        lanes = max(yes.type.lanes, no.type.lanes)
        yes, no = self.widened(yes, lanes), self.widened(no, lanes)
        depth = max(depth, yes.depth, no.depth)
        name = self.name()
        self.bodies[depth].append(Choose(name, yes.type, condition, yes.name, no.name))
        return Value(name, yes.type, depth)

    def _gather(self, node: Node, place: Place) -> Value:
        source, index = node.inputs
        found = self.value(index, place[: index.ndim])
        if found.type.lanes > 1:
            raise LanesImpossible
        length = source.shape[0]
        # An index out of range must not read what is not there.
        row = self.count(
            f"{found.name} < 0 ? 0 : {found.name} < {length} ? (int){found.name} : {length - 1}",
            found.depth,
            length,
        )
        return self.value(source, (row, *place[index.ndim :]))


class _Lowering:
    """What the kinds of group share: variables, loops, and the order of things in a loop's body."""

    def __init__(
        self,
        group: Group,
        capabilities: Capabilities,
        lanes: int,
        splits: Sequence[tuple[str, int]],
        merges: list[Merge],
    ) -> None:
        self.group = group
        self.gpu = capabilities.vector_width == 1
        self.units = capabilities.compute_units
        self.local_bytes = min(capabilities.local_bytes, _KEPT_BYTES)
        self.lanes = lanes
        self._splits = splits
        self._lengths: dict[str, int] = {}
        self._merges = merges
        self._stores: dict[int, tuple[int, Index]] = {}  # of each output: the stage, and where
        self.space()
        self.scopes = Scopes(group, Variables(self._lengths))
        self.scopes.merged = merges
        for merge in merges:
            length = self._lengths[merge.outer] * merge.length
            self._lengths[merge.name] = self.scopes.variables.lengths[merge.name] = length

    def space(self) -> None:
        """Set out the variables."""
        raise NotImplementedError

    def write(self) -> Lowered:
        """The loop form."""
        raise NotImplementedError

    # Variables

    def axes(self, prefix: str, lengths: Sequence[int]) -> tuple[list[str], list[Index]]:
        """Variables for axes, and the index along each; an axis that must be split has several."""
        names: list[str] = []
        indices: list[Index] = []
        for axis, length in enumerate(lengths):
            pieces = [(f"{prefix}{axis}_", length)] if length > 1 else []
            for name, inner in self._splits:
                for at, (piece, n) in enumerate(pieces):
                    if piece == name:
                        pieces[at : at + 1] = [(f"{name}o", n // inner), (f"{name}i", inner)]
            index, stride = ZERO, 1
            for name, n in reversed(pieces):
                index += variable(name) * stride
                stride *= n
            self._lengths.update(pieces)
            names += [name for name, _ in pieces]
            indices.append(index)
        return names, indices

    def merges(self) -> list[Merge]:
        """The neighbours that every index uses as one, once all is written without merging."""
        raise NotImplementedError

    def found_merges(self, *lists: list[str]) -> list[Merge]:
        """The neighbours in each list that every index uses as one."""
        found: list[Merge] = []
        lengths = dict(self._lengths)
        for names in lists:
            names = list(names)
            at = len(names) - 2
            while at >= 0:
                outer, inner = names[at], names[at + 1]
                indices = [self._after(index, found) for index in self.scopes.used]
                if all(one.factor(outer) == one.factor(inner) * lengths[inner] for one in indices):
                    merge = Merge(f"{outer}{inner}", outer, inner, lengths[inner])
                    lengths[merge.name] = lengths[outer] * lengths[inner]
                    names[at : at + 2] = [merge.name]
                    found.append(merge)
                at -= 1
        return found

    @staticmethod
    def _after(index: Index, merges: list[Merge]) -> Index:
        for merge in merges:
            index = merge.applied(index)
        return index

    def joined(self, names: list[str]) -> list[str]:
        """Variables after merging."""
        result = list(names)
        for merge in self._merges:
            if merge.outer in result:
                at = result.index(merge.outer)
                result[at : at + 2] = [merge.name]
        return result

    def count(self, names: Sequence[str]) -> int:
        """How many combinations the variables have."""
        return math.prod(self._lengths[name] for name in names)

    def unpack(self, number: str, names: Sequence[str], depth: int) -> list[Statement]:
        """Variables from the number of their combination."""
        result: list[Statement] = []
        stride = 1
        for at, name in reversed(list(enumerate(names))):
            length = self._lengths[name]
            text = number if stride == 1 else f"{number} / {stride}"
            result.append(Count(name, text if at == 0 else f"{text} % {length}"))
            self.scopes.depth_of[name] = depth
            stride *= length
        return result

    # Loops of a CPU

    def tasks(self, count: int, items: int) -> int:
        """Into how many tasks so many equal parts, with so many items in all, are divided."""
        return max(1, min(count, self.units * _TASKS, items // _MIN_TASK))

    def vector_loops(
        self, name: str, start: str, stop: str, exact: bool, body: Callable[[], None]
    ) -> list[Statement]:
        """A loop over vectors of neighbouring items, and where they are not `exact`, one over the rest."""
        scopes, lanes = self.scopes, self.lanes
        scopes.depth_of[name] = 1
        result: list[Statement] = []
        if lanes > 1:
            scopes.lanes, scopes.lane_steps = lanes, {name: 1}
            body()
            result.append(
                Loop(name, start, stop if exact else f"{stop} - {lanes - 1}", str(lanes), scopes.leave())
            )
            if exact:
                return result
            start = f"{start} + ({stop} - {start}) / {lanes} * {lanes}"
        scopes.lanes, scopes.lane_steps = 1, {}
        body()
        result.append(Loop(name, start, stop, "1", scopes.leave()))
        return result

    def chunk(self, count: int, tasks: int, multiple: int = 1) -> list[Statement]:
        """The part of one task: counts `begin` and `end`."""
        size = -(-count // (tasks * multiple)) * multiple
        self.scopes.form.grid = (-(-count // size),)
        return [
            Count("begin", f"GROUP(0) * {size}"),
            Count("end", f"{count} - begin < {size} ? {count} : begin + {size}"),
        ]

    # Results

    def store(self, results: Sequence[tuple[int, Value, Index]]) -> None:
        """Write values to outputs; last of all in a body, so that nothing is read after it was written."""
        scopes = self.scopes
        for number, value, index in results:
            text, depth, step = scopes.text(index)
            lanes = scopes.lanes if step else 1
            wide = scopes.widened(value, lanes)
            stored = str(self.group.outputs[number].dtype)
            scopes.bodies[max(depth, wide.depth)].append(
                Store(wide.name, wide.type, f"out{number}", stored, text)
            )
            self._stores[number] = (scopes.stage, index)

    def lowered(self) -> Lowered:
        """The result, once everything is written."""
        return Lowered(self.scopes.form, overwritable(self.group, self.scopes.loads, self._stores))


def overwritable(
    group: Group, loads: Mapping[int, set[tuple[int, Index]]], stores: Mapping[int, tuple[int, Index]]
) -> tuple[tuple[int, ...], ...]:
    """For each output the inputs that it may be written over: each item is read only where it is written.

    Loads and stores are given by the number of the pass that they are in, and by their places.
    """
    over = []
    for number, output in enumerate(group.outputs):
        stage, index = stores[number]
        over.append(
            tuple(
                at
                for at, node in enumerate(group.inputs)
                if node.dtype.itemsize == output.dtype.itemsize
                and node.size == output.size
                and all(one == index and when <= stage for when, one in loads.get(at, ()))
            )
        )
    return tuple(over)


class _Map(_Lowering):
    """Every item by itself: a thread of a GPU computes one, a thread of a CPU a part of an axis."""

    def space(self) -> None:
        self._names, self._place = self.axes("a", max(self.group.outputs, key=lambda node: node.ndim).shape)
        self._shape = max(self.group.outputs, key=lambda node: node.ndim).shape

    def merges(self) -> list[Merge]:
        return self.found_merges(self._names)

    def _body(self) -> None:
        number = flat(tuple(self._place), self._shape)
        results = []
        for at, node in enumerate(self.group.outputs):
            if node.shape == self._shape:
                place = tuple(self._place)
            else:
                place = unflatten(number, node.shape, self.scopes.variables)
            results.append((at, self.scopes.value(node, place), number))
        self.store(results)

    def write(self) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        names = self.joined(self._names)
        size = self.count(names)
        if self.gpu:
            form.grid, form.group = (-(-size // _GROUP),), (_GROUP,)
            form.body = [Count("item", f"GROUP(0) * {_GROUP} + THREAD")]
            inside = self.unpack("item", names, 1)
            self._body()
            form.body.append(
                Loop("once", "item", str(size), str(size), [*inside, *scopes.bodies[0], *scopes.leave()])
            )
            return self.lowered()
        outer, inner = names[:-1], names[-1:]
        rows, length = self.count(outer), self.count(inner)
        if not inner:
            self._body()
            form.body = [*scopes.bodies[0], *scopes.leave()]
            return self.lowered()
        if rows == 1:
            form.body = self.chunk(length, self.tasks(length, size), 8)
            loops = self.vector_loops(inner[0], "begin", "end", length % self.lanes == 0, self._body)
            form.body += [*scopes.bodies[0], *loops]
            return self.lowered()
        form.body = self.chunk(rows, self.tasks(rows, size))
        inside = self.unpack("row", outer, 0)
        loops = self.vector_loops(inner[0], "0", str(length), length % self.lanes == 0, self._body)
        form.body.append(Loop("row", "begin", "end", "1", [*inside, *scopes.bodies[0], *loops]))
        return self.lowered()


class _Row(_Lowering):
    """Row after row, each in as many passes as its reductions need."""

    def space(self) -> None:
        first = next(node for node in self.group.nodes if node.primitive in REDUCTIONS)
        source, axes = first.inputs[0], first.attributes["axes"]
        kept = [1 if axis in axes else n for axis, n in enumerate(source.shape)]
        reduced = [n if axis in axes else 1 for axis, n in enumerate(source.shape)]
        self._rows, row_indices = self.axes("r", kept)
        self._columns, column_indices = self.axes("c", reduced)
        self._row = flat(tuple(row_indices), tuple(kept))
        self._column = flat(tuple(column_indices), tuple(reduced))
        self._number = self._row * self.group.columns + self._column
        self._levels = self._stages()

    def merges(self) -> list[Merge]:
        return self.found_merges(self._rows, self._columns)

    def _stages(self) -> dict[Node, int]:
        """How many passes must be over before a node can be computed."""
        level: dict[Node, int] = {}
        for node in self.group.nodes:
            before = max((level.get(parent, 0) for parent in node.inputs), default=0)
            level[node] = before + (node.primitive in REDUCTIONS)
        return level

    def _whole(self, node: Node) -> bool:
        return node.size == self.count(self._rows) * self.group.columns

    def write(self) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        rows, columns = self.count(self._rows), self.group.columns
        self._inner = self.joined(self._columns)
        outer = self.joined(self._rows)
        if self.gpu:
            threads = min(_GROUP, 1 << max(5, (columns - 1).bit_length()))
            form.grid, form.group = (rows,), (threads,)
            scopes.bodies[0] = self.unpack("GROUP(0)", outer, 0)
        else:
            scopes.bodies[0] = self.unpack("row", outer, 0)
        passes = 1 + max(level - (node.primitive in REDUCTIONS) for node, level in self._levels.items())
        needed = [self._needed(stage) for stage in range(passes)]
        for stage in range(passes):
            scopes.stage = stage
            keep = self._kept(needed, stage)
            self._pass(stage, keep)
        self.store(
            [
                (at, self._reduced_value(node), self._row)
                for at, node in enumerate(self.group.outputs)
                if not self._whole(node)
            ]
        )
        if self.gpu:
            form.body = scopes.bodies[0]
        else:
            part = self.chunk(rows, self.tasks(rows, rows * columns))
            form.body = [*part, Loop("row", "begin", "end", "1", scopes.bodies[0])]
        return self.lowered()

    def _reduced_value(self, node: Node) -> Value:
        return self.scopes.value(node, unflatten(self._row, node.shape, self.scopes.variables))

    def _roots(self, stage: int) -> tuple[list[Node], list[tuple[int, Node]]]:
        """The reductions that a pass computes, and the outputs that it writes."""
        reductions = [
            node
            for node in self.group.nodes
            if node.primitive in REDUCTIONS and self._levels[node] == stage + 1
        ]
        outputs = [
            (at, node)
            for at, node in enumerate(self.group.outputs)
            if self._whole(node) and self._levels[node] == stage
        ]
        return reductions, outputs

    def _needed(self, stage: int) -> set[Node]:
        """The nodes before any reduction that a pass computes."""
        reductions, outputs = self._roots(stage)
        stack = [node.inputs[0] for node in reductions] + [node for _, node in outputs]
        found: set[Node] = set()
        inside = set(self.group.nodes)
        while stack:
            node = stack.pop()
            if node in inside and node not in found and node.primitive not in REDUCTIONS:
                found.add(node)
                stack += node.inputs
        return found

    def _kept(self, needed: list[set[Node]], stage: int) -> list[Node]:
        """What takes long to compute and a later pass needs again: it stays in memory of the group."""
        later = set().union(*needed[stage + 1 :])
        room = self.local_bytes // (4 * self.group.columns)
        known = {node for node, _ in self.scopes.kept}
        found = [
            node
            for node in self.group.nodes
            if node in needed[stage] & later
            and node.primitive in COSTLY
            and node not in known
            and self._whole(node)
            and computed_dtype(node) == "float32"
        ]
        return found[: max(0, room - len(known))]

    def _pass(self, stage: int, keep: list[Node]) -> None:
        scopes = self.scopes
        reductions, outputs = self._roots(stage)
        if not reductions and not outputs:
            return
        lanes_of: dict[Node, list[tuple[str, int]]] = {node: [] for node in reductions}
        kept: dict[tuple[Node, Place], tuple[str, Index]] = {}
        arrays = {node: scopes.name("kept") for node in keep}
        for node, name in arrays.items():
            scopes.form.arrays.append(Array(name, computed_dtype(node), self.group.columns))

        def body() -> None:
            results = []
            for node in reductions:
                source = node.inputs[0]
                value = scopes.value(source, unflatten(self._number, source.shape, scopes.variables))
                wide = scopes.widened(value, scopes.lanes)
                known = {lanes: name for name, lanes in lanes_of[node]}
                name = known.get(scopes.lanes) or scopes.name("sum")
                if scopes.lanes not in known:
                    lanes_of[node].append((name, scopes.lanes))
                scopes.bodies[1].append(Update(name, wide.type, node.primitive.name, wide.name))
            for at, node in outputs:
                place = unflatten(self._number, node.shape, scopes.variables)
                results.append((at, scopes.value(node, place), self._number))
            for key, value in scopes.computed(keep):
                wide = scopes.widened(value, scopes.lanes)
                text, _, _ = scopes.text(self._column)
                scopes.bodies[1].append(Store(wide.name, wide.type, arrays[key[0]], wide.type.dtype, text))
                kept[key] = (arrays[key[0]], self._column)
            self.store(results)

        loops = self._loops(body)
        for node in reductions:
            for name, lanes in lanes_of[node]:
                kind = Type(computed_dtype(node), lanes)
                scopes.bodies[0].append(Variable(name, kind, node.primitive.name))
        scopes.bodies[0] += loops
        for node in reductions:
            self._fold(node, lanes_of[node])
        scopes.kept.update(kept)

    def _fold(self, node: Node, parts: list[tuple[str, int]]) -> None:
        """One value from the sums of all lanes and threads."""
        scopes, operation, dtype = self.scopes, node.primitive.name, computed_dtype(node)
        *vectors, (name, lanes) = parts
        for other, wide in vectors:
            part = scopes.name()
            scopes.bodies[0].append(Fold(part, Type(dtype, wide), operation, other, None))
            scopes.bodies[0].append(Update(name, Type(dtype), operation, part))
        result, array = scopes.name(), None
        if self.gpu:
            array = scopes.name("threads")
            stored = "int32" if dtype == "bool" else dtype
            scopes.form.arrays.append(Array(array, stored, scopes.form.group[0]))
        scopes.bodies[0].append(Fold(result, Type(dtype, lanes), operation, name, array))
        scopes.given[node] = Value(result, Type(dtype), 0)

    def _loops(self, body: Callable[[], None]) -> list[Statement]:
        scopes = self.scopes
        if self.gpu:
            inside = self.unpack("column", self._inner, 1)
            body()
            threads = scopes.form.group[0]
            return [
                Loop("column", "THREAD", str(self.group.columns), str(threads), [*inside, *scopes.leave()])
            ]
        if not self._inner:
            scopes.lanes, scopes.lane_steps = 1, {}
            body()
            return scopes.leave()
        *around, last = self._inner
        for name in around:
            scopes.depth_of[name] = 1
        length = self.count([last])
        loops = self.vector_loops(last, "0", str(length), length % self.lanes == 0, body)
        for name in reversed(around):
            loops = [Loop(name, "0", str(self.count([name])), "1", loops)]
        return loops


class _Column(_Lowering):
    """Reductions over axes that are not the last: neighbouring results are computed side by side."""

    def space(self) -> None:
        first = next(node for node in self.group.nodes if node.primitive in REDUCTIONS)
        self._source, axes = first.inputs[0], first.attributes["axes"]
        shape = self._source.shape
        self._kept, kept = self.axes("r", [1 if axis in axes else n for axis, n in enumerate(shape)])
        self._reduced, reduced = self.axes("c", [n if axis in axes else 1 for axis, n in enumerate(shape)])
        self._place = tuple(reduced[axis] if axis in axes else kept[axis] for axis in range(len(shape)))
        self._row = flat(tuple(kept), tuple(1 if axis in axes else n for axis, n in enumerate(shape)))
        self._reductions = [node for node in self.group.nodes if node.primitive in REDUCTIONS]

    def merges(self) -> list[Merge]:
        return self.found_merges(self._kept, self._reduced)

    def _results(self) -> None:
        """What is done to each result, and its store."""
        scopes = self.scopes
        results = []
        for at, node in enumerate(self.group.outputs):
            place = unflatten(self._row, node.shape, scopes.variables)
            results.append((at, scopes.value(node, place), self._row))
        self.store(results)

    def write(self) -> Lowered:
        kept = self.joined(self._kept)
        if self.gpu or not kept:
            return self._by_threads(kept)
        return self._by_blocks(kept)

    def _by_threads(self, kept: list[str]) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        size = self.count(kept)
        threads = _GROUP if self.gpu else 1
        form.grid, form.group = (-(-size // threads),), (threads,)
        form.body = [Count("item", f"GROUP(0) * {threads} + THREAD")]
        inside = self.unpack("item", kept, 0)
        variables = []
        names = {node: scopes.name("sum") for node in self._reductions}
        around = self.joined(self._reduced)
        for name in around:
            scopes.depth_of[name] = 1
        for node, name in names.items():
            value = scopes.value(node.inputs[0], self._place)
            scopes.bodies[1].append(Update(name, value.type, node.primitive.name, value.name))
            variables.append(Variable(name, Type(computed_dtype(node)), node.primitive.name))
        before, scopes.bodies[0] = scopes.bodies[0], []
        loops = scopes.leave()
        for name in reversed(around):
            loops = [Loop(name, "0", str(self.count([name])), "1", loops)]
        scopes.stage = 1
        for node, name in names.items():
            scopes.given[node] = Value(name, Type(computed_dtype(node)), 0)
        self._results()
        whole = [*inside, *before, *variables, *loops, *scopes.bodies[0], *scopes.leave()]
        form.body.append(Loop("once", "item", str(size), str(size), whole))
        return self.lowered()

    def _by_blocks(self, kept: list[str]) -> Lowered:
        """A block of neighbouring results at a time, each row of the block from start to end."""
        scopes, form = self.scopes, self.scopes.form
        *outer, last = kept
        rows, length = self.count(outer), self.count([last])
        block = min(_BLOCK, -(-length // (16 * max(1, self.units * 2 // rows))) * 16)
        blocks = -(-length // block)
        arrays = {node: scopes.name("sums") for node in self._reductions}
        form.grid = (rows * blocks,)
        form.arrays = [Array(name, computed_dtype(node), block) for node, name in arrays.items()]
        form.body = [
            Count("begin", f"GROUP(0) % {blocks} * {block}"),
            Count("end", f"{length} - begin < {block} ? {length} : begin + {block}"),
            Count("row", f"GROUP(0) / {blocks}"),
        ]
        form.body += self.unpack("row", outer, 0)
        exact = length % self.lanes == 0
        scopes.depth_of["begin"], scopes.variables.lengths["begin"] = 0, length
        at = variable(last) + variable("begin") * -1

        def start() -> None:
            for node, name in arrays.items():
                kind = Type(computed_dtype(node), scopes.lanes)
                zero = scopes.name()
                scopes.bodies[1].append(Variable(zero, kind, node.primitive.name))
                self._put(name, node, Value(zero, kind, 1), at)

        def add() -> None:
            for node, name in arrays.items():
                value = scopes.widened(scopes.value(node.inputs[0], self._place), scopes.lanes)
                old = scopes.item(name, node, at)
                self._put(name, node, scopes.combined(node, old, value), at)

        def finish() -> None:
            for node, name in arrays.items():
                scopes.given[node] = scopes.item(name, node, at)
            self._results()

        first = self.vector_loops(last, "begin", "end", exact, start)
        around = self.joined(self._reduced)
        for name in around:
            scopes.depth_of[name] = 1
        loops = self.vector_loops(last, "begin", "end", exact, add)
        for name in reversed(around):
            loops = [Loop(name, "0", str(self.count([name])), "1", loops)]
        scopes.stage = 1
        final = self.vector_loops(last, "begin", "end", exact, finish)
        form.body += [*scopes.bodies[0], *first, *loops, *final]
        return self.lowered()

    def _put(self, array: str, node: Node, value: Value, index: Index) -> None:
        text, _, _ = self.scopes.text(index)
        self.scopes.bodies[1].append(Store(value.name, value.type, array, computed_dtype(node), text))
