"""Writes the table of passes in ``docs/design/README.md`` from the compiler's list of them: ``make reference``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from asyncflow.compiler.passes import Pass
from asyncflow.compiler.pipeline import PASSES

PAGE: Final = Path(__file__).with_name("design") / "README.md"
BEGIN, END = "<!-- passes: make reference -->\n", "<!-- end of passes -->\n"


def table() -> str:
    """A line a pass: its name, what the head of its module says of it, and whether plans are right without it."""
    lines = ["| pass | it | may be left out |", "|---|---|---|", *map(_line, PASSES)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page's text, with the table as it is now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def head(each: Pass) -> str:
    """The first sentence of the module that a pass is in."""
    return (sys.modules[each.run.__module__].__doc__ or "").partition("\n")[0]


def _line(each: Pass) -> str:
    module = each.run.__module__.removeprefix("asyncflow.").replace(".", "/")
    does = head(each).removeprefix("Pass: ").removesuffix(".")
    may = f"no: {each.needed}" if each.needed else "yes"
    return f"| [`{each.name}`](../../asyncflow/{module}.py) | {does} | {may} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
