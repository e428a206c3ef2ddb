"""``asyncflow simulate``: virtual time for a program's event loops, and the report about its runs."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from asyncflow.cli.main import main
from asyncflow.cli.simulate import format_report, simulated_loops
from asyncflow.devices.figures.presets import parse_machine
from asyncflow.devices.sim.machine import SimMachine, current_machine
from asyncflow.runtime.watch.trace import Firing, MemorySample, RunSpan, Trace
from asyncflow.streams import loop as asyncflow_loops
from asyncflow.streams.virtual import VirtualClockLoop
from tests.cli.conftest import Output

if TYPE_CHECKING:
    from collections.abc import Iterator


PROGRAM = '''
"""A program of the user's."""

import asyncio
import gc
import sys
import threading

import numpy as np
import uvloop
import asyncflow as af

with af.Graph() as graph:
    x = af.placeholder("float32", (512, 512))
    with af.device("sim:0"):
        a = af.matmul(x, x)
    with af.device("sim:1"):
        b = af.sum(af.matmul(a, x))


async def now():
    return asyncio.get_running_loop().time()


async def sleeps():
    await asyncio.sleep(3600)
    print("slept", await now(), sys.argv[1:])


def sleeps_plainly():
    asyncio.run(sleeps())


def sleeps_on_uvloop():
    uvloop.run(sleeps(), debug=False)


def insists_on_uvloop():
    uvloop.run(steps(), loop_factory=uvloop.Loop)


def other_thread_on_uvloop():
    async def look():
        print("uvloop", isinstance(asyncio.get_running_loop(), uvloop.Loop))

    thread = threading.Thread(target=lambda: uvloop.run(look()))
    thread.start()
    thread.join()


async def on_cpus():
    async with af.Session(devices=["cpu:0"]) as session:
        with af.Graph():
            y = af.matmul(np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)) * 2
        print(np.sum(await session.run(y)))


def runs_often():
    times = [af.run(now())]
    for start in (af.run, asyncio.run):
        start(asyncio.sleep(1))
        times.append(start(now()))
    with asyncio.Runner() as runner:
        runner.run(asyncio.sleep(1))
        times.append(runner.run(now()))
    print("times", times)


def other_thread():
    kinds = []

    async def look():
        kinds.append(type(asyncio.get_running_loop()).__mro__)

    thread = threading.Thread(target=lambda: asyncio.run(look()))
    thread.start()
    thread.join()
    print("virtual", any("Virtual" in kind.__name__ for kind in kinds[0]))


def stuck():
    asyncio.run(asyncio.Event().wait())


async def steps():
    async with af.Session(graph) as session:
        for _ in range(3):
            value = await session.run(b, {x: np.ones((512, 512), np.float32)})
    print("value", float(value), "at", await now())


async def searches():
    with af.Graph() as own:
        y = af.placeholder("float32", (512, 512))
        found, _ = af.while_loop(lambda i, z: af.sum(z) < 1e9, lambda i, z: (i + 1, z * 2), (0, y))
    async with af.Session(own) as session:
        print("found after", await session.run(found, {y: np.ones((512, 512), np.float32)}))


def session_before_loop():
    session = af.Session(graph)
    print([device.name for device in session.devices])

    async def main():
        async with session:
            await session.run(b, {x: np.ones((512, 512), np.float32)})

    asyncio.run(main())


def looks_for_garbage():
    print("threshold", gc.get_threshold()[0])


async def fails():
    await asyncio.sleep(1)
    raise LookupError("the program's own fault")
