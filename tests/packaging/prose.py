"""Measures of prose in the package, benchmarks, examples and tests, and the figures that a room may not exceed.

``python -m tests.packaging.prose`` prints the table as the code is; with the name of a room, its docstrings and
comments to mend. Comments count in the package only.
Benchmarks, examples and folders of tests count as rooms, such as ``tests/ops``.
"""

from __future__ import annotations

import ast
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "asyncflow"
TESTS: Final = ROOT / "tests"

PEOPLE: Final = "user|caller|client|reader|person|programmer|author|newcomer"
"""Nouns after which "who" has a referent."""
UNNAMED: Final = re.compile(
    r"""\b(?:
      (?:no|some|any|every)body | no\ one
    | whom?
    | those(?=[.,;:)]|\s+(?:who|that|which|whose|of|in|with|to|on|at|for|from|by|before|after|behind|above|below|not
          |it|they|is|are|was|were|has|have|had|go|come|wait|a|the|there|without|as|and|or|but|do|be|may|can|must)\b)
    | ones?\s+(?:that|who|which|whose)
    | what(?=\s+(?:is|are|was|were|has|have|had|it|they|there|can|may|must|could|does|do|did|comes?|came|goes|needs?
          |stands?|happens?|remains?|takes?|took|waits?)\b)
    | so\s+many | such\s+ones?
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words without a referent: the reader has to find the noun that the writer left out."""
_PRONOUNS: Final = """
    it its itself they them their theirs themselves this these those one ones he she his her him such what who whom
    nobody somebody anybody everybody someone anyone everyone something anything everything nothing
"""
PRONOUNS: Final = frozenset(_PRONOUNS.split())
"""Pronouns counted in first sentences. The relatives *that*, *which* and *whose* follow their noun: not counted."""
QUESTION: Final = re.compile(r"(?:Whether|How|What|Who|Whose|Which|When|Where|Why|If)\b|[^.!]*\?(?:\s|$)")
"""Openings of docstrings that are questions; `Return True if ...` says the same thing plainly."""
MOST_WORDS: Final = 25
LONG_FILE: Final = 300
LEAST_COMMENTS: Final = 0.03
"""Share of lines of a long file that carry a comment: fewer leave a reader without the reasons."""
UNNAMED_IN_NAMES: Final = re.compile(
    r"_(?:(?:no|some|any|every)body|who|whom|those|ones?_(?:that|who)|what_(?:is|are|was|has|have|it|they|comes?))(?=_|$)"
)
"""Words without a referent in the name of a test."""

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"`+[^`]*`+")
_ONE = re.compile(
    r"\bone (?!of|that|which|who|or|and|is|has|in|for|to|with|at|by|on|from|after|before|if|a|the)(?=\w)", re.IGNORECASE
)
"""A numeral before its noun, as in "one device", which is no pronoun."""
_COMMENT = re.compile(r"(?:^|\s)#\s+(?!type:|noqa|pragma|fmt:)(.*)")
"""A comment; directives to tools are none."""
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
_TABLE = re.compile(r"^ *(?:=+ +)+=+\n(?:.*\S.*\n)*|^ *\|.*\n", re.MULTILINE)
"""A table: its cells are no sentence."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures of one room's docstrings and comments."""

    unnamed: float
    """Words without a referent, in a thousand words."""
    pronouns: float
    """Pronouns, in a thousand words of first sentences."""
    long: int
    """Sentences of more than `MOST_WORDS` words."""
    questions: int
    """Docstrings that are questions."""
    comments: float = 0.0
    """Words without a referent, in a thousand words of comments."""


