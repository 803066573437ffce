"""Models from elsewhere, in ONNX's format, as modules that are run, planned and trained like any other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.runtime import Device
from penstock.tensor.core import resolve

if TYPE_CHECKING:
    from onnx import ModelProto

    from penstock.onnx.model import OnnxModel

__all__ = ["load"]


def load(
    source: str | os.PathLike[str] | bytes | ModelProto, *, device: Device | str | None = None
) -> OnnxModel:
    """A model from a file, from its bytes or from a `ModelProto`, as a module on a device.

    A `ps.errors.UnsupportedModel` names the operator, dtype or attribute that Penstock does not compute.

    >>> from onnx import helper
    >>> x, y = (helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    >>> nodes = [helper.make_node("Relu", ["x"], ["y"])]
    >>> graph = helper.make_graph(nodes, "relu", [x], [y])
    >>> model = ps.onnx.load(helper.make_model(graph))
    >>> model(ps.asarray([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    try:
        import onnx  # noqa: F401 - large, and in an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ONNX models are read with the package onnx: pip install 'penstock[onnx]'"
        ) from error
    from penstock.onnx.model import OnnxModel
    from penstock.onnx.reading import read

    return OnnxModel(read(source), resolve(device))
