"""Counts of the lines of code of each room, and their change: ``make size``, or with BASE=ref.

Code is counted without comments, docstrings (of attributes too) and blank lines. The base is where the
branch left main; on main itself it is the last tag. Where neither is there, as in a shallow clone or outside git, the
sizes stand alone.

Each room has a cap, and so have all together. The command fails where a room is above its cap. A commit that needs more
raises a cap here, by name, and gives the reason in its body. A commit that removes code lowers the cap of its room: the
command names the rooms that stand well below theirs.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "asyncflow"
CAPS: Final = {
    "asyncflow/compiler/": 13_509,
    "asyncflow/runtime/": 11_355,
    "asyncflow/ops/": 9_260,
    "asyncflow/devices/": 9_698,
    "asyncflow/graph/": 3_020,
    "asyncflow/autodiff/": 2_630,
    "asyncflow/state/": 2_600,
    "asyncflow/lift/": 2_220,
    "asyncflow/control/": 2_040,
    "asyncflow/vertex/": 1_822,
    "asyncflow/streams/": 1_935,
    "asyncflow/cli/": 1_412,
    "asyncflow/profiler/": 1_161,
    "asyncflow/checkpoint/": 1_135,
    "asyncflow/serving/": 1_100,
    "asyncflow/": 1_176,
    "asyncflow/semantics/": 1_010,
    "asyncflow/inputs/": 705,
    "asyncflow/nn/": 1_733,
    "asyncflow/testing/": 684,
    "asyncflow/optim/": 336,
}
"""The most lines of code that each room may have; `asyncflow/` are the modules that stand in no room."""
TOTAL: Final = 70_398
"""The most lines of code of all rooms together: less than their caps, as not all rooms grow at once."""
PLANNED: Final = {
    "layers, and kernels of each device": 0,
    "steps that a card captures": 0,
    "native code": 2_500,
    "the profiler": 2_200,
    "several hosts": 900,
}
"""Lines that planned work may add. The commit that adds them raises the caps, and takes them off its line here."""
NOTABLE_SHARE: Final = 0.03
"""The share of its cap below which a room may stay without a word."""
NOTABLE_LINES: Final = 40
"""The same in lines, for small rooms."""
LIMIT_S: Final = 300.0
"""For a git that hangs; it answers in milliseconds."""
NO_CODE: Final = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
Sizes = dict[str, int]


class NoSuchBase(Exception):
    """A base was asked for by name and is not there."""


@cache
def code_lines(source: str) -> int:
    """Lines of a module that hold anything but comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        for docstring in _docstrings(node):
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def _docstrings(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the docstring of a module, class or function, and docstrings of attributes."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if ast.get_docstring(node, clean=False) is not None:
        yield node.body[0]
    if isinstance(node, ast.Module | ast.ClassDef):
        for before, statement in pairwise(node.body):
            if isinstance(before, ast.Assign | ast.AnnAssign) and _is_bare_string(statement):
                yield statement


def _is_bare_string(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def room_of(path: str) -> str:
    """Return ``asyncflow/graph/`` for a module anywhere in it, and ``asyncflow/`` for modules in no room."""
    return "/".join(PurePosixPath(path).parts[:-1][:2]) + "/"


def sizes(modules: dict[str, str]) -> Sizes:
    """Lines of code by room, of modules given by path."""
    found: Sizes = {}
    for path, source in modules.items():
        found[room_of(path)] = found.get(room_of(path), 0) + code_lines(source)
    return found


def here(root: Path = ROOT) -> dict[str, str]:
    """The modules as they lie in the folder, committed or not."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def at(commit: str, root: Path = ROOT) -> dict[str, str]:
    """The modules at a commit; none if the package was not there yet."""
    done = subprocess.run(
        ["git", "archive", commit, PACKAGE], cwd=root, capture_output=True, check=False, timeout=LIMIT_S
    )
    if done.returncode != 0:
        return {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as members:
        files = {member.name: members.extractfile(member) for member in members if member.name.endswith(".py")}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def base_of(asked: str | None, root: Path = ROOT) -> str | None:
    """The commit to compare with, or None where there is none.

    Raises:
        NoSuchBase: the one asked for is not a commit here.
    """
    if asked:
        found = _git(root, "rev-parse", "--verify", "--quiet", f"{asked}^{{commit}}")
        if found is None:
            raise NoSuchBase(f"BASE={asked} is no commit of this clone; fetch it, or name another")
        return found
    head = _git(root, "rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        left = _git(root, "merge-base", "HEAD", main)
        if left is not None and left != head:
            return left
    tag = _git(root, "describe", "--tags", "--abbrev=0")
    return tag and _git(root, "rev-parse", f"{tag}^{{commit}}")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def table(now: Sizes, before: Sizes | None) -> str:
    """Return a line a room, largest first, and the total, with their caps; and the changes where a base is given."""
    rooms = sorted(now.keys() | (before or {}).keys(), key=lambda room: (-now.get(room, 0), room))
    was: dict[str, int | None] = (
        dict.fromkeys(rooms) if before is None else {room: before.get(room, 0) for room in rooms}
    )
    lines = [_row(room, now.get(room, 0), was[room], CAPS.get(room)) for room in rooms]
    return "\n".join(
        [*lines, _row("total", sum(now.values()), None if before is None else sum(before.values()), TOTAL)]
    )


def _row(name: str, now: int, before: int | None, cap: int | None) -> str:
    change = "" if before is None else f"{now - before:+,}" if now != before else "="
    return f"{name:<24}{now:>8,}{change:>8}  {'' if cap is None else f'of {cap:,}'}".rstrip()


def faults(now: Sizes) -> list[str]:
    """Return the rooms above their caps, the rooms without a cap, and the total if it is above its own."""
    found = [f"{room} has no cap: give it one" for room in now if room not in CAPS]
    sized = {**{room: (lines, CAPS[room]) for room, lines in now.items() if room in CAPS}, "total": _total(now)}
    found += [
        f"{name} is {lines - cap:,} lines above its cap of {cap:,}"
        for name, (lines, cap) in sized.items()
        if lines > cap
    ]
    return found


def _total(now: Sizes) -> tuple[int, int]:
    return sum(now.values()), TOTAL


def caps_to_lower(now: Sizes) -> list[str]:
    """Return the rooms that stand so far below their caps that the caps no longer hold them."""
    return [
        f"{room} is {CAPS[room] - lines:,} lines below its cap of {CAPS[room]:,}: lower the cap"
        for room, lines in now.items()
        if room in CAPS and CAPS[room] - lines > max(NOTABLE_SHARE * CAPS[room], NOTABLE_LINES)
    ]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Print the table. The exit code is 1 if a room is above its cap, and 2 if there is no such base."""
    parser = argparse.ArgumentParser(description="lines of code of each room, and what changed")
    parser.add_argument("base", nargs="?", default=None, help="commit to compare with")
    try:
        base = base_of(parser.parse_args(arguments).base, root)
    except NoSuchBase as error:
        print(error, file=sys.stderr)
        return 2
    print(f"lines of code{f', and the change since {base[:12]}' if base else '; nothing to compare with'}")
    now = sizes(here(root))
    print(table(now, sizes(at(base, root)) if base else None))
    for line in caps_to_lower(now):
        print(line)
    wrong = faults(now)
    for line in wrong:
        print(f"{line}; benchmarks/code_size.py says when a cap may be raised", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
