"""``python -m benchmarks [workload ...]``: measures, and prints a table of medians and ratios."""

from __future__ import annotations

import argparse
import inspect
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from threadpoolctl import threadpool_limits

import asyncflow as af
from asyncflow.devices.cuda.backend import cuda_backend
from benchmarks import (
    batched_requests,
    checkpoints,
    concurrent_runs,
    convolution,
    dependency_patterns,
    distributed_loop,
    dqn,
    dynamic_lstm,
    dynamic_unrolling,
    gpu,
    gpu_memory,
    gpu_rows,
    graph_size,
    import_time,
    loop_gap,
    loop_overhead,
    lstm_training,
    memory,
    memory_limits,
    nested_loop,
    overload,
    parallel_iterations,
    pooled_decoder,
    pooled_loop,
    pooled_transformer,
    ragged_training,
    run_latency,
    saved_values,
    scheduling,
    small_beside_large,
    stacked_lstm,
    stacked_lstm_training,
    training_memory,
    tree_requests,
    trees,
    two_device_loop,
    vertex_models,
    vertex_parts,
    white_paper_pipelines,
)
from benchmarks.environment import restart_without_hindrances
from benchmarks.harness import describe_machine, format_table, write_json
from benchmarks.peers import NO_PEERS, Peers, load_peers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from benchmarks.harness import Result


class Workload(Protocol):
    """Measures one thing, beside the peers it is given; sizes are keyword arguments of each workload's own."""

    def __call__(self, peers: Peers = NO_PEERS, *, repeats: int = ...) -> Coroutine[Any, Any, list[Result]]:
        """The figures of all systems."""
        ...


Sizes: TypeAlias = "dict[str, tuple[int, ...] | tuple[str, ...]]"
"""Keyword arguments of a workload that are sequences."""


WORKLOADS: dict[str, Workload] = {
    "loop_overhead": loop_overhead.measure,
    "nested_loop": nested_loop.measure,
    "dynamic_lstm": dynamic_lstm.measure,
    "run_latency": run_latency.measure,
    "concurrent_runs": concurrent_runs.measure,
    "batched_requests": batched_requests.measure,
    "pooled_loop": pooled_loop.measure,
    "pooled_decoder": pooled_decoder.measure,
    "pooled_transformer": pooled_transformer.measure,
    "tree_requests": tree_requests.measure,
    "overload": overload.measure,
    "small_beside_large": small_beside_large.measure,
    "loop_gap": loop_gap.measure,
    "checkpoints": checkpoints.measure,
    "import_time": import_time.measure,
    "memory": memory.measure,
    "graph_size": graph_size.measure,
    "two_device_loop": two_device_loop.measure,
    "stacked_lstm": stacked_lstm.measure,
    "dependency_patterns": dependency_patterns.measure,
    "distributed_loop": distributed_loop.measure,
    "dqn": dqn.measure,
    "parallel_iterations": parallel_iterations.measure,
    "white_paper_pipelines": white_paper_pipelines.measure,
    "convolution": convolution.measure,
    "lstm_training": lstm_training.measure,
    "ragged_training": ragged_training.measure,
    "training_memory": training_memory.measure,
    "memory_limits": memory_limits.measure,
    "saved_values": saved_values.measure,
    "dynamic_unrolling": dynamic_unrolling.measure,
    "stacked_lstm_training": stacked_lstm_training.measure,
    "trees": trees.measure,
    "vertex_models": vertex_models.measure,
    "scheduling": scheduling.measure,
    "vertex_parts": vertex_parts.measure,
}

GPU_WORKLOADS: dict[str, Workload] = {
    "gpu_launches": gpu.measure_launches,
    "gpu_run": gpu.measure_run,
    "gpu_chain": gpu.measure_chain,
    "gpu_layers": gpu.measure_layers,
    "gpu_loop": gpu.measure_loop,
    "gpu_decisions": gpu.measure_decisions,
    "gpu_pipeline": gpu.measure_pipeline,
    "gpu_lstm_training": gpu.measure_lstm,
    "gpu_vertex_models": gpu_rows.measure_vertices,
    "gpu_pooled_loop": gpu_rows.measure_pool,
    "gpu_batched": gpu_rows.measure_batched,
    "gpu_memory": gpu_memory.measure_memory,
}
"""Workloads of a card, which run if there is one. ``gpu`` stands for all of them."""

