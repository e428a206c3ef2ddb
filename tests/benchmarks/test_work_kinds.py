"""Kinds of work: what timed arrays note, and that they change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import work_kinds
from benchmarks.peers import NO_PEERS, NUMPY
from benchmarks.vertex_models import MODELS, Sizes, peer_works

SIZES = Sizes(steps=4, leaves=4, files=12)


@pytest.mark.parametrize("model", MODELS)
def test_timed_arrays_note_every_operation_and_change_no_number(model: str) -> None:
    plain, timed = (peer_works(NO_PEERS, SIZES.samples(model, 2, 3), SIZES)[NUMPY] for _ in range(2))
    found = work_kinds.of_numpy(work_kinds.with_timed_arrays(timed))
    (loss, *grads), (expected, *others) = timed(), plain()
    np.testing.assert_array_equal(loss, expected)
    for grad, other in zip(grads, others, strict=True):
        for one, same in zip(grad, other, strict=True):
            np.testing.assert_array_equal(one, same)
    kinds = [kind for kind, _ in found]
    # Trees of 4 leaves have two levels above them, of three products each; steps have two, and three follow.
    if model != "Tree-LSTM":
        assert kinds.count("products") == (6 if model == "Tree-FC" else 11)
    assert min(kinds.count(kind) for kind in ("products", "arithmetic", "memory")) > 0
    assert all(ms > 0 for _, ms in found)