FIGURES: Final = {
    "modules": Figures(0.0, 38, 2, 0),
    "autodiff": Figures(0.0, 41, 0, 0),
    "checkpoint": Figures(0.0, 35, 0, 0),
    "cli": Figures(0.0, 28, 0, 0),
    "compiler": Figures(0.0, 37, 2, 0),
    "control": Figures(0.0, 38, 0, 0),
    "devices": Figures(0.0, 36, 2, 0),
    "graph": Figures(0.0, 42, 0, 0),
    "inputs": Figures(0.0, 33, 0, 0),
    "lift": Figures(0.0, 34, 0, 0),
    "nn": Figures(0.0, 23, 0, 0),
    "ops": Figures(0.0, 30, 1, 0),
    "optim": Figures(0.0, 37, 0, 0),
    "profiler": Figures(0.0, 21, 0, 0),
    "runtime": Figures(0.0, 42, 0, 0),
    "semantics": Figures(0.0, 39, 0, 0),
    "serving": Figures(0.0, 27, 1, 0),
    "state": Figures(0.0, 39, 0, 0),
    "streams": Figures(0.0, 29, 3, 0),
    "testing": Figures(0.0, 43, 0, 0),
    "vertex": Figures(0.0, 45, 0, 0),
    "benchmarks": Figures(0.2, 39, 10, 0),
    "examples": Figures(0.0, 43, 4, 0),
    "tests": Figures(0.0, 50, 3, 0),
    "tests/autodiff": Figures(0.0, 51, 0, 0),
    "tests/benchmarks": Figures(0.0, 50, 0, 0),
    "tests/checkpoint": Figures(0.0, 50, 0, 0),
    "tests/cli": Figures(0.0, 51, 0, 0),
    "tests/compiler": Figures(0.0, 54, 0, 0),
    "tests/conformance": Figures(0.0, 50, 0, 0),
    "tests/control": Figures(0.0, 50, 0, 0),
    "tests/devices": Figures(0.0, 53, 0, 0),
    "tests/distributed": Figures(0.0, 50, 0, 0),
    "tests/examples": Figures(0.0, 50, 0, 0),
    "tests/fake_cupy": Figures(0.0, 50, 0, 0),
    "tests/faults": Figures(0.0, 50, 0, 0),
    "tests/gpu": Figures(0.0, 50, 0, 0),
    "tests/graph": Figures(0.0, 51, 0, 0),
    "tests/inputs": Figures(0.0, 50, 0, 0),
    "tests/interop": Figures(0.0, 51, 0, 0),
    "tests/lift": Figures(0.0, 50, 0, 0),
    "tests/nn": Figures(0.0, 50, 0, 0),
    "tests/ops": Figures(0.0, 52, 0, 0),
    "tests/optim": Figures(0.0, 51, 0, 0),
    "tests/packaging": Figures(0.4, 50, 0, 0),
    "tests/peers": Figures(0.0, 50, 0, 0),
    "tests/profiler": Figures(0.0, 55, 0, 0),
    "tests/property": Figures(0.0, 50, 0, 0),
    "tests/runtime": Figures(0.0, 55, 0, 0),
    "tests/scaling": Figures(0.0, 75, 0, 0),
    "tests/semantics": Figures(0.0, 57, 0, 0),
    "tests/serving": Figures(0.0, 64, 0, 0),
    "tests/state": Figures(0.0, 58, 0, 0),
    "tests/streams": Figures(0.0, 79, 0, 0),
    "tests/testing": Figures(0.0, 76, 0, 0),
    "tests/typing": Figures(0.0, 50, 0, 0),
    "tests/vertex": Figures(0.0, 57, 0, 0),
}
"""Most that a room may have, with a little slack; a commit that mends a room lowers its line, towards `GOAL`."""
GOAL: Final = Figures(0.3, 50, 0, 0)
_UNCOMMENTED: Final = """
    __init__.py
    cli/main.py
    compiler/plan.py
    errors.py
    ops/arrays/creation.py
"""
UNCOMMENTED: Final = frozenset(_UNCOMMENTED.split())
"""Files of more than `LONG_FILE` lines with fewer comments than `LEAST_COMMENTS`: the list only shrinks."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A docstring of a module, class, function or attribute, a comment or a message, and its place."""

    path: Path
    line: int
    text: str

    @property
    def prose(self) -> str:
        """The text without examples; a name in backticks counts as one word."""
        return _plain(self.text)

    @property
    def first(self) -> str:
        """The first sentence."""
        return _SENTENCE_END.split(_CODE.sub("X", " ".join(self.text.strip().split("\n\n")[0].split())))[0]

    def unnamed(self) -> list[str]:
        """Return the words without a referent."""
        named = re.sub(rf"\b(?:{PEOPLE})s? who\b", "X", self.prose)
        return UNNAMED.findall(named)

    def long(self) -> list[str]:
        """Return the sentences of more than `MOST_WORDS` words."""
        sentences = _SENTENCE_END.split(_plain(_TABLE.sub("", self.text + "\n")))
        return [each for each in sentences if len(_WORD.findall(each)) > MOST_WORDS]

    def is_question(self) -> bool:
        """Return True if the docstring asks rather than says."""
        return QUESTION.match(self.text) is not None


def _plain(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith((">>>", "..."))]
    return " ".join(_CODE.sub("X", "\n".join(lines)).split())


def docstrings_in(path: Path) -> Iterator[Passage]:
    """Yield the docstrings of a file, with strings below attributes."""
    # Statements alone: expressions are most of a file's nodes, and hold no docstring.
    blocks: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    for block in blocks:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            for statement in getattr(block, field, ()):
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield Passage(path, statement.lineno, value.value)
                elif hasattr(statement, "body"):
                    blocks.append(statement)


