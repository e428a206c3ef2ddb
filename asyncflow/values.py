"""Types of the values of a run: values that kernels compute with, and the libraries that they compute by.

They are for type checkers and readers alone; nothing asks for them at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""An array of NumPy's, or a scalar of its, or an array of CuPy's: kernels use what all of them have."""

Value: TypeAlias = object
"""A value on an edge: an `Array`, or what only some ops understand, such as the store behind a TensorArray."""

Nest: TypeAlias = Any
"""A value, or a nest of values, whose structure the user's code decides: what loops, branches and runs give back.

Type checkers cannot know that structure; where one can follow it, as in `while_loop`, an overload says so.
"""


Index: TypeAlias = Any
"""The index between the brackets of an array, or one item of it; NumPy's own type for that is private."""


Kernel: TypeAlias = Callable[..., Any]
"""Takes input values and returns the output value (one output) or a tuple of them (several).

A value of rank 0 may be a NumPy scalar or a 0-d array: kernels accept both and may return either. With an `xp` that is
not NumPy, inputs of higher rank are its arrays, but for the `Op.host_inputs`; a NumPy array that is returned is the
host's, too. Kernels never write to their inputs. A kernel that can write its result to a given buffer takes it by
``out=``, as ufuncs do; its attribute `takes_out` is true.

No output is None: runs keep values in slots, where None says that nothing has arrived yet. What a user's function gives
is checked for it, and an op without outputs gives ``()``.
"""


class Namespace(Protocol):
    """NumPy, or a library with its functions for the arrays of a device."""

    @property
    def add(self) -> np.ufunc:
        """A ufunc, with ``add.at``."""

    @property
    def fft(self) -> Namespace:
        """Fourier transforms."""

    @property
    def linalg(self) -> Namespace:
        """Functions of matrices."""

    @property
    def ndarray(self) -> type[Array]:
        """The class of its arrays."""

    def __getattr__(self, name: str, /) -> Callable[..., Array]: ...
