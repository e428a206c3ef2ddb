"""A refused step leaves no graph open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af


def refused(step: Callable[..., af.Node], pairs: Any, rate: Any) -> af.GraphError:
    """The error."""
    with pytest.raises(af.GraphError) as caught:
        step(pairs, rate)
    return caught.value


@pytest.mark.parametrize("step", [af.optim.sgd, af.optim.momentum, af.optim.adam])
def test_after_a_refused_step_no_graph_is_being_built(step: Callable[..., af.Node]) -> None:
    """Not even while the error, and with it its frames, is alive."""
    w = af.Variable(np.zeros(3), name="w")
    with af.Graph() as graph:
        gradient = w * 2
        kept = [
            refused(step, pairs, rate)
            for pairs, rate in [([(gradient, w)], np.ones((2, 3))), ([(af.zeros(2), w)], 0.1), ([(gradient, w)], "0.1")]
        ]
    with pytest.raises(af.GraphError, match="no graph is being built"):
        af.constant(1.0)
    assert all(error.__traceback__ is not None for error in kept)
    node = step([(gradient, w)], 0.1)  # joins the graph of the gradient
    assert node.graph is graph
    with pytest.raises(af.GraphError, match="no graph is being built"):
        af.constant(1.0)
