"""Kinds of work of a step: products, other arithmetic, and memory (Cavs, tables 1 and 3), in each system.

*Memory* moves rows and makes room, and adds up gradients of one row. Each system's operations are timed one by one:
asyncflow by a trace without regions, NumPy by arrays that time each operation on them, PyTorch and JAX by their own
profilers. Memory work that JAX has fused with arithmetic counts as arithmetic.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import Figure, Sample, Trial
from benchmarks.trees import Trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.sequences import OfVertices
    from benchmarks.trees import OfAsyncflow

KINDS: Final = ("products", "arithmetic", "memory", "scheduling")
WORK: Final = {kind: Figure(f"{kind}, a step", "ms") for kind in KINDS}
CALLS: Final = {kind: Figure(f"{kind}, calls a step", "") for kind in KINDS}

_OURS: Final = {
    "products": frozenset({"matmul", "add_products", "sums", "pending_sums", "row_ahead", "rows_ahead"}),
    "memory": frozenset(
        {
            "add_parts",
            "add_row_gradients",
            "concat",
            "part_of_sum",
            "reduce_segments",
            "row_gradients",
            "row_store",
            "row_store_append",
            "row_store_slice",
            "row_store_take",
            "scatter_to",
            "spread_segments",
            "sum_segments",
            "take",
        }
    ),
    "scheduling": frozenset({"schedule", "check_rows"}),
}
_TORCH: Final = {
    "products": frozenset({"mm", "addmm", "mv", "addmv", "addmv_", "bmm", "dot"}),
    "arithmetic": frozenset(
        {
            *("add", "add_", "sub", "rsub", "mul", "mul_", "div", "neg", "sum", "square", "pow"),
            *("relu", "threshold_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward"),
        }
    ),
}
_JAX_MOVES: Final = frozenset(
    {"broadcast", "concatenate", "copy", "dynamic", "gather", "pad", "scatter", "slice", "transpose", "update"}
)


def trial_of(timed: Callable[[], Iterable[tuple[str, float]]]) -> Trial:
    """A trial of a step that gives its operations, each with its kind and ms."""

    async def trial() -> Sample:
        return _summed(timed())

    return trial


def _summed(operations: Iterable[tuple[str, float]]) -> Sample:
    figures: dict[Figure, float] = defaultdict(float)
    for kind, ms in operations:
        figures[WORK[kind]] += ms
        figures[CALLS[kind]] += 1
    return Sample({figure: figures[figure] for figure in (*WORK.values(), *CALLS.values())})


def of_asyncflow(ours: OfAsyncflow | OfVertices) -> Trial:
    """A step in a session without regions."""

    async def trial() -> Sample:
        trace = af.Trace()
        await ours.session.run(ours.fetches, ours.feeds, trace=trace)
        return _summed((_kind(_OURS, firing.op, "arithmetic"), firing.computing_ns / 1e6) for firing in trace.firings)

    return trial


def _kind(table: dict[str, frozenset[str]], name: str, other: str) -> str:
    return next((kind for kind, names in table.items() if name in names), other)


def of_torch(torch: Any, work: Callable[[], Any]) -> Iterator[tuple[str, float]]:
    """The operations of a step in PyTorch, without what autograd does to order them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    for event in profile.events():
        if event.name.startswith("aten::"):
            yield _kind(_TORCH, event.name.removeprefix("aten::"), "memory"), event.self_cpu_time_total / 1e3


def of_jax(jax: Any, work: Callable[[], Any]) -> Iterator[tuple[str, float]]:
    """The operations of a compiled step in JAX, which are called by what XLA has fused in them."""
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (found,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(found)).planes)
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        name = re.fullmatch(r"([a-z_-]+)[.\d]*", event.name)
        if name is None or name[1] in ("while", "call", "conditional"):
            continue
        parts = set(re.split("[_-]", name[1])) - {"fusion", "wrapped"}
        is_product = bool(parts & {"dot", "ynn"})
        kind = "products" if is_product else "memory" if parts <= _JAX_MOVES else "arithmetic"
        yield kind, event.duration_ns / 1e6


# -- NumPy -----------------------------------------------------------------------------------------------------------


class TimedArray(np.ndarray):
    """An array that notes the operations on it, and on their results."""

    taken: Final[list[tuple[str, float]]] = []
    """Kind and ms of each operation of the step, for all arrays."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        kind = "products" if ufunc is np.matmul else "arithmetic" if method == "__call__" else "memory"
        if out:
            options["out"] = tuple(map(_plain, out))
        return _timed(kind, getattr(ufunc, method), *map(_plain, inputs), **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kind = "arithmetic" if function in (np.sum, np.dot) else "memory"
        plain = {name: _plain(value) for name, value in kwargs.items()}
        return _timed(kind, function, *map(_plain, args), **plain)

    def __getitem__(self, key: Any) -> Any:
        return _timed("memory", np.ndarray.__getitem__, _plain(self), key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _timed("memory", np.ndarray.__setitem__, _plain(self), key, _plain(value))


def with_timed_arrays(work: Any) -> Any:
    """A step by hand once its floats are in timed arrays."""
    holder = getattr(work, "__self__", work)
    for name, value in list(vars(holder).items()):
        if isinstance(value, np.ndarray):
            setattr(holder, name, value.view(TimedArray))
        elif isinstance(value, Trees):
            setattr(holder, name, replace(value, xs=value.xs.view(TimedArray)))
    return work


def of_numpy(work: Callable[[], Any]) -> Sequence[tuple[str, float]]:
    """The operations of a step on timed arrays."""
    TimedArray.taken.clear()
    work()
    return list(TimedArray.taken)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.view(np.ndarray) if isinstance(value, TimedArray) else value


def _timed(kind: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    started = perf_counter()
    found = function(*args, **kwargs)
    TimedArray.taken.append((kind, (perf_counter() - started) * 1e3))
    if isinstance(found, list):
        return [each.view(TimedArray) for each in found]
    return found.view(TimedArray) if isinstance(found, np.ndarray) else found
