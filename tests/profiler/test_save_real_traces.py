"""Traces of real runs over several devices, in every format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.profiler import save, summarize
from asyncflow.profiler.chrome import render_chrome
from asyncflow.profiler.html import timeline_data
from asyncflow.runtime.watch.trace import Trace
from asyncflow.testing import virtual_clock

ITERATIONS, SIZE = 5, 256


async def pipeline(devices: list[str]) -> Trace:
    """A loop with a layer on each device; each takes what the one before it made in the same iteration."""
    weight = np.full((SIZE, SIZE), 1e-3, "float32")
    with af.Graph() as graph:

        def body(i: af.Tensor, *states: af.Tensor) -> tuple[af.Tensor, ...]:
            made: list[af.Tensor] = []
            for device, state in zip(devices, states, strict=True):
                with af.device(device):
                    made.append(af.matmul(made[-1] + state if made else state, weight))
            return (i + 1, *made)

        start = af.placeholder("float32", (SIZE, SIZE))
        out = af.while_loop(lambda i, *_: i < ITERATIONS, body, (0, *(start for _ in devices)), name="loop")
    trace = Trace()
    async with af.Session(graph, devices=devices) as session:
        await session.run(out, {start: weight}, trace=trace)
    return trace


def simulated(machine: str = "3 x v100, nvlink2") -> Trace:
    with virtual_clock(machine) as clock:
        return clock.run(pipeline(["sim:0", "sim:1", "sim:2"]))


def on_cpus() -> Trace:
    return af.run(pipeline(["cpu:0", "cpu:1"]))


@pytest.fixture(params=["nvlink", "pcie", "cpus"])
def real(request: pytest.FixtureRequest) -> Trace:
    if request.param == "cpus":
        return on_cpus()
    return simulated("3 x v100, nvlink2" if request.param == "nvlink" else "3 x v100")


def nanoseconds(us: float) -> int:
    """As viewers read them."""
    return int(us * 1000)


def test_slices_of_a_lane_never_overlap_and_each_flow_joins_two_of_them(real: Trace) -> None:
    events: list[dict[str, Any]] = json.loads("".join(render_chrome(real)))["traceEvents"]
    slices: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: defaultdict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X":
            start, length = nanoseconds(event["ts"]), nanoseconds(event["dur"])
            assert start >= 0 and length >= 0
            slices[event["pid"], event["tid"]].append((start, start + length))
        elif event["ph"] in ("s", "f"):
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    for spans in slices.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
    devices = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(flows) == len(real.transfers) > ITERATIONS
    for flow in flows.values():
        assert flow["f"]["bp"] == "e"
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        for end in flow.values():
            moment = nanoseconds(end["ts"])
            assert any(start <= moment < stop for start, stop in slices[end["pid"], end["tid"]])
    pairs = Counter((devices[flow["s"]["pid"]], devices[flow["f"]["pid"]]) for flow in flows.values())
    assert pairs == Counter((each.source, each.target) for each in real.transfers)


def test_peer_copies_are_tied_to_the_kernels_that_made_their_values() -> None:
    data: Any = timeline_data(simulated())
    lanes = [lane for group in data["groups"] for lane in group["lanes"]]
    moved = data["transfers"]
    tied = 0
    for k, nbytes in enumerate(moved["nbytes"]):
        if nbytes < SIZE * SIZE * 4:
            continue
        source, target = (lanes[moved[side]["lane"][k]] for side in ("source", "target"))
        assert (source["label"], target["label"]) == ("compute", "peer")
        made, brought = moved["source"]["index"][k], moved["target"]["index"][k]
        assert source["tag"][made] == target["tag"][brought] == moved["tag"][k]
        assert source["start"][made] + source["duration"][made] <= target["start"][brought]
        tied += 1
    assert tied == 2 * ITERATIONS


def test_the_summary_of_a_simulated_pipeline() -> None:
    trace = simulated()
    summary = summarize(trace)
    moved = {(each.source, each.target): each for each in summary.transfers}
    layer = SIZE * SIZE * 4
    assert moved["sim:0", "sim:1"].max_nbytes == moved["sim:1", "sim:2"].max_nbytes == layer
    assert moved["sim:1", "sim:2"].nbytes == ITERATIONS * layer
    assert [device.device for device in summary.devices] == ["sim:0", "sim:1", "sim:2"]
    for device in summary.devices:
        assert 0 < device.compute_ns < summary.wall_ns
        assert device.copy_ns > 0
        assert device.peak_nbytes >= layer
    assert summary.inline + summary.offloaded + summary.copies + summary.awaited == summary.firings
    assert sum(lane.firings for lane in summary.lanes if lane.stream == "peer") == 2 * ITERATIONS


@pytest.mark.slow
def test_equal_traces_make_equal_pictures(tmp_path: Path) -> None:
    for name in ("trace.svg", "trace.png"):
        first, second = tmp_path / f"1-{name}", tmp_path / f"2-{name}"
        trace = simulated()
        save(trace, first)
        save(trace, second)
        assert first.read_bytes() == second.read_bytes()
