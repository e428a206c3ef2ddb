"""The tokens of a graph's text, read one by one, and errors that point at them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from asyncflow.errors import GraphError

T = TypeVar("T")
X = TypeVar("X")
MAX_DEPTH = 128
"""The most levels of branches and loops in one another in a text, and of lists in lists: bounds the parser's stack."""
NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]*[A-Za-z0-9_])?"
WORD = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*"
# Unrolled, so that a string of megabytes (base64 data) costs no stack in the matcher.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"'
DEFINITION = rf"%(?:{NAME}|{_STRING})(?>[ \t\r\n]+|\#[^\n]*)*+="
"""Pattern of a node's start: matches as often as a text has nodes, or more often, if comments and strings look like
one.
"""
_TOKEN = re.compile(
    rf"""(?:[ \t\r\n]+|\#[^\n]*)*(?:
     (?P<tensor>%(?:{NAME}|{_STRING})(?::[0-9]{{1,6}})?)
    |(?P<resource>@(?:{NAME}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<number>-?(?:0x[0-9a-f]+|inf(?![A-Za-z0-9_])|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?))
    |(?P<word>{WORD})
    |(?P<mark>\.\.\.|[()\[\]{{}},:=?])
    |(?P<end>\Z)
    |(?P<unknown>.))""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u\{([0-9a-f]{1,6})\}|(.))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\"}


class Tokens:
    """The tokens of a text. `kind` (a group of the pattern), `word`, `offset` and `line` describe the next one."""

    def __init__(self, text: str, file: str = "") -> None:
        self.text = text
        self.file = file
        self.kind, self.word, self.offset, self.line = "", "", 0, 1
        self.depth = 0
        self._matches = _TOKEN.finditer(text)
        self.take()

    def take(self, kind: str = "", meaning: str = "") -> str:
        """Takes the next token. If a kind is asked for, it has to be of that; `meaning` says so to the user."""
        self.want(kind in ("", self.kind), meaning)
        word, start = self.word, self.offset
        if self.kind != "end":
            match = next(self._matches)
            self.kind = str(match.lastgroup)
            self.word, self.offset = match[self.kind], match.start(self.kind)
            self.line += self.text.count("\n", start, self.offset)
        self.want(self.kind != "unknown", "a name, value or mark")
        return word

    def skip(self, word: str) -> bool:
        """Take the next token if it is this mark or word; return True if it was."""
        return self.word == word and self.take() == word

    def expect(self, *words: str) -> None:
        """Takes the next tokens, which have to be these marks and words."""
        for word in words:
            self.want(self.skip(word), repr(word))

    def name(self, kind: str, meaning: str) -> str:
        """Take a string in quotes, or a name behind its sign, and return its value."""
        start, word = self.offset, self.take(kind, meaning)
        return self.unquote(word.lstrip("@"), start)

    def number(self, meaning: str) -> int | float:
        """Takes a number."""
        start, word = self.offset, self.take("number", meaning)
        if "0x" in word:
            return int(word, 16)
        if not word.lstrip("-").isdigit():
            return float(word)
        self.check(len(word) <= 1000, "an int of more than 1000 digits is to be written as 0x...", start)
        return int(word)

    def until(self, end: str, read: Callable[[], T]) -> tuple[list[T], bool]:
        """The items that `read` reads, with commas between, up to the mark `end`; whether a comma followed the last."""
        found: list[T] = []
        comma = True
        while comma and self.word != end:
            found.append(read())
            comma = self.skip(",")
        self.expect(end)
        return found, comma

    def deeper(self, what: str) -> None:
        """Count one more level of nesting, checked against the limit; `depth` goes down again at its end."""
        self.depth += 1
        self.check(self.depth <= MAX_DEPTH, f"{what} are nested deeper than {MAX_DEPTH} levels", self.offset)

    def unquote(self, word: str, offset: int) -> str:
        """The meaning of a quoted string that stands at the offset, or a plain name itself."""
        if not word.startswith('"'):
            return word
        try:
            return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _LETTERS[found[2]], word[1:-1])
        except (KeyError, ValueError):
            raise self.expected(r"an escape: \n, \r, \t, \", \\ or \u{hex}", offset, word) from None

    def located(self, offset: int, make: Callable[[X], T], argument: X) -> T:
        """The result of `make` for the argument; where it refuses, the error points at the offset."""
        try:
            return make(argument)
        except GraphError as error:
            raise self.fault(error.reason, offset) from error

    def check(self, holds: bool, message: str, offset: int) -> None:
        """Refuses the text, with an error that points at the offset, unless this holds."""
        if not holds:
            raise self.fault(message, offset)

    def want(self, holds: bool, what: str) -> None:
        """Refuse the next token, as another one is expected, unless `holds`."""
        if not holds:
            raise self.expected(what)

    def expected(self, what: str, offset: int | None = None, word: str = "") -> GraphError:
        """Return the error for an unexpected word, by default the next one."""
        word, offset = word or self.word, self.offset if offset is None else offset
        found = repr(word if len(word) <= 40 else f"{word[:37]}...") if word else "the end of the text"
        return self.fault(f"expected {what}, found {found}", offset)

    def fault(self, message: str, offset: int) -> GraphError:
        """An error that shows the line and points at the offset."""
        number, start = self.text.count("\n", 0, offset) + 1, self.text.rfind("\n", 0, offset) + 1
        column, line = offset - start, self.text[start:].partition("\n")[0]
        # A line with data may be megabytes long: show only the part around the column.
        cut, margin = max(0, column - 80), f"  {number} | "
        shown = f"{margin}{line[cut : cut + 160]}\n{' ' * (len(margin) + column - cut)}^"
        place = f"{self.file}:{number}" if self.file else f"text line {number}"
        return GraphError(f"{place}, column {column + 1}: {message}\n{shown}")
