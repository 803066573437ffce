"""Items of images at positions that are computed, and boxes that overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.onnx.registry import Call, operator

Array = npt.NDArray[Any]
_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # their names before opset 20


@operator("GridSample", since=16)
def grid_sample(call: Call, x: ps.Tensor, grid: ps.Tensor) -> ps.Tensor:
    """An image at the positions of a grid, in which -1 and 1 are its ends and the last axis comes first."""
    mode = call.get("mode", "linear")
    mode, image = _MODES.get(mode, mode), x.shape[2:]
    aligned = bool(call.get("align_corners", 0))
    axes = []  # for each axis, the indices around each position, and their weights
    for axis, length in enumerate(image):
        at = grid[..., len(image) - 1 - axis]
        at = (at + 1) * ((length - 1) / 2) if aligned else ((at + 1) * length - 1) / 2
        at = _bounded(call, ps.round(at) if mode == "nearest" else at, length)
        axes.append(_around(at, mode))
    total: Any = 0
    for corner in itertools.product(*axes):
        weight = math.prod((w for _, w in corner[1:]), start=corner[0][1])
        total = total + _items(call, x, [index for index, _ in corner]) * ps.expand_dims(weight, axis=1)
    return ps.astype(total, x.dtype)


def _bounded(call: Call, at: ps.Tensor, length: int) -> ps.Tensor:
    """Positions beyond the ends, moved back to where the padding says."""
    how = call.get("padding_mode", "zeros")
    if how == "border":
        return ps.clip(at, 0, length - 1)
    if how != "reflection":
        return at
    low, span = (0.0, length - 1.0) if call.get("align_corners", 0) else (-0.5, float(length))
    if not span:
        return ps.zeros_like(at)
    turned = ps.remainder(at - low, 2 * span)
    return ps.where(turned > span, 2 * span - turned, turned) + low


def _around(at: ps.Tensor, mode: str) -> list[tuple[ps.Tensor, ps.Tensor]]:
    """The indices around a position with their weights."""
    if mode == "nearest":
        return [(at, ps.ones_like(at))]
    first = ps.floor(at)
    if mode == "linear":
        return [(first, 1 - (at - first)), (first + 1, at - first)]
    a = -0.75
    pairs = []
    for offset in (-1, 0, 1, 2):
        distance = ps.abs(at - (first + offset))
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((distance - 5) * distance + 8) * distance * a - 4 * a
        pairs.append((first + offset, near if offset in (0, 1) else far))
    return pairs


def _items(call: Call, x: ps.Tensor, indices: Sequence[ps.Tensor]) -> ps.Tensor:
    """For each index of each axis the item there; 0 beyond the ends, where the padding is of zeros."""
    batch, channels, *image = x.shape
    zeros = call.get("padding_mode", "zeros") == "zeros"
    position: Any = 0
    inside: Any = True
    for index, length in zip(indices, image, strict=True):
        if zeros:
            inside = ps.logical_and((index >= 0) & (index <= length - 1), inside)
        bounded = ps.clip(_bounded(call, index, length), 0, length - 1)
        position = position * length + ps.astype(ps.round(bounded), ps.int64)
    points = position.shape[1:]
    rows = ps.broadcast_to(ps.reshape(position, (batch, 1, -1)), (batch, channels, math.prod(points)))
    taken = ps.take_along_axis(ps.reshape(x, (batch, channels, -1)), rows, axis=2)
    items = ps.reshape(taken, (batch, channels, *points))
    return ps.where(ps.expand_dims(inside, axis=1), items, ps.zeros_like(items)) if zeros else items


@operator("NonMaxSuppression", since=10, folds=True, host=(0, 1, 2, 3, 4))
def non_max_suppression(
    call: Call, boxes: Array, scores: Array, most: Any = None, overlap: Any = None, least: Any = None
) -> Array:
    """The boxes of each class that overlap little with better ones. How many there are, only values tell."""
    count = 0 if most is None else int(most.item())
    shared = 0.0 if overlap is None else float(overlap.item())
    corners = _corners(boxes, bool(call.get("center_point_box", 0)))
    chosen = []
    for image, kind in np.ndindex(*scores.shape[:2]):
        score = scores[image, kind]
        order = np.argsort(-score, kind="stable")
        if least is not None:
            order = order[score[order] > least.item()]
        kept: list[int] = []
        for box in order:
            if len(kept) < count and not (_overlaps(corners[image], box, kept) > shared).any():
                kept.append(int(box))
        chosen += [(image, kind, box) for box in kept]
    return np.asarray(chosen, np.int64).reshape(-1, 3)


def _corners(boxes: Array, centred: bool) -> Array:
    """The least and the greatest corner of each box."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if centred:
        return np.concatenate([first - second / 2, first + second / 2], axis=-1)
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=-1)


def _overlaps(corners: Array, box: int, others: list[int]) -> Array:
    """The area that a box shares with others, over that of both."""
    own, rest = corners[box], corners[others]
    sides = np.minimum(own[2:], rest[:, 2:]) - np.maximum(own[:2], rest[:, :2])
    shared = np.prod(np.maximum(sides, 0), axis=-1)
    areas = np.prod(rest[:, 2:] - rest[:, :2], axis=-1) + np.prod(own[2:] - own[:2])
    return np.asarray(shared / np.maximum(areas - shared, np.finfo(np.float32).tiny))
