"""Runs op kernels directly, without a session: op tests need only the op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncflow.graph.values.shapes import is_compatible
from tests.ops.device_arrays import check_on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncflow.graph.ir import Tensor


def _evaluate(tensor: Tensor, feeds: Mapping[Tensor, Any] | None = None) -> Any:
    """The value of `tensor`; every kernel's outputs are held against the op's shape rule on the way."""
    values: dict[Tensor, Any] = dict(feeds or {})
    for node in tensor.graph.root.nodes[: tensor.node.id + 1]:
        if node.outputs and node.outputs[0] in values:
            continue
        if node.op.kernel is None or any(x not in values for x in node.inputs):
            continue
        inputs = [values[x] for x in node.inputs]
        kernel = node.op.kernel(np, **node.attrs)
        for attempt in (kernel, node.op.scalar_kernel):
            if attempt is None or (attempt is not kernel and any(np.ndim(x) for x in inputs)):
                continue
            with np.errstate(all="ignore"):  # as everywhere kernels run
                result = attempt(*inputs)
            for output, value in zip(node.outputs, (result,) if node.single else result, strict=True):
                got = np.asarray(value)
                assert got.dtype == output.dtype, f"{node.op.name}: kernel gave {got.dtype}, rule said {output.spec}"
                assert is_compatible(got.shape, output.shape), f"{node.op.name}: {got.shape} against {output.spec}"
                values.setdefault(output, value)
        check_on_device(node, inputs, [values[output] for output in node.outputs])
    return values[tensor]


@pytest.fixture
def evaluate() -> Callable[..., Any]:
    return _evaluate