'''


def event_loop_makers() -> tuple[object, ...]:
    """Return the functions by which programs make event loops."""
    return (
        asyncio.new_event_loop,
        asyncio.events.new_event_loop,
        asyncflow_loops.new_event_loop,
        uvloop.new_event_loop,
        uvloop.run,
    )


@pytest.fixture(autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The program's module is its own, and every way to make an event loop is given back."""
    folder = str(tmp_path_factory.getbasetemp())
    before = set(sys.modules)
    makers = event_loop_makers()
    yield
    assert event_loop_makers() == makers
    assert current_machine() is None
    for name in set(sys.modules) - before:
        # Modules of the library stay: an op is registered once in a process.
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``program.py``, which is also the working directory."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(name: str, *arguments: str, devices: str = "2 x v100, nvlink2") -> int:
    return main(["simulate", f"program.py:{name}", "--devices", devices, *arguments])


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sleeps", "sleeps_plainly", "sleeps_on_uvloop"])
def test_time_is_virtual(program: Path, output: Output, name: str) -> None:
    assert simulate(name, "--seed", "3", "data", "--seed", "4") == 0
    out, _ = output()
    assert "slept 3600.0 ['data', '--seed', '4']" in out
    host = "host       this runtime, one Python thread for all devices; launches by regions"
    assert out.endswith(f"machine    2 x v100, nvlink2\n{host}\nnothing ran on it: the program made no graph run\n")


def test_loops_follow_one_another_on_one_clock(program: Path, output: Output) -> None:
    assert simulate("runs_often") == 0
    assert "times [0.0, 1.0, 2.0, 3.0]" in output()[0]


@pytest.mark.parametrize(("own", "inside"), [(700, 100_000), (300_000, 300_000), (0, 0)])
def test_garbage_is_looked_for_less_often_while_the_program_runs(
    program: Path, output: Output, own: int, inside: int
) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own, *before[1:])
    try:
        assert simulate("looks_for_garbage") == 0
        assert gc.get_threshold() == (own, *before[1:])
    finally:
        gc.set_threshold(*before)
    assert f"threshold {inside}" in output()[0]


def test_loops_of_other_threads_are_real(program: Path, output: Output) -> None:
    assert simulate("other_thread") == 0
    assert "virtual False" in output()[0]
    assert simulate("other_thread_on_uvloop") == 0
    assert "uvloop True" in output()[0]


def test_a_loop_that_is_not_virtual_is_refused(program: Path, output: Output) -> None:
    """A session with simulated devices would hang on it."""
    assert simulate("insists_on_uvloop") == 1
    assert "sim:0 is simulated, and this event loop (uvloop.Loop) is not on its virtual time" in output()[1]


def test_each_loop_has_a_machine_that_is_there_before_it() -> None:
    machines = []
    spec = parse_machine("3 x a100")
    with simulated_loops(partial(SimMachine, spec, seed=5, jitter=0.25, shapes_only=True)):
        for _ in range(2):
            machine = current_machine()
            assert machine is not None
            with asyncio.Runner() as runner:
                assert runner.get_loop() is machine.loop
                runner.run(asyncio.sleep(1))
            machines.append(machine)
        unused = current_machine()
        assert unused is not None and not unused.loop.is_closed()
    assert machines[0] is not machines[1]
    assert [machine.loop.time() for machine in machines] == [1.0, 2.0]
    assert all(machine.spec is spec and machine.shapes_only for machine in machines)
    assert [machine.jitter for machine in machines] == [0.25, 0.25]
    assert unused.loop.is_closed()


def test_two_loops_at_once_are_two() -> None:
    with simulated_loops(partial(SimMachine, parse_machine("v100"))):
        first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
        assert first is not second
        for loop in (first, second):
            assert isinstance(loop, VirtualClockLoop)
            loop.run_until_complete(asyncio.sleep(1))
            loop.close()


def test_loops_are_given_back_when_the_program_fails(program: Path, output: Output) -> None:
    assert simulate("fails", "-o", "trace.json") == 1
    assert output()[1].rstrip().endswith("LookupError: the program's own fault")
    assert (program / "trace.json").exists()


def test_deadlock_of_the_program_is_its_error(program: Path, output: Output) -> None:
    assert simulate("stuck") == 1
    assert "RuntimeError: every task waits and no timer is pending" in output()[1]


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["program.py:sleeps"], "the following arguments are required: --devices"),
        (["program.py:sleeps", "--device", "v100"], "; --device goes to the program, did you mean --devices?"),
        (["program.py:sleeps", "-devices=v100"], "; -devices goes to the program, did you mean --devices?"),
        (["program.py:sleeps", "--epochs", "3", "--devices", "v100"], "--devices comes after '--epochs', an argument"),
        (["program.py:sleeps", "--epochs", "3", "--devices=v100"], "put the options of simulate before"),
        (["program.py:sleeps", "--devices", "100000 x v100"], "names 100000 cards; a machine has at most 1024"),
        (["--devices", "v100"], "the following arguments are required: target"),
        (["program.py:sleeps", "--devices", "v10O"], "unknown card or link 'v10O' in 'v10O', did you mean 'v100'?"),
        (["program.py:sleeps", "--devices", "nvlink2"], "'nvlink2' names no card"),
        (["program.py:sleeps", "--devices", "v100", "--seed", "x"], "'x' is not a seed: a whole number"),
        (["program.py:sleeps", "--devices", "v100", "--jitter", "x"], "'x' is not a jitter: a fraction from 0 to"),
        (["program.py:sleeps", "--devices", "v100", "--jitter", "1"], "'1' is not a jitter"),
        (["program.py:sleeps", "--devices", "v100", "--jitter", "nan"], "'nan' is not a jitter"),
    ],
)
def test_bad_arguments_show_the_usage(program: Path, output: Output, arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *arguments])
    assert caught.value.code == 2
    _, err = output()
    assert "usage: asyncflow simulate" in err
    assert reason in err


def test_bad_target_says_what_to_do(program: Path, output: Output) -> None:
    assert simulate("absent") == 2
    assert output()[1].startswith("asyncflow simulate: error: ")


@pytest.mark.parametrize("path", ["trace.txt", "nowhere/trace.json"])
def test_bad_outputs_are_refused_before_the_program_runs(program: Path, output: Output, path: str) -> None:
    assert simulate("sleeps", "-o", path) == 2
    out, err = output()
    assert err.startswith("asyncflow simulate: error: ")
    assert "slept" not in out


def test_options_in_every_spelling(program: Path, output: Output) -> None:
    arguments = ["--devices=v100", "--seed=-3", "program.py:sleeps", "--jitter=0.1", "--shapes-only", "-otrace.json"]
    assert main(["simulate", *arguments, "--", "--devices", "k40"]) == 0
    assert "slept 3600.0 ['--devices', 'k40']" in output()[0]
    assert (program / "trace.json").exists()


def test_help_lists_cards_and_links(output: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--help"])
    assert caught.value.code == 0
    out, _ = output()
    assert "cards: k40, p100, v100, a100, h100, h200, cpu" in out
    assert "nvlink4" in out


# -- the report --------------------------------------------------------------------------------------------------


def firing(device: str, stream: str, started_ns: int, ended_ns: int) -> Firing:
    return Firing(0, "matmul", "matmul", "", device, stream, started_ns, started_ns, ended_ns, "float32[4]", "ok", "")


def test_report() -> None:
    trace = Trace(
        firings=[
            firing("sim:0", "compute", 0, 500_000),
            firing("sim:0", "compute", 1_000_000, 1_250_000),
            firing("sim:1", "compute", 500_000, 1_000_000),
            firing("sim:1", "peer", 250_000, 500_000),
        ],
        runs=[
            RunSpan(0, "run 0", 0, 1_000_000, "ok"),
            RunSpan(1, "run 1", 0, 3_000_000, "ok"),
            RunSpan(2, "run 2", 0, 5_000_000, "ok"),
            RunSpan(3, "run 3", 0, 10_000, "cancelled"),
        ],
        memory=[
            MemorySample("sim:1", 10, 2**30),
            MemorySample("sim:1", 20, 2**31),
            MemorySample("sim:1", 30, 2**20),
            MemorySample("sim:0", 10, 512),
        ],
    )
    assert format_report(trace, parse_machine("3 x v100, nvlink2")) == (
        "machine    3 x v100, nvlink2\n"
        "runs       4\n"
        "step time  3.00 ms (median; 1.00 ms to 5.00 ms)\n"
        "failed     1, which count in no step time\n"
        "makespan   5.00 ms\n"
        "\n"
        "device  stream   busy %       busy  firings\n"
        "------  -------  ------  ---------  -------\n"
        "sim:0   compute   15.0%  750.00 µs        2\n"
        "sim:1   compute   10.0%  500.00 µs        1\n"
        "sim:1   peer       5.0%  250.00 µs        1\n"
        "\n"
        "device  card  peak memory        of\n"
        "------  ----  -----------  --------  -----\n"
        "sim:0   v100        512 B  16.0 GiB   0.0%\n"
        "sim:1   v100      2.0 GiB  16.0 GiB  12.5%\n"
        "sim:2   v100         idle"
    )


def test_report_joins_idle_cards() -> None:
    """Neighbours of one kind, so that many cards make no long table."""
    trace = Trace(firings=[firing("sim:2", "compute", 0, 500)], runs=[RunSpan(0, "run 0", 0, 500, "ok")])
    lines = format_report(trace, parse_machine("600 x v100, 400 x k40")).splitlines()
    rows = [line.split("  ") for line in lines[lines.index("") :] if line.startswith("sim:")]
    assert [(row[0], row[-1].split()[-1]) for row in rows[1:]] == [
        ("sim:0 to sim:1", "idle"),
        ("sim:2", "0.0%"),
        ("sim:3 to sim:599", "idle"),
        ("sim:600 to sim:999", "idle"),
    ]


def test_report_says_that_the_cards_ran_nothing(program: Path, output: Output) -> None:
    """The session names CPU devices, which are simulated as well, so that there are times."""
    assert simulate("on_cpus", devices="4 x v100") == 0
    out, _ = output()
    assert "1024.0" in out
    assert "cards      ran nothing: the program's sessions name their own devices, and all was on cpu:0\n" in out
    assert "sim:0 to sim:3" in out and "idle" in out
    assert "d2h" not in out and "h2d" not in out  # its copies take no time


def test_report_of_one_run_has_no_spread() -> None:
    trace = Trace(runs=[RunSpan(0, "run 0", 0, 1_500, "ok")])
    assert "step time  1.50 µs\nmakespan   1.50 µs\n" in format_report(trace, parse_machine("v100"))


def test_report_of_failed_runs_has_no_step_time() -> None:
    trace = Trace(runs=[RunSpan(0, "run 0", 0, 1_500, "error")])
    report = format_report(trace, parse_machine("v100"))
    assert "step time  " not in report
    assert "failed     1, " in report


def test_report_names_missing_parts() -> None:
    trace = Trace(runs=[RunSpan(0, "run 0", 0, 1_500, "ok")], dropped=7)
    assert format_report(trace, parse_machine("v100")).endswith(
        "7 firings past the trace's capacity are in none of these figures"
    )


# -- whole programs ----------------------------------------------------------------------------------------------


def test_predicts_and_draws(program: Path, output: Output) -> None:
    assert simulate("steps", "-o", "trace.json", "-o", "trace.html") == 0
    out, _ = output()
    assert f"value {512.0**3 * 512}" in out
    assert "runs       3" in out
    assert "step time  " in out
    lines = [line.split() for line in out.splitlines()]
    streams = {tuple(line[:2]) for line in lines if line and line[0].startswith("sim:")}
    assert {("sim:0", "compute"), ("sim:0", "h2d"), ("sim:1", "compute"), ("sim:1", "peer")} <= streams
    peaks = [line for line in lines if line[:2] == ["sim:0", "v100"]]
    assert len(peaks) == 1 and peaks[0][2:4] != ["0", "B"]
    names = {event["name"] for event in json.loads((program / "trace.json").read_text())["traceEvents"]}
    assert any("matmul" in name for name in names)
    assert (program / "trace.html").stat().st_size > 10_000


def test_prediction_is_the_same_every_time(program: Path, output: Output) -> None:
    reports = []
    for _ in range(2):
        assert simulate("steps", "--seed", "1", "--jitter", "0.2") == 0
        reports.append(output()[0])
    assert reports[0] == reports[1]
    assert simulate("steps", "--seed", "2", "--jitter", "0.2") == 0
    assert output()[0] != reports[0]


def test_faster_cards_take_less(program: Path, output: Output) -> None:
    ends = []
    for devices in ("2 x k40", "2 x v100, nvlink2", "2 x h100, nvlink4"):
        assert simulate("steps", devices=devices) == 0
        ends.append(float(output()[0].split(" at ")[1].split()[0]))
    assert ends == sorted(ends, reverse=True)
    assert len(set(ends)) == 3


def test_session_made_before_the_loop(program: Path, output: Output) -> None:
    assert simulate("session_before_loop") == 0
    assert "['sim:0', 'sim:1']" in output()[0]


def test_shapes_only(program: Path, output: Output) -> None:
    assert simulate("steps", "--shapes-only") == 0
    out, _ = output()
    assert "value nan" in out
    assert "runs       3" in out


def test_loops_on_data_of_a_simulation_of_shapes(program: Path, output: Output) -> None:
    assert simulate("searches", "--shapes-only", "--iterations", "9") == 0
    assert "found after 9" in output()[0]
    assert simulate("searches", "--shapes-only") == 1
    assert "say how often such loops run: iterations=, or --iterations" in output()[1]
    for arguments, told in (
        (["--iterations", "9"], "is for --shapes-only"),
        (["--iterations=-1"], "'-1' is not a number"),
    ):
        with pytest.raises(SystemExit):
            simulate("searches", *arguments)
        assert told in output()[1]
