"""Checks of a state that an optimizer is to load."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

Shapes = tuple[tuple[int, ...], ...]


def check_shapes(
    state: Mapping[str, npt.ArrayLike], shapes: Mapping[str, Shapes], counts: Collection[str]
) -> None:
    """A ValueError names what is missing, too much, or has none of the shapes that its name may have.

    `counts`: the names of counts, of which those that are missing are told by their shapes.
    """
    wrong = sorted(set(shapes) ^ set(state))
    if wrong and not set(wrong) <= set(counts):
        raise ValueError(f"the state of another optimizer: {wrong[:5]} differ")
    for name, wanted in shapes.items():
        given = f"shape {np.shape(state[name])}" if name in state else "nothing"
        if name in state and np.shape(state[name]) in wanted:
            continue
        if len(wanted) == 1:
            raise ValueError(f"{name} has shape {wanted[0]}, and {np.shape(state[name])} was given")
        raise ValueError(f"{name} has one of the shapes {wanted}, and {given} was given")
