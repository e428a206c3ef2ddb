"""The documentation site leads to every page, its reference has every public name, and its gallery every example."""

from __future__ import annotations

import ast
import re
import sys
import zlib
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs import site_gallery, site_pages
from docs.write_reference import PAGE, constants, sections
from tests.packaging.pages import DOCS, ROOT

TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def entries() -> list[str]:
    """Return the entries of toctrees of the first page, and of pages with pages below them; some are patterns."""
    trees = TOCTREE.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    return [*lines, *(pattern.removeprefix("/") for pattern in site_pages.CHILDREN.values())]


def test_every_page_is_in_a_toctree() -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in DOCS]
    pages += site_pages.pages_elsewhere().values()
    pages += [f"generated/reference/{name}" for name, _ in site_pages.reference_pages()]
    assert [page for page in pages if page != "index" and not any(fnmatch(page, each) for each in entries())] == []


def test_every_entry_of_a_toctree_is_a_page() -> None:
    made = {*site_pages.pages_elsewhere().values(), "generated/gallery/index"}
    plain = [each for each in entries() if "*" not in each]
    assert [each for each in plain if each not in made and not (ROOT / "docs" / f"{each}.md").exists()] == []
    assert set(site_pages.CHILDREN) <= set(plain)


def test_the_reference_has_an_entry_for_every_public_name() -> None:
    pages = dict(site_pages.reference_pages())
    assert len(pages) == len(sections()) + 1, "two headings have one file"
    names = [name for names in sections().values() for name, _ in names] + constants()
    assert len(names) > 400
    written = set(re.findall(r":: ([\w.]+)$", "".join(pages.values()), re.MULTILINE))
    assert [name for name in names if name.replace("af.", "asyncflow.", 1) not in written] == []


def test_lines_of_the_reference_lead_to_entries() -> None:
    text = site_pages.with_entries(PAGE.read_text(encoding="utf-8"))
    for line in (
        r"- {py:obj}`af\.matmul\(.*\) <asyncflow\.matmul>`: ",
        r"  - {py:obj}`\.run\(.*\) <asyncflow\.Session\.run>`: ",
        r"- {py:obj}`asyncflow\.serving\.livez\(.*\) <asyncflow\.serving\.livez>`: ",
    ):
        assert re.search(f"^{line}", text, re.MULTILINE), line
    assert re.findall(r"^ *- `.*", text, re.MULTILINE) == []


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](state.md#b)", "[a](state.md#b)"),
        ("[a](#b)", "[a](#b)"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
        ("![a](../images/overlap.png)", "![a](../images/overlap.png)"),
        ("[a](../../CONTRIBUTING.md#the-rooms)", "[a](/generated/contributing.md#the-rooms)"),
        ("[a](../../asyncflow/devices/README.md)", "[a](/generated/rooms/devices.md)"),
        ("[`fold`](../../asyncflow/compiler/optimize/fold.py)", "`fold`"),
    ],
)
def test_links_out_of_the_site(link: str, on_the_site: str) -> None:
    assert site_pages.with_links(link, ROOT / "docs" / "design") == on_the_site


def test_pages_from_elsewhere_lead_into_the_site() -> None:
    text = "[the tests](docs/design/tests.md), [releasing](RELEASING.md)"
    assert site_pages.with_links(text, ROOT) == "[the tests](/design/tests.md), releasing"


def test_docstrings_are_mended() -> None:
    lines = ["Takes `spec`s, and a `name` or `", "other`.", "Raises (in the run, as the cause of a KernelError):"]
    site_pages.docstring(None, "function", "f", None, None, lines)
    assert lines == ["Takes `spec`\\ s, and a `name` or `", "other`.", site_pages.RAISES]
    lines = ["Seconds: so many."]
    site_pages.docstring(None, "attribute", "s", None, None, lines)
    assert lines == ["", "Seconds: so many."]
    lines = ["Built-in immutable sequence."]
    site_pages.docstring(None, "data", "asyncflow.serving.HEALTH", (), None, lines)
    assert lines[0].startswith("Paths of health checks")


def test_lists_of_attributes_are_not_called_variables() -> None:
    fields = [SimpleNamespace(name="variable", label="Variables"), SimpleNamespace(name="returnvalue", label="Returns")]
    domain = SimpleNamespace(directives={"class": SimpleNamespace(doc_field_types=fields)})
    registry = SimpleNamespace(domains={"py": domain})
    site_pages.setup(SimpleNamespace(connect=lambda *_, **__: None, registry=registry))
    assert [field.label for field in fields] == ["Attributes", "Returns"]


def test_named_tuples_show_only_their_own_methods() -> None:
    field = SimpleNamespace(__doc__="Alias for field number 0")
    assert site_pages.skip(None, "class", "count", tuple.count, False, None) is True
    assert site_pages.skip(None, "class", "held", field, False, None) is True
    assert site_pages.skip(None, "class", "entries", entries, False, None) is None


def test_inventories_are_what_intersphinx_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_pages, "GENERATED", tmp_path)
    site_pages.write_inventories()
    for name, (url, _) in site_pages.INVENTORIES.items():
        head, packed = (tmp_path / f"{name}.inv").read_bytes().split(b"zlib.\n", 1)
        assert url.startswith("https://") and head.startswith(b"# Sphinx inventory version 2\n")
        lines = zlib.decompress(packed).decode().splitlines()
        assert lines
        assert [line for line in lines if not re.fullmatch(r"[\w.]+ py:(class|data|exception) 1 \S+ -", line)] == []


def test_the_gallery_has_every_example() -> None:
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert set(site_gallery.EXAMPLES) == programs
    assert len({example.title for example in site_gallery.EXAMPLES.values()}) == len(programs)


@pytest.mark.parametrize("name", site_gallery.EXAMPLES)
def test_a_program_of_the_gallery_is_the_example(name: str) -> None:
    program = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    shown, example = ast.parse(site_gallery.with_title(program, "A title")), ast.parse(program)
    assert (ast.get_docstring(shown) or "").startswith("A title\n=======\n\n")
    assert ast.dump(ast.Module(shown.body[1:], [])) == ast.dump(ast.Module(example.body[1:], []))


def test_a_program_that_fails_fails_the_build() -> None:
    site_gallery.enter_or_leave(None, "a.py", "before")
    try:
        sys.exit(0)
        with pytest.raises(RuntimeError, match="ended with 1"):
            sys.exit(1)
    finally:
        site_gallery.enter_or_leave(None, "a.py", "after")


def test_generated_pages_are_in_no_commit_and_no_sdist() -> None:
    assert "docs/generated/\n" in (ROOT / ".gitignore").read_text(encoding="utf-8")
    assert "prune docs/generated\n" in (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
