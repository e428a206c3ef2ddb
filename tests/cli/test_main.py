"""The command: arguments, exit codes, printed output and written files."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import asyncflow as af
from asyncflow.cli.main import main
from asyncflow.devices.figures.presets import parse_machine
from tests.cli.conftest import Output

if TYPE_CHECKING:
    from collections.abc import Iterator


PROGRAM = '''
"""A program of the user's."""

import sys
from dataclasses import dataclass

import neighbour
import asyncflow as af


@dataclass
class Settings:
    scale: int = neighbour.SCALE


@af.function
def squares():
    return af.square(af.random.uniform((4,), dtype="float32", seed=1))


@af.function
def scaled(x):
    return x * Settings().scale


async def coroutine():
    print("result", (await scaled(21)).item(), sys.argv[1:])


def plain():
    af.run(coroutine())


async def records_itself():
    with af.Trace() as trace:
        await scaled(21)
    assert len(trace.runs) == 1
    print("recorded with detail", trace.detail)


def runs_nothing():
    pass


async def records_every_node():
    await scaled(20)
    with af.Trace(detail="node") as trace:
        await scaled(21)
    assert len(trace.runs) == 1


async def fails():
    await scaled(1)
    raise LookupError("the program's own fault")


def cancels():
    af.run(cancelled())


async def cancelled():
    import asyncio

    await scaled(1)
    asyncio.current_task().cancel()
    await scaled(1)


def exits(code=3):
    sys.exit(code)


def exits_well():
    sys.exit()


def exits_with_reason():
    sys.exit("no input")


def interrupted():
    raise KeyboardInterrupt


def terminated():
    import signal

    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("it goes on")


async def terminated_while_it_waits():
    import asyncio, os, signal, threading

    await scaled(1)
    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
    await asyncio.Event().wait()


class Group:
    @staticmethod
    def member():
        print("member called")


