"""``asyncflow explain``: runs a program, and prints what passes of the compiler change in the plans of its runs."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.cli.program import run_program
from asyncflow.cli.target import Target
from asyncflow.compiler.dump import listening


def explain(target: str, passes: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs `target`, prints what `passes` change in each plan that is compiled for it, and gives the exit code.

    Args:
        target: ``file.py:name`` or ``package.module:name``.
        passes: their names; none for all.
        arguments: the program's ``sys.argv[1:]``.

    Returns:
        As `asyncflow.cli.profile.profile`.

    Raises:
        TargetError: `target` names nothing that can be called without arguments.
    """
    not_seen = dict.fromkeys(passes)

    def tell(name: str, change: str) -> None:
        if name in passes or not passes:
            not_seen.pop(name, None)
            print(change or f"{name} changes nothing")

    code = run_program(Target.parse(target), arguments, listening(tell))
    for name in not_seen:
        print(f"in no plan of the program was there anything for {name} to do")
    return code
