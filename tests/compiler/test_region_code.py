"""Names of the stretches of a region."""

from __future__ import annotations

import pytest

import asyncflow as af
from asyncflow.compiler.regions.code.region_code import label_of


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["encoder/add", "multiply", "encoder/rnn/mul"], "encoder"),
        (["adam/add", "adam/add_1", "clip/square"], "adam, clip"),
        (["gradients/encoder/mul", "gradients/encoder/add", "gradients/loss"], "gradients/encoder, gradients"),
        (["a/x", "b/x", "c/x", "c/y", "d/x"], "c, a, b, ..."),
        (["total", "mean"], "total, mean"),
        (["n0", "n1", "n2", "n3", "n4"], "identity"),
        ([], ""),
    ],
)
def test_scopes_name_a_stretch_and_without_them_its_nodes_or_ops(graph: af.Graph, names: list[str], label: str) -> None:
    x = af.constant(1.0)
    nodes = [af.identity(x, name=name).node for name in names]
    assert label_of(nodes) == label
