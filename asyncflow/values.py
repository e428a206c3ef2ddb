"""The values of a run, and kernels, which compute with them: their types, and the conduct of a kernel.

The types are for type checkers and readers alone; nothing asks for them at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """Needs and effects of the calls of a kernel, besides computing outputs from inputs; by default none.

    Each op has one; nodes of plans and devices share the object.

    Attributes:
        needs_context: the kernel takes a `KernelContext` before its inputs (seed, run and tag).
        is_async: the kernel may suspend a firing. A user's gives a coroutine; the library's own gives a coroutine, a
            result, or a place in line (`asyncflow.state.waiting.lines`), and is called on the event loop.
        waits_in_line: such a kernel may give a place in line though no resource among its attributes has lines.
        is_random: two nodes with equal inputs are not interchangeable.
        is_user: the kernel is the user's own code: its outputs are checked on every firing.
        is_repeatable: such a kernel gives the same again and changes nothing, so that a gradient may run it once more.
        commutes: writes of such ops to one resource leave the same behind in any order, if its values are integers.
        is_undone: no effect of such a kernel outlasts a run that ends early: taken elements go back to their place.
        alone: the object whose state a user's kernel changes, if that is not safe on several threads: two firings of
            ops that name the same object are never under way on two threads at once. None: no such state.
    """

    needs_context: bool = False
    is_async: bool = False
    waits_in_line: bool = False
    is_random: bool = False
    is_user: bool = False
    is_repeatable: bool = False
    commutes: bool = False
    is_undone: bool = False
    alone: object = None


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
