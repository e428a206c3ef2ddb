"""Counter-based generators that start anew for each firing, or for each row of one.

A firing starts at the six words of its `KernelContext`: a key of the session's seed and the op's, and a counter of the
run and the iteration tag. Rows start at words of their own, so what a row draws does not depend on the others. To start
takes 0.1 µs, and 0.6 µs with the first number. Philox written in NumPy is estimated to take 110 µs for any few rows.
"""

from __future__ import annotations

import ctypes
import struct
from functools import partial
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from asyncflow.graph.op import KernelContext
    from asyncflow.values import Array, Value

T = TypeVar("T")

_WORD = 2**64 - 1


class _Restarted:
    """A random generator whose state is set before each use, which takes a tenth of making a new one.

    NumPy takes a state as a dict, and longer to read it than to draw a number. If the generator lies in memory in the
    known layout, which a comparison with NumPy's own writing shows, the same words are written in place.
    """

    __slots__ = ("bits", "restart", "rng")

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.rng = np.random.Generator(self.bits)
        self.restart = self._writer() or self._set_state
        """Takes the two words of a key and the four of a counter."""

    def _set_state(self, *words: int) -> None:
        key, counter = np.array(words[:2], np.uint64), np.array(words[2:], np.uint64)
        self.bits.state = {
            "bit_generator": "Philox",
            "state": {"key": key, "counter": counter},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": _DRAWN,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def _writer(self) -> Callable[..., None] | None:
        start = self.bits.ctypes.state_address + _STATE_AT
        if not id(self.bits) <= start <= id(self.bits) + self.bits.__sizeof__() - _STATE.size:
            return None
        memory = (ctypes.c_char * _STATE.size).from_address(start)
        for words in ((1, 2, 3, 4, 5, 6), (_WORD, 0, _WORD, 7, 0, _WORD)):
            self._set_state(*words)
            if memory.raw != _STATE.pack(_DRAWN, *words):
                return None
        return partial(_STATE.pack_into, memory, 0, _DRAWN)


_DRAWN = 4
"""The position in a buffer of which nothing is left."""

_STATE = struct.Struct("=i44x6Q")
"""The position in the buffer, the buffer and half a word kept for later, which are empty, the key, the counter."""

_STATE_AT = 16
"""Before it are pointers to the counter and to the key."""

_idle: list[_Restarted] = []
"""Generators that are not in use."""


def _taken() -> _Restarted:
    try:
        return _idle.pop()
    except IndexError:  # all are in use by other threads
        return _Restarted()


def _tag_words(tag: tuple[int, ...]) -> tuple[int, int]:
    if len(tag) == 1:
        return 1, tag[0]
    if not tag:
        return 0, 0
    digest = blake2b(repr(tag).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def seed_of_name(name: str) -> int:
    """The seed of an op that is given none, from the name of its node."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class RowContexts(NamedTuple):
    """The contexts of rows: of each what a `KernelContext` says of one firing."""

    seeds: Array | int
    """Seeds as int64, one a row; a number is the seed of all rows."""
    runs: Array | int
    """Likewise."""
    tags: Array
    """Iteration numbers of each row: int64 ``[rows, loops]``."""

    def words(self, seed: int) -> Iterator[tuple[int, ...]]:
        """The words that each row starts at, for an op with that seed."""
        if self.tags.shape[1] == 1:
            firsts: Iterator[int] | Sequence[int] = repeat(1)
            seconds: Sequence[int] = self.tags[:, 0].tolist()
        else:
            each = [_tag_words(tuple(tag)) for tag in self.tags.tolist()]
            firsts, seconds = [first for first, _ in each], [second for _, second in each]
        # The lowest word counts the blocks drawn, so counters of different runs and tags never meet.
        return zip(_columns(self.seeds), repeat(seed), repeat(0), _columns(self.runs), firsts, seconds, strict=False)


def _columns(values: Array | int) -> Iterator[int] | Sequence[int]:
    if isinstance(values, int):
        return repeat(values & _WORD)
    found: list[int] = values.astype(np.int64, copy=False).view(np.uint64).tolist()
    return found


Filled: TypeAlias = "Callable[[Callable[[np.random.Generator, Array], object], Array], Array]"
"""``filled(sample, out)`` calls ``sample(generator, row)`` for each row of `out`, as one axis, and gives `out`."""


class DrawsForRows(Protocol):
    """A kernel of one row that can draw for all rows in one call."""

    def of_rows(
        self, contexts: Callable[[], RowContexts], inputs: Sequence[Array], has_rows: Sequence[bool]
    ) -> Array | list[Value] | None:
        """Return the results of all rows, stacked or as a list; None if each row has to be called by itself.

        Args:
            contexts: gives the contexts of rows.
            inputs: of the kernel.
            has_rows: of each input, if each row has its own.
        """


class Drawing(Generic[T]):
    """The kernel that gives ``draw(generator, *inputs)``, with the generator of the firing of an op.

    The generator is another's afterwards.

    Args:
        draw: see above.
        seed: of the op.
        draw_rows: ``draw_rows(filled, inputs, has_rows)`` gives what rows draw, with `Filled`, or None.
    """

    __slots__ = ("_draw", "_draw_rows", "_seed")

    def __init__(self, draw: Callable[..., T], seed: int, draw_rows: Callable[..., Array | None] | None = None) -> None:
        self._draw, self._seed, self._draw_rows = draw, seed & _WORD, draw_rows

    def __call__(self, context: KernelContext, *inputs: object) -> T:
        """The result of one firing."""
        session_seed, run, tag, _ = context
        made = _taken()
        first, second = (1, tag[0]) if len(tag) == 1 else _tag_words(tag)
        made.restart(session_seed & _WORD, self._seed, 0, run & _WORD, first, second)
        found = self._draw(made.rng, *inputs)
        _idle.append(made)
        return found

    def of_rows(
        self, contexts: Callable[[], RowContexts], inputs: Sequence[Array], has_rows: Sequence[bool]
    ) -> Array | list[Value] | None:
        """See `DrawsForRows`."""
        told = contexts()
        words = told.words(self._seed)
        made = _taken()
        restart, rng = made.restart, made.rng

        def filled(sample: Callable[[np.random.Generator, Array], object], out: Array) -> Array:
            for start, row in zip(words, out.reshape(len(out), -1), strict=False):
                restart(*start)
                sample(rng, row)
            return out

        found: Array | list[Value] | None = None
        if self._draw_rows is not None:
            found = self._draw_rows(filled, len(told.tags), inputs, has_rows)
        if found is None:
            found = []
            columns: list[Iterable[Value]] = [x if own else repeat(x) for x, own in zip(inputs, has_rows, strict=True)]
            for start, *values in zip(words, *columns, strict=False):
                restart(*start)
                found.append(self._draw(rng, *values))
        _idle.append(made)
        return found
