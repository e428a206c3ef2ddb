"""The `asyncflow` command: arguments, and the module for each subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import fill, indent
from typing import TypeAlias

import asyncflow as af
from asyncflow.cli.check import check
from asyncflow.cli.checkpoint import ACTIONS, checkpoint
from asyncflow.cli.compare import compare
from asyncflow.cli.devices import list_devices
from asyncflow.cli.explain import explain
from asyncflow.cli.parameters import parameters
from asyncflow.cli.profile import profile
from asyncflow.cli.replay import replay
from asyncflow.cli.simulate import simulate
from asyncflow.cli.target import TargetError
from asyncflow.compiler.pipeline import PASSES
from asyncflow.devices.figures.host import LAUNCHES
from asyncflow.devices.figures.presets import CARDS, DEFAULT_HOST, HOSTS, LINKS, MachineSpec, parse_machine
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.errors import CheckpointError
from asyncflow.profiler.save import TraceFormatError

_AddCommand: TypeAlias = Callable[..., argparse.ArgumentParser]
_Action: TypeAlias = Callable[[argparse.Namespace, Sequence[str]], int]
"""A function that executes a command with its options and the program's arguments, and returns the exit code."""

USAGE_ERROR = 2

# Needed to find the program's arguments: `argparse` would search them for our options.
_WITH_VALUE = {
    "check": ("--runs",),
    "explain": ("--after",),
    "parameters": ("--extent",),
    "profile": ("-o", "--output", "--top", "--color-by", "--detail"),
    "simulate": ("-o", "--output", "--devices", "--seed", "--jitter", "--iterations", "--host", "--launches"),
}
_FLAGS = {
    "check": ("-h", "--help"),
    "explain": ("-h", "--help", "--passes"),
    "parameters": ("-h", "--help"),
    "profile": ("-h", "--help"),
    "simulate": ("-h", "--help", "--shapes-only"),
}

_COMMANDS = (*_WITH_VALUE, "checkpoint", "compare", "devices", "replay")

_CHECK_EXAMPLES = """\
examples:
  asyncflow check train.py:graph                 all effects of a graph, which is not run
  asyncflow check train.py:main --epochs 3       run a program, and check every kind of run in it
  asyncflow check serve.py:graph --runs 2        check two requests served at the same time

The exit code is 0 without races, 1 with races, 2 for an invalid target, and 3 if the program failed before any race was
found.
"""

_CHECKPOINT_EXAMPLES = f"""\
actions:
{indent(chr(10).join(f"{action:<8} {what}" for action, what in ACTIONS.items()), "  ")}

examples:
  asyncflow checkpoint list checkpoints/run7
  asyncflow checkpoint verify checkpoints/run7/step-1200
  asyncflow checkpoint diff checkpoints/run7

A directory of steps stands for its latest step. The exit code is 1 for a damaged step, and for steps that differ.
"""

_COMPARE_EXAMPLES = """\
examples:
  asyncflow compare before.py:main after.py:main
  asyncflow compare train.py:main --devices cpu:0 --devices cuda:0
  asyncflow compare "train.py --steps 3" "train.py --steps 3 --fast" --tolerance 1e-6

Both run in this process, node by node, the first one as the golden run; seed their graphs if they draw random numbers.
The exit code is 0 if all values that both have are equal, and 1 for a difference or if they share no value. It is 2 if
a target makes no sense, and 3 if a program failed and no value differed before.
"""

_EXPLAIN_EXAMPLES = f"""\
examples:
  asyncflow explain train.py:main
  asyncflow explain train.py:graph --passes
  asyncflow explain train.py:main --after fold
  asyncflow explain package.module:step --after hoist --after batch_loops --epochs 3

Prints plans like session.plan(...).explain(). For passes, prints a diff of the graph's text for each compiled plan. In
a program, Session(dump="fold") prints this diff for the plans of one session, and Session(without=["fold"]) skips the
pass.

passes, in order:
{indent(fill(", ".join(each.name for each in PASSES), 100), "  ")}
"""

_PARAMETERS_EXAMPLES = """\
examples:
  asyncflow parameters train.py:graph                     the variables of a graph, which is not run
  asyncflow parameters train.py:main --extent 64          of each graph that a program runs, for batches of 64
"""

_PROFILE_EXAMPLES = """\
examples:
  asyncflow profile train.py:main -o trace.html
  asyncflow profile package.module:step -o trace.json -o trace.html
  asyncflow profile train.py:main -o trace.json.gz --epochs 3        arguments for the program come last
  asyncflow profile train.py:main -o trace.json -- -o model.bin      or after two dashes

By default a loop, or the code between loops, is one entry of the timeline. --detail node shows every node: runs are
then interpreted, which takes some more microseconds for each node, so their times differ from normal runs.
Open .json and .json.gz at https://ui.perfetto.dev, .html in any browser, offline; .png and .svg need matplotlib.
"""