answer = 42
'''


@pytest.fixture(autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules of programs are theirs alone, and arguments and search path are given back."""
    folder = str(tmp_path_factory.getbasetemp())
    before, argv, path = set(sys.modules), sys.argv, list(sys.path)
    yield
    assert sys.argv is argv
    assert sys.path == path
    for name in set(sys.modules) - before:
        # Modules of the library stay: an op is registered once in a process.
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``program.py``, which is also the working directory."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "neighbour.py").write_text("SCALE = 2\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def main(:\n", encoding="utf-8")
    (tmp_path / "needy.py").write_text("import no_such_dependency\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def events(path: Path) -> list[str]:
    """Names of the firings in a Chrome trace."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    return [event["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("name", ["coroutine", "plain"])
def test_profiles_functions_and_coroutine_functions(program: Path, output: Output, name: str) -> None:
    assert main(["profile", f"program.py:{name}", "-o", "trace.json"]) == 0
    out, _ = output()
    assert "result 42 []" in out
    assert "runs       1" in out
    assert "multiply" in out
    assert "wrote trace.json" in out
    assert "multiply" in events(program / "trace.json")


def test_profiles_a_graph_function(program: Path) -> None:
    assert main(["profile", "program.py:squares", "-o", "trace.json", "--detail", "node"]) == 0
    assert "square" in events(program / "trace.json")


def test_says_what_either_detail_shows(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:squares"]) == 0
    assert "loops, and the code between them, as they really run; --detail node" in output()[0]
    assert main(["profile", "program.py:squares", "--detail=node"]) == 0
    assert "every node, interpreted: some microseconds a node more; --detail region" in output()[0]


def test_module_in_the_working_directory(program: Path) -> None:
    assert main(["profile", "program:coroutine", "-o", "trace.json"]) == 0
    assert events(program / "trace.json")


@pytest.mark.parametrize("detail", ["region", "node"])
def test_program_that_records_itself(program: Path, output: Output, detail: str) -> None:
    """The program's own trace takes the detail of the profile."""
    assert main(["profile", "program.py:records_itself", "-o", "trace.json", "--detail", detail]) == 0
    assert "multiply" in events(program / "trace.json")
    out = output()[0]
    assert f"recorded with detail {detail}" in out
    assert "interpreted, since" not in out


def test_program_that_records_every_node(program: Path, output: Output) -> None:
    """The command says how many runs were interpreted."""
    assert main(["profile", "program.py:records_every_node"]) == 0
    assert "1 of 2 runs were interpreted, since the program's own trace records every node" in output()[0]
    assert main(["profile", "program.py:records_every_node", "--detail", "node"]) == 0
    assert "interpreted, since" not in output()[0]


def test_a_program_that_cannot_be_imported_shows_its_traceback_alone(program: Path, output: Output) -> None:
    (program / "broken.py").write_text("import nowhere_to_be_found\n", encoding="utf-8")
    assert main(["profile", "broken.py", "-o", "trace.html"]) == 1
    out, err = output()
    assert out == "" and err.rstrip().endswith("ModuleNotFoundError: No module named 'nowhere_to_be_found'")
    assert not (program / "trace.html").exists()


def test_dotted_attribute(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:Group.member"]) == 0
    out, _ = output()
    assert "member called" in out
    assert "empty trace" in out


def test_file_elsewhere_finds_its_neighbours(
    program: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert main(["profile", str(program / "program.py:coroutine")]) == 0


def test_writes_every_format_asked_for(program: Path) -> None:
    outputs = ["-o", "a.json", "--output", "b.json.gz", "-o", "c.html"]
    assert main(["profile", *outputs, "program.py:coroutine"]) == 0
    assert events(program / "a.json") == events(program / "b.json.gz")
    assert "<script" in (program / "c.html").read_text(encoding="utf-8")


def test_a_closed_pipe_costs_no_recording(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    assert main(["profile", "program.py:squares", "-o", "trace.json"]) != 0
    assert events(program / "trace.json")


def test_arguments_go_to_the_program(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:coroutine", "-o", "trace.json", "--epochs", "3", "data"]) == 0
    assert "['--epochs', '3', 'data']" in output()[0]


def test_arguments_after_two_dashes_are_never_ours(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:coroutine", "--", "-o", "model.bin", "--", "-h"]) == 0
    assert "['-o', 'model.bin', '--', '-h']" in output()[0]
    assert not (program / "model.bin").exists()


def test_options_after_the_programs_first_argument_are_the_programs(program: Path, output: Output) -> None:
    arguments = ["-otrace.json", "--top=3", "data", "--output", "model.bin", "-h"]
    assert main(["profile", "program.py:coroutine", *arguments]) == 0
    assert "['data', '--output', 'model.bin', '-h']" in output()[0]
    assert (program / "trace.json").exists()


def test_top_limits_the_table(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:coroutine", "--top", "0"]) == 0
    assert "more nodes" in output()[0]


def test_failing_program_is_profiled_too(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:fails", "-o", "trace.json"]) == 1
    _, err = output()
    assert err.rstrip().endswith("LookupError: the program's own fault")
    assert "program.py" in err
    assert "cli" not in err
    assert "multiply" in events(program / "trace.json")


def test_cancelled_program_fails(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:cancels", "-o", "trace.json"]) == 1
    assert "CancelledError" in output()[1]
    assert (program / "trace.json").exists()


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("exits", 3, ""),
        ("exits_well", 0, ""),
        ("exits_with_reason", 1, "no input"),
        ("interrupted", 130, "interrupted"),
        ("terminated", 143, "terminated"),
        ("terminated_while_it_waits", 143, "terminated"),
    ],
)
def test_exit_code_of_the_program_is_kept(program: Path, output: Output, name: str, code: int, said: str) -> None:
    assert main(["profile", f"program.py:{name}", "-o", "trace.json"]) == code
    assert output()[1].strip() == said
    assert (program / "trace.json").exists()


@pytest.mark.parametrize("name", ["terminated", "terminated_while_it_waits"])
def test_a_job_in_the_background_is_terminated_too(program: Path, output: Output, name: str) -> None:
    """A shell has it ignore SIGINT, which it goes on to do."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["profile", f"program.py:{name}", "-o", "trace.json"]) == 143
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert output()[1].strip() == "terminated"
    assert (program / "trace.json").exists()


def test_module_that_does_not_compile(program: Path, output: Output) -> None:
    assert main(["profile", "broken.py:main"]) == 1
    err = output()[1]
    assert "SyntaxError" in err
    assert "Traceback" not in err


def test_module_whose_import_fails(program: Path, output: Output) -> None:
    assert main(["profile", "needy:main"]) == 1
    err = output()[1]
    assert "import no_such_dependency" in err
    assert "importlib" not in err


@pytest.mark.parametrize("command", [["profile"], ["simulate", "--devices", "2 x v100"]])
def test_a_whole_file_runs_as_python_would_run_it(program: Path, output: Output, command: list[str]) -> None:
    (program / "whole.py").write_text(
        "import asyncio, sys\nimport asyncflow as af\nimport neighbour\n"
        "with af.Graph() as graph:\n    y = af.constant(20.0) + neighbour.SCALE\n"
        "async def main():\n    async with af.Session(graph) as session:\n"
        "        print(await session.run(y), sys.argv[1:])\n"
        "if __name__ == '__main__':\n    asyncio.run(main())\n",
        encoding="utf-8",
    )
    assert main([*command, "whole.py", "--epochs", "3"]) == 0
    printed, _ = output()
    assert printed.startswith("22.0 ['--epochs', '3']\n")
    assert "1 run" in printed or "runs       1" in printed


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("missing.py:main", "there is no file 'missing.py' in "),
        ("missing.module:main", "there is no module 'missing.module' in "),
        (
            "program",
            "'program' does not say what to call; write file.py, file.py:name or package.module:name, such as ",
        ),
        ("missing.py", "there is no file 'missing.py' in "),
        ("program.py:", "does not say what to call"),
        (":main", "does not say what to call"),
        ("a-b:main", "'a-b' is neither a file ending in .py nor a dotted module name"),
        ("program.py:absent", "has no 'absent'; it defines Settings, squares, scaled, coroutine, plain"),
        ("program.py:Group.absent", "has no 'Group.absent'"),
        ("neighbour.py:main", "it defines nothing to call"),
        ("program.py:answer", "answer of "),
        ("program.py:scaled", "scaled(x) needs arguments (missing a required argument: 'x'), and is called without"),
    ],
)
def test_bad_targets_say_what_to_do(program: Path, output: Output, target: str, reason: str) -> None:
    assert main(["profile", target, "-o", "trace.json"]) == 2
    _, err = output()
    assert err.startswith("asyncflow profile: error: ")
    assert reason in err


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("trace.txt", "a trace is saved as .json, .json.gz, .html, .png or .svg"),
        ("nowhere/trace.json", "directory does not exist"),
    ],
)
def test_bad_outputs_are_refused_before_the_program_runs(program: Path, output: Output, path: str, reason: str) -> None:
    assert main(["profile", "program.py:coroutine", "-o", "good.json", "-o", path]) == 2
    out, err = output()
    assert reason in err
    assert "result" not in out
    assert not (program / "good.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["measure"],
        ["profile"],
        ["profile", "a:b", "--top", "many"],
        ["devices", "extra"],
        ["devices", "--", "x"],
        ["profile", "-x"],
    ],
)
def test_bad_arguments_show_the_usage(output: Output, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: asyncflow" in output()[1]


def test_a_misspelt_command_names_the_one_meant(output: Output) -> None:
    with pytest.raises(SystemExit):
        main(["profiles", "program.py"])
    assert "there is no command 'profiles', did you mean 'profile'?" in output()[1]


def test_a_program_whose_runs_are_not_awaited(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:runs_nothing"]) == 0
    assert output()[0].endswith("is each `session.run(...)` awaited?\n")


def test_no_arguments_show_the_help(output: Output) -> None:
    assert main([]) == 0
    assert output()[0].startswith("usage: asyncflow [-h] [--version] command")


@pytest.mark.parametrize("arguments", [["--help"], ["profile", "--help"], ["devices", "--help"]])
def test_help(output: Output, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "usage: asyncflow" in output()[0]


def test_version(output: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert output()[0] == f"asyncflow {af.__version__}\n"


def test_devices_lists_the_cpu_why_there_is_no_gpu_and_what_can_be_simulated(output: Output) -> None:
    assert main(["devices"]) == 0
    listed = output()[0].splitlines()
    # An environment may hold NumPy back, which is told behind the CPU.
    cpu, cuda, sim, cards, links = (line for line in listed if not line.startswith("       OPENBLAS"))
    assert cpu.startswith("cpu:0")
    assert "cores" in cpu
    assert cuda.startswith("cuda   off: ")
    assert sim.startswith("sim    off outside asyncflow.testing.virtual_clock()")
    assert cards.startswith("       cards ")
    assert links.startswith("       links ")
    machine = f"2 x {cards.split(', ')[-1]}, {links.split(', ')[-1]}"
    assert len(parse_machine(machine).cards) == 2


def test_a_profile_is_drawn_as_a_picture(program: Path, output: Output) -> None:
    assert main(["profile", "program.py:coroutine", "-o", "timeline.svg", "x"]) == 0
    assert output()[0].endswith("\nwrote timeline.svg\n")
    assert (program / "timeline.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_as_a_command(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asyncflow", "profile", "program.py:coroutine", "-o", "trace.html", "x"],
        cwd=program,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("result 42 ['x']\n")
    assert "wrote trace.html: open it in any browser" in done.stdout
    assert (program / "trace.html").stat().st_size > 10_000
