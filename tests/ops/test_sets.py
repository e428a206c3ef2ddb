from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.graph.building.build import placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.searching import sets
from tests.ops.against_numpy import NUMBERS, compare, sample


def _reference(x: Any) -> Any:
    values, indices, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, equal_nan=False
    )
    return values, indices, inverse.reshape(x.shape), counts


@pytest.mark.parametrize("dtype", [*NUMBERS, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (0, 2)])
def test_against_numpy(evaluate: Any, dtype: Any, shape: Any) -> None:
    x = sample(shape, dtype)
    values, indices, inverse, counts = _reference(x)
    compare(evaluate, sets.unique_all, (values, indices, inverse, counts), x)
    compare(evaluate, sets.unique_counts, (values, counts), x)
    compare(evaluate, sets.unique_inverse, (values, inverse), x)
    compare(evaluate, sets.unique_values, values, x)


def test_each_nan_is_distinct(evaluate: Any) -> None:
    x = np.array([np.nan, 1, np.nan], np.float32)
    compare(evaluate, sets.unique_values, np.array([1, np.nan, np.nan], np.float32), x)


def test_strings(evaluate: Any) -> None:
    x = np.array(["b", "a", "b"], dtype=string)
    compare(evaluate, sets.unique_values, np.array(["a", "b"], dtype=string), x)
    compare(evaluate, sets.unique_counts, (np.array(["a", "b"], dtype=string), np.array([1, 2])), x)


def test_results_have_names() -> None:
    with Graph():
        x = placeholder("float32", (2, 3))
        result = sets.unique_all(x)
        assert result._fields == ("values", "indices", "inverse_indices", "counts")
        assert [t.shape for t in result] == [(None,), (None,), (2, 3), (None,)]
        assert sets.unique_counts(x)._fields == ("values", "counts")
        assert sets.unique_inverse(x)._fields == ("values", "inverse_indices")
