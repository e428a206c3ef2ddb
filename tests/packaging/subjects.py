"""Subjects of commits: imperative, and at most 72 characters; ``make subjects``, and a hook for each commit message.

With the file of a message as argument, that message is judged; without one, the new commits are. New are the commits
since the branch left main, or on main since the last release. Commits from before this rule are not judged.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.code_size import base_of

ROOT: Final = Path(__file__).resolve().parents[2]
RULE: Final = "tests/packaging/subjects.py"
MOST: Final = 72
"""Characters: a log of subjects then fits a terminal, beside the hashes."""
MOST_COMMITS: Final = 1000
LIMIT_S: Final = 120.0
"""For a git that hangs; it answers in milliseconds."""
NOT_IMPERATIVE: Final = re.compile(r"[a-z]*(?:[a-rt-z]s|ed|ing)", re.IGNORECASE)
"""The first word of "Fixes it", "Fixed it", "Fixing it" and of "Rows of one call"."""
_IMPERATIVE: Final = "bring embed exceed feed focus need ping proceed seed shed speed string succeed"
IMPERATIVE: Final = frozenset(_IMPERATIVE.split())
"""Verbs with such an end."""
BY_GIT: Final = re.compile(r'(?:Merge|Revert "|Reapply ")')
"""Subjects that git writes."""


def fault(subject: str) -> str | None:
    """Return the fault of a subject, or None."""
    if BY_GIT.match(subject):
        return None
    if len(subject) > MOST:
        return f"has {len(subject)} characters, and may have {MOST}"
    first = re.match(r"\w+", subject)
    if first is None or not first[0][0].isupper():
        return "begins with no capital letter"
    if NOT_IMPERATIVE.fullmatch(first[0]) and first[0].lower() not in IMPERATIVE:
        return f"is not imperative: {first[0]!r}"
    return "ends with a full stop" if subject.endswith(".") else None


def subject_of(message: str) -> str:
    """Return the subject of a message as an editor leaves it, with comments; without git's ``fixup!``."""
    lines = (line.strip() for line in message.splitlines() if not line.startswith("#"))
    return re.sub(r"^(?:(?:fixup|squash|amend)! )+", "", next(filter(None, lines), ""))


def new_subjects(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return hash and subject of each new commit; none where there is no git, or no commit."""
    rule, base = _commit_of_the_rule(root), base_of(None, root)
    if rule is None:
        return []
    old = [rule] if base is None else [rule, base]
    log = _git(root, "log", f"--max-count={MOST_COMMITS}", "--no-merges", "--format=%h %s", "HEAD", "--not", *old)
    return [(name, subject) for name, _, subject in (line.partition(" ") for line in log.splitlines())]


def _commit_of_the_rule(root: Path) -> str | None:
    """Return the commit that began to judge subjects; in a shallow clone that may be its first commit."""
    return _git(root, "log", "--diff-filter=A", "--format=%H", "--", RULE).strip().rpartition("\n")[2] or None


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except OSError:  # no git on this machine
        return ""
    return done.stdout if done.returncode == 0 else ""


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Print the faults of the message in a file, or of the new commits; the exit code is 1 if there are any."""
    files = sys.argv[1:] if arguments is None else arguments
    if files:
        judged = [(file, subject_of(Path(file).read_text(encoding="utf-8"))) for file in files]
    else:
        judged = new_subjects(root)
        print(f"{len(judged)} new commits")
    faults = [f"{name}: the subject {found}: {subject}" for name, subject in judged if (found := fault(subject))]
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
