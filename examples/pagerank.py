"""PageRank of the import graph of Python's standard library, on your machine: the modules that it depends on most.

The modules of the standard library import one another. A reader who follows those imports at random, and now and then
starts afresh anywhere, spends more time in some modules than in others: that share is a module's PageRank. The damping
factor sets how often the reader starts afresh. This program ranks the modules for many damping factors at once: one
graph, and one `await session.run(...)` for each.

    python examples/pagerank.py --output demo-out

It prints the top modules, compares every rank with NumPy's linear solver, and writes a timeline to look at.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.util
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

TOLERANCE = 1e-9
"""Share of the reader's time that may be left undecided."""

# -- the import graph ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImportGraph:
    """Module `importers[k]` imports module `imported[k]`; both are positions in `names`."""

    names: list[str]
    importers: NDArray[np.int64]
    imported: NDArray[np.int64]


def read_import_graph(most_files: int | None = None) -> ImportGraph:
    """Parses the standard library: every module is a node, every import between two of them an edge."""
    files = dict(list(library_files())[:most_files])
    if not files:
        raise SystemExit(f"this Python has no source files of its library in {sysconfig.get_path('stdlib')}")
    names = sorted(files.keys() | sys.stdlib_module_names)
    position = {name: number for number, name in enumerate(names)}
    edges = set()
    for module, file in files.items():
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        for name in imports(ast.parse(file.read_bytes()), package):
            while name and name not in position:  # `from os import path` names a function or the like: `os` it is
                name = name.rpartition(".")[0]
            if name and name != module:
                edges.add((position[module], position[name]))
    importers, imported = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    return ImportGraph(names, importers, imported)


def library_files() -> Iterator[tuple[str, Path]]:
    """The library's modules and their files, without its tests and whatever was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not {"test", "tests", "idle_test"} & set(parts):
            yield ".".join(parts).removesuffix(".__init__"), file


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """The dotted names that a module of `package` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


# -- PageRank as a dataflow graph --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageRank:
    """A graph, and the tensors in it that we feed and fetch."""

    graph: af.Graph
    damping: af.Tensor
    """Feed: the probability that the reader follows an import. float64[]"""
    ranks: af.Tensor
    """Fetch: one per module, of sum 1. float64[modules]"""
    undecided: af.Tensor
    """Stream: the share of the reader's time not yet placed, in every iteration. float64[]"""


