"""The `asyncflow` command: what it takes, and which module does it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import asyncflow as af
from asyncflow.cli.devices import list_devices
from asyncflow.cli.profile import profile
from asyncflow.cli.target import TargetError
from asyncflow.profiler.save import TraceFormatError

USAGE_ERROR = 2

# `argparse` would go on looking for our options among the program's.
_WITH_VALUE = ("-o", "--output", "--top")
_OURS = ("-h", "--help", "-o", "--output=", "--top=")

_PROFILE_EXAMPLES = """\
examples:
  asyncflow profile train.py:main -o trace.html
  asyncflow profile package.module:step -o trace.json -o trace.html
  asyncflow profile train.py:main -o trace.json.gz --epochs 3        arguments for the program come last
  asyncflow profile train.py:main -o trace.json -- -o model.bin      or after two dashes

Open .json and .json.gz at https://ui.perfetto.dev, .html in any browser, offline.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code.

    Args:
        argv: the arguments after the command's name; None for those of this process.

    Raises:
        SystemExit: for ``--help``, ``--version`` and arguments that make no sense.
    """
    own, program_arguments = _split(sys.argv[1:] if argv is None else list(argv))
    options = _parser().parse_args(own)
    if options.command == "devices":
        print(list_devices())
        return 0
    try:
        return profile(options.target, options.output, program_arguments, top=options.top)
    except (TargetError, TraceFormatError, OSError) as error:
        print(f"asyncflow profile: error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our arguments, and the program's: those that follow the target and our options, or a ``--``."""
    if arguments[:1] != ["profile"]:
        return arguments, []
    target_seen, position = False, 1
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return arguments[:position], arguments[position + 1 :]
        if argument in _WITH_VALUE:
            position += 1
        elif argument.startswith(_OURS):
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
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    commands.add_parser("devices", help="list what graphs can run on here", allow_abbrev=False)
    profiled = commands.add_parser(
        "profile",
        help="run a program and show where its time went",
        description="Runs a program, records every graph run in it, and shows where the time went.",
        usage="asyncflow profile [-h] target [-o FILE]... [--top N] [arguments of the program ...]",
        epilog=_PROFILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    profiled.add_argument(
        "target",
        help="what to call, without arguments: file.py:name or package.module:name; "
        "a function, a coroutine function or an @af.function",
    )
    profiled.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="write the timeline to FILE, which ends in .json, .json.gz or .html; may be given several times",
    )
    profiled.add_argument(
        "--top", metavar="N", type=_count, default=20, help="how many nodes to list (default: %(default)s)"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes: a whole number, 0 or more")
    return int(text)
