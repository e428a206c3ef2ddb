"""Counts the lines of code of each room, and what the change did to them: ``make size``, or with BASE=ref.

Code is what is left without comments, docstrings (those of attributes too) and blank lines. The base is where the
branch left main; on main itself it is the last tag. Where neither is there, as in a shallow clone or outside git, the
sizes stand alone.
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
BUDGET: Final = 38_000
"""Lines of code that the package may have when everything in the design is there."""
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
    """The docstring of a module, class or function, and those of the attributes of a module or class."""
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
    """``asyncflow/graph/`` for a module anywhere in it; ``asyncflow/`` for those that stand in no room."""
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
    """A line a room, largest first, and the total beside the budget; with what changed where a base is given."""
    rooms = sorted(now.keys() | (before or {}).keys(), key=lambda room: (-now.get(room, 0), room))
    total = sum(now.values())
    if before is None:
        lines = [_row(room, now[room], None) for room in rooms] + [_row("total", total, None)]
    else:
        lines = [_row(room, now.get(room, 0), before.get(room, 0)) for room in rooms]
        lines.append(_row("total", total, sum(before.values())))
    left = f"{BUDGET - total:,} left" if total <= BUDGET else f"{total - BUDGET:,} OVER"
    return "\n".join([*lines, f"budget {BUDGET:,}: {left}"])


def _row(name: str, now: int, before: int | None) -> str:
    change = "" if before is None else f"  {now - before:+,}" if now != before else "  ="
    return f"{name:<24}{now:>8,}{change}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Prints the table; tells whether it could."""
    parser = argparse.ArgumentParser(description="lines of code of each room, and what changed")
    parser.add_argument("base", nargs="?", default=None, help="commit to compare with")
    try:
        base = base_of(parser.parse_args(arguments).base, root)
    except NoSuchBase as error:
        print(error, file=sys.stderr)
        return 2
    print(f"lines of code{f', and the change since {base[:12]}' if base else '; nothing to compare with'}")
    print(table(sizes(here(root)), sizes(at(base, root)) if base else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