PICTURES: dict[str, Callable[[Sequence[Result], Path], list[Path]]] = {
    "two_device_loop": two_device_loop.draw,
    "stacked_lstm": stacked_lstm.draw,
    "dependency_patterns": dependency_patterns.draw,
    "distributed_loop": distributed_loop.draw,
    "parallel_iterations": parallel_iterations.draw,
    "white_paper_pipelines": white_paper_pipelines.draw,
    "dynamic_unrolling": dynamic_unrolling.draw,
    "gpu_pipeline": gpu.draw_pipeline,
    "gpu_lstm_training": gpu.draw_lstm,
    "gpu_memory": gpu_memory.draw_memory,
    "stacked_lstm_training": stacked_lstm_training.draw,
    "vertex_models": vertex_models.draw,
    "saved_values": saved_values.draw,
    "scheduling": scheduling.draw,
    "vertex_parts": vertex_parts.draw,
}
"""Functions that draw the workload's results, and its timelines, into a folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures asyncflow beside its peers.")
    backend = cuda_backend()
    known = WORKLOADS | (GPU_WORKLOADS if backend.cupy is not None else {})
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"any of {', '.join(known)}, or gpu for a card's; default: all"
    )
    parser.add_argument("--repeats", type=int, help="trials of each system; default: each workload's own number")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        type=_size,
        metavar="NAME=A,B",
        help="a sequence of numbers or words that the workload takes, such as batches=1,16,64",
    )
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out even where they are installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured value to FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw workloads over several devices into FOLDER")
    options = parser.parse_args(arguments)
    chosen = [each for name in options.workloads for each in (GPU_WORKLOADS if name == "gpu" else [name])]
    if backend.cupy is None and any(name in GPU_WORKLOADS for name in chosen):
        parser.error(f"there is no card: {backend.reason}")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(known)}")
    for size, _ in options.size:
        if any(size not in inspect.signature(known[name]).parameters for name in chosen or known):
            parser.error(f"--size {size}: not every workload that is measured has such sizes")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats is at least 1; got {options.repeats}")

    peers = NO_PEERS if options.no_peers else load_peers()
    machine = describe_machine(peers)
    print("\n".join([str(machine), *backend.cards]), flush=True)
    if peers.missing:
        reason = "left out" if options.no_peers else "not installed: pip install -e '.[bench]'"
        print(f"{', '.join(peers.missing)} skipped: {reason}", flush=True)
    results = []
    for name in chosen or known:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results += af.run(_measure(known[name], peers, options.repeats, dict(options.size)))
    print(f"\n{format_table(results)}")
    if options.json is not None:
        write_json(options.json, machine, results)
    if options.plots is not None:
        for name in chosen or known:
            if name in PICTURES:
                for path in PICTURES[name](results, options.plots):
                    print(f"wrote {path}")
    return 0


def _size(text: str) -> tuple[str, tuple[int, ...] | tuple[str, ...]]:
    name, equals, listed = text.partition("=")
    if not (name and equals and listed):
        raise argparse.ArgumentTypeError(f"a size is written name=1,2 or name=word; got {text}")
    values = listed.split(",")
    return name, tuple(map(int, values)) if all(value.isdecimal() for value in values) else tuple(values)


async def _measure(measure: Workload, peers: Peers, repeats: int | None, sizes: Sizes) -> list[Result]:
    chosen: Callable[..., Coroutine[Any, Any, list[Result]]] = measure
    if repeats is not None:
        chosen = partial(chosen, repeats=repeats)
    # NumPy's own programs get one BLAS thread too, in and outside sessions.
    with threadpool_limits(limits=1, user_api="blas"):
        return await chosen(peers, **sizes)


if __name__ == "__main__":
    restart_without_hindrances(sys.argv[1:])
    sys.exit(main())