def build_pagerank(imports: ImportGraph) -> PageRank:
    """Each module keeps its share of time, and passes it on to its imports, until little is left.

    In every iteration the modules with enough `pending` keep it as rank, and hand `damping` times as much on. At first
    these are all modules, later a few in the middle of the web: then the loop visits only their imports.
    """
    count = len(imports.names)
    fan_out = np.bincount(imports.importers, minlength=count)

    with af.Graph() as graph:
        damping = af.placeholder("float64", (), name="damping")
        importers, imported = af.constant(imports.importers), af.constant(imports.imported)
        per_import = af.constant(1 / np.maximum(fan_out, 1))
        nothing = af.zeros(count, dtype="float64")
        afresh = af.broadcast_to((1 - damping) / count, (count,))
        enough = TOLERANCE * (1 - damping) / count
        streamed = []

        def any_left(ranks: af.Tensor, pending: af.Tensor) -> af.Tensor:
            return af.any(pending > enough)

        def hand_on(ranks: af.Tensor, pending: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            active = pending > enough
            moved = af.where(active, pending, 0.0)
            gift = damping * moved * per_import
            used = active[importers]

            def along_all_imports() -> af.Tensor:
                return af.scatter_add(nothing, imported, gift[importers])

            def along_imports_in_use() -> af.Tensor:
                (edges,) = af.nonzero(used)
                return af.scatter_add(nothing, imported[edges], gift[importers[edges]])

            few = af.count_nonzero(used) < len(imports.imported) // 4
            received = af.cond(few, along_imports_in_use, along_all_imports)
            streamed.append(af.sum(pending) / (1 - damping))
            return ranks + moved, pending - moved + received

        ranks, _ = af.while_loop(any_left, hand_on, (nothing, afresh), name="pagerank")
        # What reaches a module without imports goes no further; scaling up is the same as starting afresh from there.
        return PageRank(graph, damping, ranks / af.sum(ranks), streamed[0])


async def rank_for_all(pagerank: PageRank, dampings: Sequence[float]) -> list[NDArray[np.float64]]:
    """The ranks for each damping factor, all under way at once; a progress bar follows the slowest."""
    async with af.Session(pagerank.graph) as session:

        async def follow(damping: float) -> None:
            with progress(f"damping {damping:.3f}") as report:
                async for undecided in session.stream(pagerank.undecided, {pagerank.damping: damping}):
                    report(float(undecided))

        runs = [session.run(pagerank.ranks, {pagerank.damping: damping}) for damping in dampings]
        _, *ranks = await asyncio.gather(follow(max(dampings)), *runs)
        return ranks


# -- what the user sees ------------------------------------------------------------------------------------------------


@contextmanager
def progress(title: str) -> Iterator[Callable[[float], None]]:
    """A function that shows how far a number has fallen: as a bar on a terminal, otherwise line by line."""
    seen: list[float] = []

    def print_line(undecided: float) -> None:
        seen.append(undecided)
        if len(seen) % 10 == 1:
            print(f"  {title}  iteration {len(seen):3}  undecided {undecided:.1e}")

    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield print_line
        return

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415  (optional)

    state = TextColumn("iteration {task.fields[iteration]:3}  undecided {task.fields[undecided]:.1e}")
    with Progress(TextColumn(f"  {title}"), BarColumn(), state, TimeElapsedColumn()) as bars:
        bar = bars.add_task("", total=1.0, iteration=0, undecided=1.0)

        def move_bar(undecided: float) -> None:
            seen.append(undecided)
            done = math.log(seen[0] / undecided) / math.log(1 / TOLERANCE)
            bars.update(bar, completed=done, iteration=len(seen), undecided=undecided)

        yield move_bar
        bars.update(bar, completed=1.0)


def print_top(
    names: Sequence[str], dampings: Sequence[float], ranks: Sequence[NDArray[np.float64]], rows: int = 10
) -> None:
    """The top modules, a column for each of a few damping factors."""
    shown = sorted({round(k) for k in np.linspace(0, len(dampings) - 1, 4)})
    print("\n    " + "".join(f"damping {dampings[k]:<20.2f}" for k in shown))
    tops = [np.argsort(-ranks[k], kind="stable")[:rows] for k in shown]
    for row in range(rows):
        cells = (f"{ranks[k][top[row]]:6.2%} {names[top[row]]:<21.20}" for k, top in zip(shown, tops, strict=True))
        print(f"{row + 1:2}  {''.join(cells)}".rstrip())


def solve_directly(imports: ImportGraph, damping: float) -> NDArray[np.float64]:
    """PageRank by its definition: the solution of a dense linear system, in NumPy."""
    count = len(imports.names)
    follow = np.zeros((count, count))
    follow[imports.imported, imports.importers] = 1
    fan_out = follow.sum(axis=0)
    follow = np.where(fan_out > 0, follow / np.maximum(fan_out, 1), 1 / count)
    return np.linalg.solve(np.eye(count) - damping * follow, np.full(count, (1 - damping) / count))


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if NumPy agrees with every rank, else 1."""
    parser = argparse.ArgumentParser(description="PageRank of the standard library's import graph.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    parser.add_argument("--runs", type=int, default=20, help="how many damping factors")
    parser.add_argument("--files", type=int, help="read only so many files of the library")
    options = parser.parse_args(argv)

    print(f"reading the standard library of Python {sys.version.split()[0]} ...")
    started = time.perf_counter()
    imports = read_import_graph(options.files)
    took = time.perf_counter() - started
    print(f"  {len(imports.names)} modules, {len(imports.imported)} imports between them ({took:.1f} s)")

    print(f"ranking them for {options.runs} damping factors at once ...")
    pagerank = build_pagerank(imports)
    dampings = [float(damping) for damping in np.linspace(0.5, 0.99, options.runs)]
    started = time.perf_counter()
    with af.Trace() as trace:
        ranks = af.run(rank_for_all(pagerank, dampings))
    print(f"  {len(trace.runs)} runs, {len(trace.firings)} node firings ({time.perf_counter() - started:.2f} s)")
    print_top(imports.names, dampings, ranks)

    error = max(np.abs(solve_directly(imports, d) - r).max() for d, r in zip(dampings, ranks, strict=True))
    agreed = bool(error < TOLERANCE)
    print(f"\n{'PASS' if agreed else 'FAIL'}: largest difference from NumPy's linear solver is {error:.1e}")

    options.output.mkdir(parents=True, exist_ok=True)
    for suffix, viewer in ((".html", "in a browser"), (".json", "at https://ui.perfetto.dev")):
        path = (options.output / "pagerank").with_suffix(suffix)
        af.profiler.save(trace, path)
        print(f"timeline: open {path.resolve().as_uri() if suffix == '.html' else path} {viewer}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
