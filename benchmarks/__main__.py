"""``python -m benchmarks [workload ...]``: measures, and prints a table of medians and ratios."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import asyncflow as af
from benchmarks import concurrent_runs, graph_size, import_time, loop_gap, loop_overhead, run_latency
from benchmarks.harness import describe_machine, format_table, write_json
from benchmarks.tensorflow1 import load_tensorflow

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from benchmarks.harness import Result
    from benchmarks.tensorflow1 import TensorFlow1


class Workload(Protocol):
    """Measures one thing, beside TensorFlow if it is given; sizes are keyword arguments of each workload's own."""

    def __call__(
        self, tensorflow: TensorFlow1 | None = None, *, repeats: int = ...
    ) -> Coroutine[Any, Any, list[Result]]:
        """The figures of all systems."""
        ...


WORKLOADS: dict[str, Workload] = {
    "loop_overhead": loop_overhead.measure,
    "run_latency": run_latency.measure,
    "concurrent_runs": concurrent_runs.measure,
    "loop_gap": loop_gap.measure,
    "import_time": import_time.measure,
    "graph_size": graph_size.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures asyncflow beside its peers.")
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"any of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--repeats", type=int, help="trials of each system; default: each workload's own number")
    parser.add_argument("--no-peers", action="store_true", help="leave TensorFlow out even where it is installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured value to FILE")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats is at least 1; got {options.repeats}")

    machine = describe_machine()
    print(machine, flush=True)
    tensorflow = None if options.no_peers else load_tensorflow()
    if tensorflow is None:
        reason = "left out" if options.no_peers else "not installed: pip install -e '.[bench]'"
        print(f"tensorflow 1 is skipped: {reason}", flush=True)
    results = []
    for name in options.workloads or WORKLOADS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results += af.run(_measure(name, tensorflow, options.repeats))
    print(f"\n{format_table(results)}")
    if options.json is not None:
        write_json(options.json, machine, results)
    return 0


async def _measure(name: str, tensorflow: TensorFlow1 | None, repeats: int | None) -> list[Result]:
    measure = WORKLOADS[name]
    return await (measure(tensorflow) if repeats is None else measure(tensorflow, repeats=repeats))


if __name__ == "__main__":
    sys.exit(main())
