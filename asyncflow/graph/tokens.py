"""The words of a graph's text form: quoting of names and strings, and the tokens a parser reads one by one."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncflow.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 128
"""How deep branches and loops may stand in one another in a text, and lists in lists: bounds the parser's stack."""

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]*[A-Za-z0-9_])?"
# Unrolled, so that a string of megabytes (base64 data) costs no stack in the matcher.
_STRING = r'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"'
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<tensor>%(?:{_NAME}|{_STRING})(?::[0-9]{{1,6}})?)
    |(?P<resource>@(?:{_NAME}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<number>-?(?:0x[0-9a-f]+|inf(?![A-Za-z0-9_])|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?))
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    |(?P<mark>\.\.\.|[()\[\]{{}},:=?])""",
    re.VERBOSE,
)
_PLAIN_NAME = re.compile(_NAME)
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}
_ESCAPE = re.compile(r'\\(?:u\{(?P<code>[0-9a-f]{1,6})\}|(?P<letter>[nrt"\\]))')
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\"}


def quote(text: str) -> str:
    """`text` in double quotes, on one line, with everything unprintable escaped."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'


def quote_name(name: str) -> str:
    """A node's or resource's name, quoted if it has to be."""
    return name if _PLAIN_NAME.fullmatch(name) else quote(name)


def quote_word(word: str) -> str:
    """An op's name, quoted if it has to be."""
    return word if _PLAIN_WORD.fullmatch(word) else quote(word)


@dataclass(frozen=True, slots=True)
class Token:
    """A word of the text: its kind (a group of the tokenizer's pattern, or ``end``), itself, and where it starts."""

    kind: str
    text: str
    offset: int

    def __str__(self) -> str:
        if self.kind == "end":
            return "the end of the text"
        return repr(self.text if len(self.text) <= 40 else f"{self.text[:37]}...")


class Tokens:
    """The tokens of a text, read one by one; `next` is the one to come."""

    __slots__ = ("_line_starts", "_stream", "next", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._line_starts = [0, *(match.end() for match in re.finditer(r"\n", text))]
        self._stream = self._scan()
        self.next = next(self._stream)

    def _scan(self) -> Iterator[Token]:
        offset = 0
        while offset < len(self.text):
            match = _TOKEN.match(self.text, offset)
            if match is None:
                raise self.error("a name, value or mark", offset, repr(self.text[offset]))
            if match.lastgroup != "space":
                yield Token(str(match.lastgroup), match.group(), offset)
            offset = match.end()
        yield Token("end", "", offset)

    def take(self) -> Token:
        """The next token, which is then behind."""
        token = self.next
        if token.kind != "end":
            self.next = next(self._stream)
        return token

    def at(self, text: str) -> bool:
        """Whether the next token is this mark or word."""
        return self.next.text == text and self.next.kind != "string"

    def skip(self, text: str) -> bool:
        """Takes the next token if it is this mark or word; tells whether it was."""
        found = self.at(text)
        if found:
            self.take()
        return found

    def expect(self, text: str) -> Token:
        """Takes the next token, which has to be this mark or word."""
        if not self.at(text):
            raise self.unexpected(repr(text))
        return self.take()

    def expect_kind(self, kind: str, meaning: str) -> Token:
        """Takes the next token, which has to be of this kind; `meaning` says so to the user."""
        if self.next.kind != kind:
            raise self.unexpected(meaning)
        return self.take()

    def unquote(self, text: str, offset: int) -> str:
        """What a quoted string stands for, or a plain name itself."""
        if not text.startswith('"'):
            return text
        inner = text[1:-1]
        if "\\" not in inner:
            return inner
        parts: list[str] = []
        position = 0
        while position < len(inner):
            stop = inner.find("\\", position)
            parts.append(inner[position:] if stop < 0 else inner[position:stop])
            if stop < 0:
                break
            match = _ESCAPE.match(inner, stop)
            code = int(match["code"], 16) if match and match["code"] else 0
            if match is None or code > 0x10FFFF:
                expected = r"an escape: \n, \r, \t, \", \\ or \u{hex}"
                raise self.error(expected, offset + 1 + stop, repr(inner[stop : stop + 10]))
            parts.append(chr(code) if match["code"] else _LETTERS[match["letter"]])
            position = match.end()
        return "".join(parts)

    def line(self, offset: int) -> int:
        """Number of the line, from 1, that the offset lies in."""
        return bisect_right(self._line_starts, offset)

    def unexpected(self, expected: str) -> GraphError:
        """The error for a next token that is not what was expected."""
        return self.error(expected, self.next.offset, str(self.next))

    def error(self, expected: str, offset: int, found: str) -> GraphError:
        """The error for something found that is not what was expected."""
        return self.fault(f"expected {expected}, found {found}", offset)

    def fault(self, message: str, offset: int) -> GraphError:
        """An error that shows the line and points at the offset."""
        number = self.line(offset)
        start = self._line_starts[number - 1]
        column = offset - start
        end = self.text.find("\n", start)
        line = self.text[start : len(self.text) if end < 0 else end]
        # A line with data in it may be megabytes long; what matters stands around the column.
        cut = max(0, column - 80)
        shown = line[cut : cut + 160]
        margin = f"  {number} | "
        pointer = " " * (len(margin) + column - cut) + "^"
        return GraphError(f"text line {number}, column {column + 1}: {message}\n{margin}{shown}\n{pointer}")
