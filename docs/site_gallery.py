"""The gallery of the site: the programs in ``examples/``, with timelines of programs that take seconds.

Sphinx-gallery wants a title with a line below it, so it gets copies whose docstrings are such. Some programs are run
with small sizes; a trace around each gives its picture.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import asyncflow as af
from asyncflow import profiler

ROOT: Final = Path(__file__).resolve().parents[1]
COPIES: Final = ROOT / "docs" / "generated" / "examples"
HEAD: Final = """\
Gallery
=======

Whole programs, in the folder ``examples`` of a checkout. Programs with a timeline were run to build this page, with
small sizes. The others take minutes, serve until they are stopped, start processes, or depend on how busy the machine
is.
"""


class Example(NamedTuple):
    """A program: its title on the page, and its arguments if it is run for the page."""

    title: str
    arguments: tuple[str, ...] | None


EXAMPLES: Final[Mapping[str, Example]] = {
    "agent": Example("An agent whose tools have limits", None),
    "character_lstm": Example("A character LSTM on two devices", None),
    "coroutine_nodes": Example("Coroutines as nodes", ("--count", "24")),
    "data_flow": Example("A network over graphs of data flow", None),
    "digits": Example("A residual network that reads digits", None),
    "dqn": Example("Deep Q-learning in one graph", None),
    "goes_on": Example("Training that is killed and goes on", None),
    "ilqr": Example("Swing up a pole", ("--moments", "30")),
    "ngram_beam_search": Example("Beam search", ("--prompts", "2")),
    "pagerank": Example("PageRank of the standard library", ("--files", "40", "--runs", "4")),
    "pipeline": Example("Recurrent layers over two devices", ("--steps", "8", "--size", "256")),
    "producer_and_consumers": Example("A producer and two consumers", ()),
    "server": Example("A web server with three models", None),
    "syntax_trees": Example("A Tree-LSTM over syntax trees", None),
    "word_lstm": Example("A word LSTM as a vertex function", None),
}


def settings(*, runs: bool) -> dict[str, Any]:
    """Return sphinx-gallery's configuration, and write the copies; without ``runs`` no program is run."""
    write_copies()
    chosen = "|".join(name for name, example in EXAMPLES.items() if example.arguments is not None)
    return {
        "examples_dirs": [str(COPIES)],
        "gallery_dirs": ["generated/gallery"],
        "filename_pattern": rf"/({chosen})\.py$",
        "plot_gallery": runs,
        "image_scrapers": (timeline_of,),
        "reset_modules": (enter_or_leave,),
        "reset_modules_order": "both",
        "reset_argv": _arguments,
        "abort_on_example_error": True,
        "write_computation_times": False,
        "min_reported_time": float("inf"),
        "download_all_examples": False,
        "show_signature": False,
        "notebook_extensions": set(),
        "default_thumb_file": str(ROOT / "docs" / "images" / "program.png"),
    }


def write_copies() -> None:
    """Write each example with the docstring that sphinx-gallery wants, if it is not there yet."""
    COPIES.mkdir(parents=True, exist_ok=True)
    _write(COPIES / "GALLERY_HEADER.rst", HEAD)
    for name, example in EXAMPLES.items():
        _write(COPIES / f"{name}.py", with_title((ROOT / "examples" / f"{name}.py").read_text("utf-8"), example.title))


def with_title(program: str, title: str) -> str:
    """Return the program with a docstring in reStructuredText that begins with a title."""
    body = ast.parse(program).body
    text = ast.get_docstring(ast.Module(body=body, type_ignores=[])) or ""
    rest = program.split("\n", body[0].end_lineno or 0)[-1]
    text = re.sub(r"(?<!`)`(?!`)([^`]+)`(?!`)", r"``\1``", text)
    text = re.sub(r"\n\n(?=    )", "\n\n.. code-block:: sh\n\n", text)
    return f'r"""\n{title}\n{"=" * len(title)}\n\n{text}\n"""\n{rest}'


def _write(path: Path, text: str) -> None:
    """Leave an equal file alone, since its time is that of the last build."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _arguments(_: object, script_vars: Mapping[str, Any]) -> list[str]:
    return list(EXAMPLES[Path(script_vars["src_file"]).stem].arguments or ())


def _exit(status: object = None) -> None:
    if status not in (None, 0):
        raise RuntimeError(f"the program ended with {status}")


class _Around:
    """State around a running program: a `sys.exit` that does not end the build, and the trace."""

    exit = patch.object(sys, "exit", _exit)
    trace: af.Trace | None = None


def enter_or_leave(_: object, __: str, when: str) -> None:
    """Begin a trace before a program, and make its `sys.exit(0)` do nothing."""
    if when == "before":
        _Around.exit.start()
        _Around.trace = af.Trace(detail="region")
        _Around.trace.__enter__()
    else:
        _Around.exit.stop()
        _leave()


def _leave() -> af.Trace | None:
    trace, _Around.trace = _Around.trace, None
    if trace is not None:
        trace.__exit__(None, None, None)
    return trace


def timeline_of(_: object, block_vars: Mapping[str, Any], gallery_conf: Mapping[str, Any]) -> str:
    """Save the timeline of what ran so far, and return the figure for the page."""
    trace = _leave()
    if trace is None or not trace.firings:
        return ""
    path = next(block_vars["image_path_iterator"])
    profiler.save(trace, path)
    source = Path(path).relative_to(gallery_conf["src_dir"]).as_posix()
    options = ("   :alt: Timeline of the program's runs", "   :width: 100%", "   :class: sphx-glr-single-img", "")
    return "\n".join([f".. image:: /{source}", *options])
