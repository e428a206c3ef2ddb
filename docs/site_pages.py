"""Additions of the site to the pages in ``docs``: the reference from docstrings, and pages from elsewhere in the tree.

It is a Sphinx extension, which writes ``docs/generated`` before pages are read.
"""

from __future__ import annotations

import inspect
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from docs.write_reference import constants, documentation, sections

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
GENERATED: Final = DOCS / "generated"
INVENTORIES: Final = {
    "python": ("https://docs.python.org/3", str(GENERATED / "python.inv")),
    "numpy": ("https://numpy.org/doc/stable", str(GENERATED / "numpy.inv")),
}
CHILDREN: Final = {
    "reference": "/generated/reference/*",
    "design/README": "/design/*",
    "generated/contributing": "/generated/rooms/*",
}
"""Pages with pages below them, all that fit a pattern. A directive in the file would stand on GitHub as code."""
_ENTRY = re.compile(r"( *- )`(\.?\w[\w.]*)([^`]*)`(: .*)")
_INVENTORY_HEAD = """\
# Sphinx inventory version 2
# Project: {}
# Version:
# The remainder of this file is compressed using zlib.
"""
_LINK = re.compile(r"\[([^\]\[]*)\]\(((?:\.\./|[\w.-]+/)*[\w.-]*)(#[\w-]*)?\)")
RAISES: Final = "Raises in the run:"
_RAISES = re.compile(r"Raises \(in the run, as the cause of a KernelError\):$")
_CODE_SPAN = re.compile(r"(`+)[^`]+\1\w?")


def pages_elsewhere() -> dict[Path, str]:
    """Return the pages of the tree outside of ``docs``, and their names on the site."""
    found = {ROOT / f"{name}.md": f"generated/{name.lower()}" for name in ("CHANGELOG", "CONTRIBUTING")}
    for page in sorted((ROOT / "asyncflow").rglob("README.md")):
        room = "_".join(page.parent.relative_to(ROOT / "asyncflow").parts)
        found[page] = f"generated/rooms/{room}"
    return found


def with_links(text: str, folder: Path) -> str:
    """Return the text for the site: a link out of it goes to the page that stands for it, or is plain text."""
    elsewhere = pages_elsewhere()

    def replaced(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = Path(os.path.normpath(folder / target))
        if not target or (path.is_relative_to(DOCS) and (folder.is_relative_to(DOCS) or "://" in target)):
            return link[0]
        if path.is_relative_to(DOCS) and path.is_file():
            return f"[{words}](/{path.relative_to(DOCS)}{anchor})"
        return f"[{words}](/{elsewhere[path]}.md{anchor})" if path in elsewhere else words

    return _LINK.sub(replaced, text)


def reference_pages() -> Iterator[tuple[str, str]]:
    """Names and texts of the pages of the reference, one for each heading of ``docs/reference.md``."""
    for title, names in sections().items():
        heading = title.replace("`", "``")
        entries = [_entry(name.replace("af.", "asyncflow.", 1), value) for name, value in names]
        yield slug(title), "\n\n".join([f"{heading}\n{'=' * len(heading)}", *entries]) + "\n"
    entries = [f".. py:data:: {name.replace('af.', 'asyncflow.', 1)}" for name in constants()]
    yield slug("Dtypes and constants"), "\n\n".join(["Dtypes and constants\n====================", *entries]) + "\n"


def slug(title: str) -> str:
    """The file's name of a heading."""
    return re.sub(r"\W+", "_", title.partition(":")[0].lower()).strip("_")


def _entry(name: str, value: object) -> str:
    if not isinstance(value, type):
        return f".. auto{'function' if inspect.isroutine(value) else 'data'}:: {name}"
    if issubclass(value, Exception):
        return f".. autoexception:: {name}\n   :show-inheritance:"
    return f".. autoclass:: {name}\n   :members:\n   :inherited-members: object"


def _write(path: Path, content: bytes) -> None:
    """Leave an equal file alone: its time tells Sphinx which pages to read again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def write_inventories() -> None:
    """Pack ``docs/inventories/*.txt`` as intersphinx reads them."""
    for source in sorted((DOCS / "inventories").glob("*.txt")):
        head = _INVENTORY_HEAD.format(source.stem).encode()
        _write(GENERATED / f"{source.stem}.inv", head + zlib.compress(source.read_bytes()))


def write_pages(_: object = None) -> None:
    """Write the pages of ``docs/generated``."""
    write_inventories()
    for name, text in reference_pages():
        _write(GENERATED / "reference" / f"{name}.rst", text.encode())
    for path, name in pages_elsewhere().items():
        _write(DOCS / f"{name}.md", with_links(path.read_text("utf-8"), path.parent).encode())


def with_entries(text: str) -> str:
    """Return ``docs/reference.md`` with links from each line to its entry in what autodoc writes."""
    lines, owner = list[str](), ""
    for line in text.split("\n"):
        if found := _ENTRY.match(line):
            dash, name, rest, summary = found.groups()
            method = name.startswith(".")
            target = owner + name if method else f"asyncflow.{name.partition('.')[2]}"
            owner = owner if method else target
            line = f"{dash}{{py:obj}}`{name}{rest} <{target}>`{summary}"
        lines.append(line)
    return "\n".join(lines)


def skip(_: object, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave out what Python itself gives a named tuple."""
    is_tuples = getattr(value, "__objclass__", None) is tuple or getattr(value, "__qualname__", "").startswith("tuple.")
    return True if is_tuples or (inspect.getdoc(value) or "").startswith("Alias for field number") else None


def _read(app: Any, docname: str, source: list[str]) -> None:
    """Mend the links of a page; entries of the reference lead to what autodoc writes."""
    path = app.env.doc2path(docname)
    if docname.startswith("generated/gallery/"):
        # Programs print where they have written a file.
        source[0] = source[0].replace(f"{(GENERATED / 'examples').as_uri()}/", "")
    if docname in CHILDREN:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{CHILDREN[docname]}\n```\n"
    if not str(path).endswith(".md") or docname.startswith("generated/"):
        return
    source[0] = with_links(source[0], Path(path).parent)
    if docname == "reference":
        source[0] = with_entries(source[0])


def docstring(app: Any, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Mend what reStructuredText and napoleon read otherwise than our readers do."""
    # Code may end in the middle of a word, as in ```spec`s``.
    lines[:] = _CODE_SPAN.sub(lambda code: re.sub(r"`(\w)$", r"`\\ \1", code[0]), "\n".join(lines)).split("\n")
    # napoleon knows headings without brackets.
    lines[:] = [RAISES if _RAISES.match(line) else line for line in lines]
    if what == "data":
        lines[:] = documentation(name, value).split("\n")
    if what == "attribute":
        # In a first line, napoleon takes what is before a colon for a type.
        lines.insert(0, "")


def name_attributes(app: Any) -> None:
    """Give lists of attributes their name: Sphinx calls them variables, which here are resources."""
    for field in app.registry.domains["py"].directives["class"].doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"


def setup(app: Any) -> dict[str, object]:
    """Connect to Sphinx."""
    name_attributes(app)
    app.connect("builder-inited", write_pages, priority=100)
    app.connect("source-read", _read)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", docstring, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
