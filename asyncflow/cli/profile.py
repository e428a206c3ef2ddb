"""``asyncflow profile``: runs a program, records every graph run in it, and shows where the time went."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from asyncflow.cli.program import run_program
from asyncflow.cli.target import Target
from asyncflow.errors import counted
from asyncflow.profiler import format_table, save, summarize
from asyncflow.profiler.picture import ColorBy
from asyncflow.profiler.save import check_destination
from asyncflow.runtime.watch.trace import Trace

_ABOUT: Final = {
    "region": "loops, and the code between them, as they really run; --detail node shows every node, interpreted",
    "node": "every node, interpreted: some microseconds a node more; --detail region shows what really runs",
}


def profile(
    target: str,
    outputs: Sequence[Path],
    arguments: Sequence[str],
    *,
    top: int,
    color_by: ColorBy = "auto",
    detail: Literal["region", "node"] = "region",
) -> int:
    """Runs `target`, prints a summary, writes the timeline to every one of `outputs`, and gives the exit code.

    Args:
        target: ``file.py:name`` or ``package.module:name``.
        outputs: files ending in .json, .json.gz, .html, .png or .svg; checked before anything runs.
        arguments: the program's ``sys.argv[1:]``.
        top: how many nodes the summary lists.
        color_by: what the colours of a .png or .svg stand for.
        detail: ``"region"`` records what really runs; ``"node"`` every node, for which runs are interpreted.

    Returns:
        0; 1 if the program raised, after printing its traceback; its own code if it raised `SystemExit`; 130 if it was
        interrupted, 143 if it was terminated. The timeline is written unless the program raised before its first run.

    Raises:
        TargetError: `target` names nothing that can be called without arguments.
        TraceFormatError, OSError: an output that cannot be written.
    """
    for path in outputs:
        check_destination(path)
    trace = Trace(detail=detail)
    has_failed = True  # False once the program is loaded

    @contextmanager
    def observed() -> Iterator[None]:
        nonlocal has_failed
        has_failed = False
        with trace:
            try:
                yield
            except Exception:
                has_failed = True
                raise

    code = run_program(Target.parse(target), arguments, observed())
    sys.stdout.flush()
    if has_failed and not trace.runs:
        return code  # the program's traceback is shown already
    try:
        # Save before printing: a closed pipe must not lose the recording.
        for path in outputs:
            save(trace, path, color_by=color_by)
    finally:
        about = f"\n\n{_ABOUT[detail]}" if trace.firings else ""
        print(f"\n{format_table(summarize(trace), top=top)}{about}")
        if trace.interpreted:
            verb = "was" if len(trace.runs) == 1 else "were"
            print(
                f"{trace.interpreted} of {counted(len(trace.runs), 'run')} {verb} interpreted, since the program's own "
                'trace records every node: af.Trace(detail="node")'
            )
    for path in outputs:
        print(f"\nwrote {path}{how_to_open(path)}")
    return code


def how_to_open(path: Path) -> str:
    """The words after "wrote FILE": where such a timeline can be looked at, unless any program shows it."""
    suffix = path.suffix.lower()
    if suffix in (".png", ".svg"):
        return ""
    return ": open it in any browser" if suffix == ".html" else ": open it at https://ui.perfetto.dev"