_SIMULATE_EXAMPLES = f"""\
examples:
  asyncflow simulate train.py:main --devices "8 x v100, nvlink2" -o trace.html
  asyncflow simulate package.module:step --devices "4 x a100, nvlink3, pcie3" --jitter 0.1 --seed 7
  asyncflow simulate train.py:main --devices "64 x k40, ethernet10" --shapes-only --epochs 3
  asyncflow simulate write.py:main --devices v100 --shapes-only --iterations 100
  asyncflow simulate train.py:main --devices "8 x v100, nvlink2" --host c++ --launches nodes

cards: {", ".join(CARDS)}
links: {", ".join(LINKS)}
hosts: {", ".join(f"{host.name} ({host.summary})" for host in HOSTS.values())}

Sessions that name no devices open all of them. Time is virtual: only graph work takes time, the program's own Python
code takes none.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code.

    Args:
        argv: the arguments after the command's name; None for the arguments of this process.

    Raises:
        SystemExit: for ``--help``, ``--version`` and arguments that make no sense.
    """
    own, program_arguments = _split(sys.argv[1:] if argv is None else list(argv))
    parser = _parser()
    close = [] if not own or own[0] in _COMMANDS else get_close_matches(own[0], _COMMANDS)
    if close:
        parser.error(f"there is no command {own[0]!r}, did you mean {' or '.join(map(repr, close))}?")
    options = parser.parse_args(own)
    if options.command is None:
        parser.print_help()
        return 0
    do: _Action = options.do
    try:
        return do(options, program_arguments)
    except (CheckpointError, TargetError, TraceFormatError, OSError) as error:
        print(f"asyncflow {options.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split arguments into the command's own and the program's, which follow the target and the command's options,
    or ``--``.
    """
    command = arguments[0] if arguments else ""
    if command not in _WITH_VALUE:
        return arguments, []
    with_value = _WITH_VALUE[command]
    # Forms with the value attached, such as `--output=FILE`; a separate value is another argument.
    ours = (*_FLAGS[command], *(name + "=" if name.startswith("--") else name for name in with_value))
    target_seen, position = False, 1
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return arguments[:position], arguments[position + 1 :]
        if argument in with_value:
            position += 1
        elif argument.startswith(ours):
            pass
        elif target_seen:
            return arguments[:position], arguments[position:]
        else:
            target_seen = not argument.startswith("-")
        position += 1
    return arguments, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncflow",
        description="Dataflow graphs with data-dependent control flow, awaited from async Python.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncflow {af.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    as_written = argparse.RawDescriptionHelpFormatter
    add: _AddCommand = partial(commands.add_parser, formatter_class=as_written, allow_abbrev=False)
    add("devices", help="list what graphs can run on here").set_defaults(do=_list_devices)
    _add_check(add)
    _add_checkpoint(add)
    _add_compare(add)
    _add_explain(add)
    _add_parameters(add)
    _add_profile(add)
    _add_replay(add)
    _add_simulate(add)
    return parser


def _list_devices(options: argparse.Namespace, program_arguments: Sequence[str]) -> int:
    print(list_devices())
    return 0


def _add_check(add: _AddCommand) -> None:
    checked = add(
        "check",
        help="find races: reads and writes of variables without an order",
        description="Names the races of a graph, or of every graph that a program runs: reads and writes of one "
        "variable without an order. If the graph is small enough to try all orders, shows their possible outcomes.",
        usage="asyncflow check [-h] target [--runs {1,2}] [arguments of the program ...]",
        epilog=_CHECK_EXAMPLES,
    )
    checked.set_defaults(do=lambda options, rest: check(options.target, rest, runs=options.runs))
    checked.add_argument(
        "target",
        help="a graph: file.py:graph or package.module:graph; or a program: file.py, or a function, coroutine function "
        "or @af.function as file.py:name or package.module:name",
    )
    checked.add_argument(
        "--runs",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: also find races between two concurrent runs of one session (default: %(default)s)",
    )


def _add_checkpoint(add: _AddCommand) -> None:
    parser = add(
        "checkpoint",
        help="list, show, verify and compare checkpoints",
        description="Inspects checkpoints, without changing them.",
        epilog=_CHECKPOINT_EXAMPLES,
    )
    parser.set_defaults(
        do=lambda options, rest: checkpoint(options.action, _paths_of_steps(options)), refuse=parser.error
    )
    parser.add_argument("action", choices=tuple(ACTIONS), help="action; see below")
    parser.add_argument("path", type=Path, help="a step, or a directory of steps")
    parser.add_argument("other", type=Path, nargs="?", help="for diff: the step to compare with")


def _paths_of_steps(options: argparse.Namespace) -> list[Path]:
    if options.other is None:
        return [options.path]
    if options.action != "diff":
        options.refuse(f"{options.action} takes one path; {options.other} is another")
    return [options.path, options.other]


def _add_compare(add: _AddCommand) -> None:
    compared = add(
        "compare",
        help="run two programs, and name the first node whose values differ",
        description="Runs two programs, or one on two sets of devices, and names the first node whose values differ, "
        "with the line that built it.",
        usage="asyncflow compare [-h] first [second] [--devices D]... [--tolerance X]",
        epilog=_COMPARE_EXAMPLES,
    )
    compared.set_defaults(do=_compare, refuse=compared.error)
    compared.add_argument("first", help="what to run, as of profile; in quotes with its arguments")
    compared.add_argument("second", nargs="?", help="what to compare it with (default: the first again)")
    compared.add_argument(
        "--devices",
        metavar="D",
        action="append",
        default=[],
        help="devices of sessions that name none, such as cuda:0,cuda:1; given twice, for the first and the second",
    )
    compared.add_argument(
        "--tolerance",
        metavar="X",
        type=_tolerance,
        help="largest difference, as a share of the largest magnitude of a value (default: by dtype, 0.0003 for "
        "float32); integers have to be equal",
    )


def _compare(options: argparse.Namespace, program_arguments: Sequence[str]) -> int:
    if len(options.devices) > 2:
        options.refuse("--devices is given once for each of two programs")
    devices = [each.split(",") for each in options.devices]
    return compare(options.first, options.second or options.first, devices, tolerance=options.tolerance)


def _add_explain(add: _AddCommand) -> None:
    explained = add(
        "explain",
        help="show the plans of a program or graph, or the changes by compiler passes",
        description="Runs a program, and prints the plans of its runs, or the changes that compiler passes make.",
        usage="asyncflow explain [-h] target [--passes] [--after PASS]... [arguments of the program ...]",
        epilog=_EXPLAIN_EXAMPLES,
    )
    explained.set_defaults(
        do=lambda options, rest: explain(options.target, rest, passes=options.after, all_passes=options.passes)
    )
    _add_target(explained)
    explained.add_argument("--passes", action="store_true", help="print the changes of each pass instead of the plans")
    explained.add_argument(
        "--after",
        metavar="PASS",
        choices=[each.name for each in PASSES],
        action="append",
        default=[],
        help="print the changes of this pass instead of the plans; may be given several times",
    )


def _add_parameters(add: _AddCommand) -> None:
    shown = add(
        "parameters",
        help="list the variables of a graph, or of a program's graphs, and their memory",
        description="Lists variables by scope, with shapes, elements and bytes, and the memory of activations: the "
        "values that gradients need.",
        usage="asyncflow parameters [-h] target [--extent N] [arguments of the program ...]",
        epilog=_PARAMETERS_EXAMPLES,
    )
    shown.set_defaults(do=lambda options, rest: parameters(options.target, rest, extent=options.extent))
    shown.add_argument("target", help="file.py:graph or package.module:graph, or what to run, as of profile")
    shown.add_argument(
        "--extent",
        metavar="N",
        type=_extent,
        default=1,
        help="stands for extents that are not known before a run, such as a batch's (default: %(default)s)",
    )


def _add_profile(add: _AddCommand) -> None:
    profiled = add(
        "profile",
        help="run a program and show where its time went",
        description="Runs a program, records every graph run in it, and shows where the time went.",
        usage="asyncflow profile [-h] target [-o FILE]... [--detail region|node] [--top N] [--color-by X] "
        "[arguments of the program ...]",
        epilog=_PROFILE_EXAMPLES,
    )
    profiled.set_defaults(do=_profile)
    _add_target_and_output(profiled)
    profiled.add_argument(
        "--detail",
        choices=("region", "node"),
        default="region",
        help="record compiled regions as they run, or every node, interpreted (default: %(default)s)",
    )
    profiled.add_argument(
        "--top", metavar="N", type=_count, default=20, help="number of nodes to list (default: %(default)s)"
    )
    profiled.add_argument(
        "--color-by",
        choices=("auto", "op", "node", "iteration"),
        default="auto",
        help="meaning of the colours of a .png or .svg (default: iteration if there is a loop, else op)",
    )


def _add_replay(add: _AddCommand) -> None:
    replayed = add(
        "replay",
        help="replay a recorded run, and report where it differs",
        description="Replays a run recorded by session.run(..., record=PATH): every node in its recorded order, bit by "
        "bit. Prints the fetched values, or the first firing that differs.",
        formatter_class=argparse.HelpFormatter,
    )
    replayed.set_defaults(do=lambda options, rest: replay(options.path, options.target, live=options.live))
    replayed.add_argument("path", metavar="PATH", type=Path, help="the record")
    replayed.add_argument(
        "--live", action="store_true", help="call your functions again, instead of using their recorded results"
    )
    replayed.add_argument(
        "target",
        nargs="?",
        help="the program's graph, if the record has none because it has ops of your own: file.py:name or "
        "package.module:name, of a Graph or a function that returns one",
    )


def _add_simulate(add: _AddCommand) -> None:
    simulated = add(
        "simulate",
        help="run a program on simulated devices, and predict its times",
        description="Runs a program on simulated devices and virtual time, and prints the predicted time and memory.",
        usage="asyncflow simulate [-h] target --devices MACHINE [-o FILE]... [--seed N] [--jitter X] "
        "[--shapes-only [--iterations N]] [--host HOST] [--launches HOW] [arguments of the program ...]",
        epilog=_SIMULATE_EXAMPLES,
    )
    simulated.set_defaults(do=_simulate, refuse=simulated.error)
    _add_target_and_output(simulated)
    simulated.add_argument(
        "--devices", metavar="MACHINE", type=_machine, help='cards and links, such as "8 x v100, nvlink2"'
    )
    simulated.add_argument("--seed", metavar="N", type=_seed, default=0, help="random seed for --jitter")
    simulated.add_argument(
        "--jitter",
        metavar="X",
        type=_jitter,
        default=0.0,
        help="random deviation of kernel and copy times, up to this fraction (default: %(default)s)",
    )
    simulated.add_argument(
        "--shapes-only",
        action="store_true",
        help="keep no data of large arrays: fast, but branches cannot depend on them, and loops run --iterations times",
    )
    simulated.add_argument(
        "--iterations",
        metavar="N",
        type=_iterations,
        help="with --shapes-only: number of iterations of loops whose condition depends on such arrays",
    )
    simulated.add_argument(
        "--host",
        choices=tuple(HOSTS),
        default=DEFAULT_HOST.name,
        help="program that drives the devices, which sets the costs of launching (default: %(default)s, as measured)",
    )
    simulated.add_argument(
        "--launches", choices=LAUNCHES, help="granularity of launches on a card (default: that of the host)"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        help="program to run: file.py, or a function, coroutine function or @af.function without arguments: "
        "file.py:name or package.module:name",
    )


def _add_target_and_output(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="write the timeline to FILE (.json, .json.gz, .html, .png or .svg); may be given several times",
    )


def _profile(options: argparse.Namespace, program_arguments: Sequence[str]) -> int:
    chosen = {"top": options.top, "color_by": options.color_by, "detail": options.detail}
    return profile(options.target, options.output, program_arguments, **chosen)


def _simulate(options: argparse.Namespace, program_arguments: Sequence[str]) -> int:
    if options.devices is None:
        options.refuse(_no_devices(program_arguments))
    if options.iterations is not None and not options.shapes_only:
        options.refuse("--iterations is for --shapes-only: with data, loops decide by themselves")
    build = partial(
        SimMachine,
        options.devices,
        seed=options.seed,
        jitter=options.jitter,
        shapes_only=options.shapes_only,
        iterations=options.iterations,
        host=HOSTS[options.host],
        launches=options.launches,
    )
    return simulate(options.target, build, options.output, program_arguments)


def _no_devices(program_arguments: Sequence[str]) -> str:
    """Return the hint for a missing ``--devices``, or for ``--devices`` given to the program."""
    names = [argument.partition("=")[0] for argument in program_arguments]
    if "--devices" in names:
        return (
            f"--devices comes after {program_arguments[0]!r}, an argument of the program, and so goes to the program; "
            "put the options of simulate before the options of the program"
        )
    close = get_close_matches("--devices", names, cutoff=0.8)
    meant = f"; {close[0]} goes to the program, did you mean --devices?" if close else ""
    return f"the following arguments are required: --devices{meant}"


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes: a whole number, 0 or more")
    return int(text)


def _extent(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an extent: a whole number, 0 or more")
    return int(text)


def _iterations(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of iterations: a whole number, 0 or more")
    return int(text)


def _machine(text: str) -> MachineSpec:
    try:
        return parse_machine(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = -1.0
    if not tolerance >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance: a number, 0 or more")
    return tolerance


def _seed(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: a whole number")
    return int(text)


def _jitter(text: str) -> float:
    try:
        jitter = float(text)
    except ValueError:
        jitter = -1.0
    if not 0.0 <= jitter < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a jitter: a fraction from 0 to less than 1, such as 0.1")
    return jitter
