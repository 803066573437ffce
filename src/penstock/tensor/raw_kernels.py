"""`raw_kernel`: kernels whose source the user writes, as nodes of the graph."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from penstock.errors import KernelError
from penstock.graph.node import Shape
from penstock.graph.raw import RawLaunch, RawText, raw, raw_primitive
from penstock.runtime import Device
from penstock.tensor.core import Scalar, Tensor, record
from penstock.tensor.creation import zeros
from penstock.tensor.dtypes import checked
from penstock.tensor.own_gradients import GradientFunction, with_gradient

# A value, or a function that computes it from the arguments.
Count = int | Callable[..., int]
Sizes = int | Sequence[int] | Callable[..., int | Sequence[int]]
DTypeLike = Any  # anything that NumPy or Penstock accepts as a dtype
Output = str | tuple[Sizes, DTypeLike]


def raw_kernel(
    name: str,
    source: Mapping[str, str],
    *,
    inputs: Sequence[str] | Mapping[str, DTypeLike],
    outputs: Mapping[str, Output],
    scalars: Mapping[str, DTypeLike] | None = None,
    threads: Count | None = None,
    grid: Sizes | None = None,
    group: Sizes = 64,
    header: Mapping[str, str] | None = None,
    gradient: GradientFunction | None = None,
) -> RawKernel:
    """A user-defined operation with a kernel in OpenCL C, CUDA C or WGSL.

    `source` has the body of the kernel in each language, by `"opencl"`, `"cuda"` and `"wgsl"`; `header` has
    code that comes before the kernel, such as functions. Penstock declares the parameters: the outputs and
    inputs as contiguous arrays under their names, with the types of the tensors, and the scalars.

    `inputs` names the tensors, or maps their names to the dtypes that they must have; `scalars` maps names to
    dtypes. An output is declared by the name of an input with the same shape and dtype, or as (shape, dtype),
    of which each may be a function of the arguments. The kernel has to write all items of its outputs.

    With `threads` (by default one for each item of the first output), threads are independent, and `i` is the
    index of a thread, always below `threads`. With `grid`, that many workgroups of `group` threads run, which
    may share memory and synchronise: `GROUP_0`, `GROUPS_0`, `THREAD` and `THREADS` are their indices and
    counts.

    The kernel is called with the tensors and then the scalars, by position or name, and returns a tensor, or
    a tuple of tensors. `gradient(g, result, *arguments)` returns the gradient of each argument, or None; if
    there are several outputs, `g` and `result` are tuples.

    >>> body = {"opencl": "out[i] = 2 * x[i];"}
    >>> twice = ps.raw_kernel("twice", body, inputs=["x"], outputs={"out": "x"})
    >>> callable(twice)  # with a tensor on an OpenCL device
    True
    """
    return RawKernel(
        _text(name, source, header or {}, tuple(inputs), tuple(outputs), scalars or {}),
        dict(inputs) if isinstance(inputs, Mapping) else {},
        outputs,
        threads,
        grid,
        group,
        gradient,
    )


class RawKernel:
    """A kernel with the user's source as a function of tensors and numbers."""

    def __init__(
        self,
        text: RawText,
        dtypes: Mapping[str, DTypeLike],
        outputs: Mapping[str, Output],
        threads: Count | None,
        grid: Sizes | None,
        group: Sizes,
        gradient: GradientFunction | None,
    ) -> None:
        if threads is not None and grid is not None:
            raise KernelError(f"kernel {text.name!r}: give threads= or grid=, not both")
        for output, declared in outputs.items():
            if isinstance(declared, str) and declared not in text.inputs:
                raise KernelError(
                    f"kernel {text.name!r}: output {output!r} is like {declared!r}, and the inputs are "
                    f"{list(text.inputs)}"
                )
        self.__name__ = text.name
        self._text = text
        self._primitive = raw_primitive(text)
        self._dtypes = {name: checked(dtype) for name, dtype in dtypes.items()}
        self._outputs = outputs
        self._threads, self._grid, self._group = threads, grid, group
        self._gradient = gradient
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = (*text.inputs, *(name for name, _ in text.scalars))
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __repr__(self) -> str:
        languages = ", ".join(_source().LANGUAGES[name] for name, _, _ in self._text.languages)
        return f"<kernel {self.__name__}{self.__signature__} in {languages}>"

    def __call__(self, *args: Tensor | Scalar, **kwargs: Tensor | Scalar) -> Any:
        """Run the kernel: a tensor, or a tuple of tensors if it has several outputs."""
        try:
            given = self.__signature__.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.__name__}{self.__signature__}: {error}") from None
        arguments = list(given.values())
        tensors = [self._tensor(name, given[name]) for name in self._text.inputs]
        scalars = {name: self._scalar(name, given[name], dtype) for name, dtype in self._text.scalars}
        device = tensors[0].device
        self._check_language(device)
        launch = self._launch(arguments, tensors, device)
        if not any(math.prod(shape) for shape in launch.shapes):
            made = zip(launch.shapes, launch.dtypes, strict=True)
            results = [zeros(shape, dtype=dtype, device=device) for shape, dtype in made]
        else:
            nodes = raw(self._primitive, tuple(tensor._node for tensor in tensors), launch, scalars)
            results = [record(node, *tensors) for node in nodes]
        if self._gradient is not None:
            results = self._with_gradient(results, arguments)
        return results[0] if len(results) == 1 else tuple(results)

    # Arguments

    def _tensor(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"kernel {self.__name__!r} takes a tensor as {name}, not {type(value).__name__}")
        wanted = self._dtypes.get(name)
        if wanted is not None and value.dtype != wanted:
            raise TypeError(f"kernel {self.__name__!r} takes {wanted} as {name}, and {value.dtype} was given")
        return value

    def _scalar(self, name: str, value: Any, dtype: Any) -> Any:
        integral = dtype.kind in "iu"
        if not isinstance(value, int if integral else (int, float)):
            raise TypeError(f"kernel {self.__name__!r} takes a number of {dtype} as {name}, not {value!r}")
        if integral and not np.iinfo(dtype.numpy).min <= value <= np.iinfo(dtype.numpy).max:
            raise ValueError(f"kernel {self.__name__!r} takes {dtype} as {name}, which cannot be {value}")
        return value

    def _check_language(self, device: Device) -> None:
        language, languages = device.capabilities.language, _source().LANGUAGES
        given = [name for name, _, _ in self._text.languages]
        if language not in given:
            wants = f"takes {languages[language]}" if language in languages else "compiles no kernels"
            has = " and ".join(languages[name] for name in given)
            raise KernelError(f"kernel {self.__name__!r} has source in {has}, and {device.name} {wants}")
        for name, dtype in self._text.scalars:
            if _source().scalar_type(dtype, device.capabilities) is None:
                raise TypeError(
                    f"kernel {self.__name__!r}: {device.name} has no scalars of {dtype}, which {name} is"
                )

    # Outputs and launches

    def _launch(self, arguments: list[Any], tensors: list[Tensor], device: Device) -> RawLaunch:
        shapes, dtypes = [], []
        for name, declared in self._outputs.items():
            if isinstance(declared, str):
                like = tensors[self._text.inputs.index(declared)]
                shapes.append(like.shape)
                dtypes.append(like.dtype)
            else:
                shape = _resolved(declared[0], arguments)
                shapes.append(self._lengths(f"the shape of {name}", shape, 0))
                dtypes.append(checked(_resolved(declared[1], arguments)))
        names = (*self._text.inputs, *self._text.outputs)
        for name, dtype in zip(names, [*(tensor.dtype for tensor in tensors), *dtypes], strict=True):
            if _source().item_type(dtype, device.capabilities) is None:
                raise TypeError(
                    f"kernel {self.__name__!r}: {device.name} has no arrays of {dtype}, which {name} is"
                )
        group = self._lengths("group", _resolved(self._group, arguments), 1)
        limit = device.capabilities.max_group_size
        if math.prod(group) > limit:
            raise KernelError(
                f"kernel {self.__name__!r} has workgroups of {math.prod(group)} threads, and {device.name} "
                f"allows at most {limit}"
            )
        threads = None
        if self._grid is not None:
            grid = self._lengths("grid", _resolved(self._grid, arguments), 1)
            most = max(len(grid), len(group))
            grid, group = ((*lengths, *(1,) * (most - len(lengths))) for lengths in (grid, group))
        else:
            count = math.prod(shapes[0]) if self._threads is None else _resolved(self._threads, arguments)
            (threads,) = self._lengths("threads", count, 1 if any(map(math.prod, shapes)) else 0)
            grid, group = (-(-threads // math.prod(group)),), (math.prod(group),)
        return RawLaunch(self._text, tuple(shapes), tuple(dtypes), grid, group, threads)

    def _lengths(self, what: str, given: Any, least: int) -> Shape:
        try:
            lengths = tuple(map(operator.index, given if isinstance(given, Sequence) else (given,)))
        except TypeError:
            raise TypeError(
                f"kernel {self.__name__!r}: {what} has to be integers, and is {given!r}"
            ) from None
        most = 1 if what == "threads" else 3 if what in ("grid", "group") else 64
        if len(lengths) > most or any(length < least for length in lengths):
            raise KernelError(f"kernel {self.__name__!r}: {what} cannot be {given!r}")
        return lengths

    def _with_gradient(self, results: list[Tensor], arguments: list[Any]) -> list[Tensor]:
        gradient = self._gradient
        assert gradient is not None
        if len(results) == 1:
            return [with_gradient(self.__name__, results[0], arguments, gradient)]

        def rule_of(position: int) -> Callable[..., Any]:
            """The gradient rule of an output: that of all outputs, with gradient 0 for the others."""

            def of_output(g: Tensor, values: tuple[Tensor, ...], *args: Any) -> Any:
                zero = [zeros(value.shape, dtype=value.dtype, device=value.device) for value in values]
                return gradient((*zero[:position], g, *zero[position + 1 :]), values, *args)

            return of_output

        return [
            with_gradient(self.__name__, result, arguments, rule_of(position), results)
            for position, result in enumerate(results)
        ]


def _resolved(given: Any, arguments: list[Any]) -> Any:
    """A declared value for these arguments. Types are not called: NumPy's dtypes are classes."""
    return given(*arguments) if callable(given) and not isinstance(given, type) else given


def _source() -> ModuleType:
    """The generator of kernel sources, imported late: most programs have no raw kernel."""
    from penstock.kernels import raw_source

    return raw_source


def _text(
    name: str,
    source: Mapping[str, str],
    header: Mapping[str, str],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    scalars: Mapping[str, DTypeLike],
) -> RawText:
    languages = _source().LANGUAGES
    for language in (*source, *header):
        if language not in languages:
            raise KernelError(f"kernel {name!r}: {language!r} is no language; there are {list(languages)}")
    if not source or not inputs or not outputs:
        raise KernelError(f"kernel {name!r} needs a source, an input and an output")
    names = [*outputs, *inputs, *scalars]
    for identifier in (name, *names):
        if not identifier.isidentifier() or not identifier.isascii():
            raise KernelError(f"kernel {name!r}: {identifier!r} is not a valid name in a kernel")
    for at, identifier in enumerate(names):
        if identifier in names[:at] or _source().taken((*outputs, *inputs), identifier):
            raise KernelError(f"kernel {name!r}: {identifier!r} would have two meanings in its source")
    return RawText(
        name,
        inputs,
        outputs,
        tuple((scalar, checked(dtype)) for scalar, dtype in scalars.items()),
        tuple((language, header.get(language, ""), body) for language, body in source.items()),
    )