def comments_in(path: Path) -> Iterator[Passage]:
    """Yield the comments of a file; consecutive lines of comment are one comment."""
    joined: list[str] = []
    first, column = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type != tokenize.COMMENT or (found := _COMMENT.match(token.string)) is None:
            continue
        line, indent = token.start
        is_alone = not token.line[:indent].strip()
        if joined and not (is_alone and (line, indent) == (first + len(joined), column)):
            yield Passage(path, first, " ".join(joined))
            joined = []
        if not joined:
            first, column = line, indent if is_alone else -1
        joined.append(found[1])
    if joined:
        yield Passage(path, first, " ".join(joined))


def messages_in(path: Path) -> Iterator[Passage]:
    """Yield the strings of three words or more that are no docstrings: messages, and reasons for them."""
    tree = ast.parse(path.read_text("utf-8"))
    taken: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            taken.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            taken.update(node.values)
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if node in taken or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
        if len(text.split()) > 2:
            yield Passage(path, node.lineno, text)


def rooms() -> list[str]:
    """Return the names of rooms and folders of tests; top modules, benchmarks and examples are rooms as well."""
    package = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    tests = sorted({f"tests/{path.parent.name}" for path in TESTS.glob("*/*.py")})
    return ["modules", *package, "benchmarks", "examples", "tests", *tests]


def _files_of(room: str) -> list[Path]:
    whole = {"modules": PACKAGE.glob("*.py"), "tests": TESTS.glob("*.py")}
    folder = ROOT / room if _is_outside(room) else PACKAGE / room
    return sorted(whole.get(room) or folder.rglob("*.py"))


def _is_outside(room: str) -> bool:
    return room.startswith(("benchmarks", "examples", "tests"))


@cache
def docstrings_of(room: str) -> list[Passage]:
    """Return the docstrings of a room."""
    return [each for path in _files_of(room) for each in docstrings_in(path)]


@cache
def comments_of(room: str) -> list[Passage]:
    """Return the comments of a room of the package; none of other rooms."""
    return [] if _is_outside(room) else [each for path in _files_of(room) for each in comments_in(path)]


@cache
def messages_of(room: str) -> list[Passage]:
    """Return the messages of a room of the package; none of other rooms."""
    return [] if _is_outside(room) else [each for path in _files_of(room) for each in messages_in(path)]


def _unnamed_in_thousand(passages: list[Passage]) -> float:
    words = sum(len(_WORD.findall(each.prose)) for each in passages)
    return round(1000 * sum(len(each.unnamed()) for each in passages) / max(words, 1), 1)


def figures_of(docstrings: list[Passage], comments: list[Passage]) -> Figures:
    """Measure docstrings and comments."""
    firsts = [word.lower() for each in docstrings for word in _WORD.findall(_ONE.sub("1 ", each.first))]
    return Figures(
        _unnamed_in_thousand(docstrings),
        round(1000 * sum(word in PRONOUNS for word in firsts) / len(firsts), 1),
        sum(len(each.long()) for each in docstrings),
        sum(each.is_question() for each in docstrings),
        _unnamed_in_thousand(comments),
    )


@cache
def figures_of_room(room: str) -> Figures:
    """Measure the docstrings and comments of a room."""
    return figures_of(docstrings_of(room), comments_of(room))


def comment_share(path: Path) -> float:
    """Return the share of a file's lines with a comment; directives to tools do not count."""
    lines = path.read_text("utf-8").splitlines()
    return sum(_COMMENT.search(line) is not None for line in lines) / len(lines)


def long_files() -> list[Path]:
    """Return the files of the package of more than `LONG_FILE` lines."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.read_text("utf-8").count("\n") > LONG_FILE]


def unnamed_tests() -> list[str]:
    """Return the names of tests with words without a referent."""
    names = [
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    ]
    return [name for name in names if UNNAMED_IN_NAMES.search(name)]


def main(rooms_asked: list[str]) -> None:
    """Print the table, or the docstrings and comments to mend of rooms."""
    for room in rooms():
        found = figures_of_room(room)
        if not rooms_asked:
            # Few docstrings stand in some folders of tests: one pronoun more must not exceed their figure.
            pronouns = max(math.ceil(1.03 * found.pronouns), GOAL.pronouns if room.startswith("tests") else 0)
            rounded = f"{1.03 * found.unnamed:.1f}, {pronouns}, {found.long}, {found.questions}"
            rounded += f", {1.03 * found.comments:.1f}" if found.comments else ""
            print(f'    "{room}": Figures({rounded}),')
        if room in rooms_asked:
            docstrings = [x for x in docstrings_of(room) if x.unnamed() or x.long() or x.is_question()]
            for each in docstrings + [x for x in comments_of(room) if x.unnamed() or x.long()]:
                print(f"{each.path.relative_to(ROOT)}:{each.line}: {' '.join(each.text.split())}")


if __name__ == "__main__":
    main(sys.argv[1:])
