"""`make size` counts code and nothing else, and compares with a base where there is one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import asyncflow as af
from benchmarks import code_size
from benchmarks.code_size import CAPS, TOTAL, caps_to_lower, code_lines, faults, main, room_of, sizes, table
from tests.patience import PATIENCE_S

SOURCE = '''"""A module.

Of three lines."""

import os  # a comment beside code

# A comment.


class Shape:
    """A class."""

    text = """two
lines"""

    def area(self) -> int:
        """A method."""
        "no docstring"
        return (
            1
        )


def documented() -> None:
    """Nothing else."""
'''


def test_comments_docstrings_and_blank_lines_are_no_code() -> None:
    # import, class, text of two lines, def, the lone string, return of three lines, def
    assert code_lines(SOURCE) == 1 + 1 + 2 + 1 + 1 + 3 + 1


ATTRIBUTES = '''
LIMIT: int = 3
"""Of a module,
in two lines."""
"no docstring, as it follows one"


class Shape:
    rank = 0
    """Of a class."""
    rank == 0
    "no docstring, as it follows no assignment"

    def area(self) -> int:
        side = 1
        "no docstring, as locals have none"
        return side
'''


def test_docstrings_of_attributes_are_no_code() -> None:
    # attribute, lone string; class, attribute, comparison, lone string; def with three lines
    assert code_lines(ATTRIBUTES) == 2 + 4 + 4


def test_rooms_add_up() -> None:
    assert room_of("asyncflow/graph/deep/er.py") == "asyncflow/graph/"
    assert room_of("asyncflow/errors.py") == "asyncflow/"
    modules = {"asyncflow/a.py": "x = 1\n", "asyncflow/b/c.py": "x = 1\ny = 2\n", "asyncflow/b/d/e.py": "x = 1\n"}
    assert sizes(modules) == {"asyncflow/": 1, "asyncflow/b/": 3}


def test_the_table_tells_rooms_that_grew_shrank_came_and_went() -> None:
    now, before = {"a/": 1000, "b/": 7, "new/": 2}, {"a/": 980, "b/": 7, "old/": 5}
    assert table(now, before).splitlines() == [
        "a/                         1,000     +20",
        "b/                             7       =",
        "new/                           2      +2",
        "old/                           0      -5",
        f"total                      1,009     +17  of {TOTAL:,}",
    ]
    assert table({"asyncflow/graph/": 5}, None).splitlines()[0].split() == [
        *("asyncflow/graph/", "5", "of", f"{CAPS['asyncflow/graph/']:,}")
    ]


def test_rooms_above_their_caps_and_without_one_are_named() -> None:
    room, cap = "asyncflow/graph/", CAPS["asyncflow/graph/"]
    assert faults({room: cap}) == []
    assert faults({room: cap + 1}) == [f"{room} is 1 lines above its cap of {cap:,}"]
    assert faults({"asyncflow/new/": 3}) == ["asyncflow/new/ has no cap: give it one"]
    assert faults(CAPS) == [f"total is {sum(CAPS.values()) - TOTAL:,} lines above its cap of {TOTAL:,}"]


def test_caps_far_above_their_rooms_are_to_be_lowered() -> None:
    room, cap = "asyncflow/ops/", CAPS["asyncflow/ops/"]
    assert caps_to_lower({room: cap - int(0.03 * cap)}) == []
    assert caps_to_lower({room: cap - int(0.04 * cap)}) == [
        f"{room} is {int(0.04 * cap):,} lines below its cap of {cap:,}: lower the cap"
    ]
    small = min(CAPS, key=lambda each: CAPS[each])
    assert caps_to_lower({small: CAPS[small] - 40}) == []
    assert len(caps_to_lower({small: CAPS[small] - 41})) == 1


def test_every_room_has_a_cap_and_every_cap_a_room() -> None:
    assert set(CAPS) == {room_of(path) for path in code_size.here()}


def git(folder: Path, *words: str) -> None:
    settings = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "init.defaultBranch=main")
    options = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)


def write(folder: Path, lines: int) -> None:
    module = folder / "asyncflow" / "graph" / "op.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text("x = 1\n" * lines, encoding="utf-8")


def commit(folder: Path, lines: int) -> None:
    write(folder, lines)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", f"{lines} lines")


@pytest.fixture(autouse=True)
def no_git_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a hook git's variables name the checkout that it runs for, and these tests must not write there.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    commit(tmp_path, 3)
    return tmp_path


def test_without_main_or_tags_sizes_stand_alone(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(clone, "branch", "-m", "detached-build")
    assert main([], clone) == 0
    out = capsys.readouterr().out
    assert out.startswith("lines of code; nothing to compare with\n")
    assert "asyncflow/graph/               3          of" in out


def test_outside_git_sizes_stand_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 4)
    assert main([], tmp_path) == 0
    assert "nothing to compare with" in capsys.readouterr().out


def test_a_room_above_its_cap_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, CAPS["asyncflow/graph/"] + 2)
    assert main([], tmp_path) == 1
    assert "asyncflow/graph/ is 2 lines above its cap" in capsys.readouterr().err


def test_a_branch_is_compared_with_where_it_left_main(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(clone, "checkout", "-qb", "work")
    commit(clone, 5)
    write(clone, 9)  # not committed, and counted
    assert main([], clone) == 0
    assert "asyncflow/graph/               9      +6" in capsys.readouterr().out


def test_main_is_compared_with_the_last_tag_and_a_base_can_be_named(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(clone, "tag", "v1")
    commit(clone, 5)
    commit(clone, 4)
    assert main([], clone) == 0
    assert "asyncflow/graph/               4      +1" in capsys.readouterr().out
    assert main(["HEAD~1"], clone) == 0
    assert "asyncflow/graph/               4      -1" in capsys.readouterr().out


def test_a_base_that_is_not_there_is_told(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gone"], clone) == 2
    assert capsys.readouterr().err == "BASE=gone is no commit of this clone; fetch it, or name another\n"


def test_the_package_is_counted_whole() -> None:
    counted = code_size.here()
    assert "asyncflow/__init__.py" in counted
    assert "asyncflow/runtime/scheduler/scheduler.py" in counted


def test_the_rules_can_be_read_beside_the_paper() -> None:
    """States, rules and the search for outcomes count, but not the search for races."""
    modules = [
        Path(af.__file__).parent / "semantics" / f"{name}.py" for name in ("state", "program", "rules", "explore")
    ]
    assert sum(code_lines(module.read_text()) for module in modules) < 600
