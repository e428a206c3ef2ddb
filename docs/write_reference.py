"""Writes ``docs/reference.md``, a line for everything public, from signatures and docstrings: ``make reference``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np

import asyncflow as af
import asyncflow.serving
import asyncflow.testing

PAGE: Final = Path(__file__).with_name("reference.md")
HEAD: Final = """\
# Reference

Everything public, a line each. On the site (`make docs`) each line leads to the rest: shapes, dtypes, errors, examples.
In Python, `help(af.matmul)` prints it. Functions of arrays are named as in the Python Array API standard; NumPy's,
TensorFlow's and PyTorch's other names answer with ours.
This page is generated: `make reference`.
"""
ROOMS: Final = {
    "runtime": "Running",
    "streams": "Running",
    "errors": "Errors",
    "graph": "Graphs",
    "parameters": "Graphs",
    "control": "Control flow",
    "lift": "Control flow",
    "state": "Variables, tables and queues",
    "inputs": "Reading",
    "checkpoint": "Checkpoints",
    "semantics": "What programs may do",
    "autodiff": "Gradients",
    "jacobians": "Gradients",
    "vertex": "Graphs as data",
}
"""Headings of names in ``af`` that are no operations on arrays, by room; operations are by family, each a module."""
FAMILIES: Final = {
    "creation": "Making arrays",
    "datatypes": "Dtypes",
    "shape": "Shapes as values",
    "elementwise": "Elementwise functions",
    "logic": "Comparisons and logic",
    "statistical": "Sums and statistics",
    "utility": "All, any, differences and NaNs",
    "products": "Products of matrices",
    "norms": "Products of matrices",
    "diagonals": "Products of matrices",
    "manipulation": "Changing shapes",
    "padding": "Changing shapes",
    "splitting": "Changing shapes",
    "counts": "Sums and statistics",
    "segments": "Sums and statistics",
    "quantile": "Sums and statistics",
    "indexing": "Reading and writing elements",
    "windows": "Windows of fixed length",
    "convolution": "Products of matrices",
    "searching": "Searching",
    "sorting": "Sorting",
    "sets": "Sets",
    "nn": "Neural networks",
    "dropout": "Neural networks",
    "erf": "Elementwise functions",
    "checks": "Checks and printing",
    "custom": "Operations of your own",
    "batch": "Operations of your own",
    "device_kernels": "Operations of your own",
    "step_policy": "Operations of your own",
    "from_torch": "PyTorch",
}
MODULES: Final = {
    "cuda": "Streams of other libraries: `af.cuda`",
    "fft": "Fourier transforms: `af.fft`",
    "linalg": "Linear algebra: `af.linalg`",
    "nn": "Recurrent cells, losses and initialisers: `af.nn`",
    "optim": "Training steps: `af.optim`",
    "random": "Random numbers: `af.random`",
    "raw": "Primitives: `af.raw`",
    "profiler": "Timelines: `af.profiler`",
    "serving": "In a web server: `asyncflow.serving`",
    "testing": "Simulated devices, and checks of kinds of devices: `asyncflow.testing`",
}


def page() -> str:
    """The page's text."""
    parts = [f"## {title}\n\n" + "\n".join(_line(*each) for each in names) for title, names in sections().items()]
    parts.insert(-len(MODULES), "## Dtypes and constants\n\n" + ", ".join(f"`{name}`" for name in constants()))
    return "\n\n".join([HEAD.rstrip(), *parts]) + "\n"


def sections() -> dict[str, list[tuple[str, object]]]:
    """Return all public names but dtypes and constants: headings, with the names below them and their values."""
    found: dict[str, list[tuple[str, object]]] = {title: [] for title in (*ROOMS.values(), *FAMILIES.values())}
    for name in vars(af)["__all__"]:
        value = getattr(af, name)
        if str(getattr(value, "__module__", "")).startswith("asyncflow") and not isinstance(value, ModuleType):
            found[_section(value)].append((f"af.{name}", value))
    found |= {title: _names(module) for module, title in MODULES.items()}
    return {title: names for title, names in found.items() if names}


def constants() -> list[str]:
    """Names of dtypes and numbers."""
    public: list[str] = vars(af)["__all__"]
    return [
        f"af.{name}" for name in public if name == "DType" or isinstance(getattr(af, name), np.dtype | float | None)
    ]


def _section(value: object) -> str:
    parts = str(getattr(value, "__module__", "")).split(".")
    title = FAMILIES.get(parts[-1]) if parts[1] in ("ops", "compiler") else ROOMS.get(parts[1])
    if title is None:
        raise LookupError(f"{value!r} is in {'.'.join(parts)}, which has no heading here: give it one")
    return title


def _names(name: str) -> list[tuple[str, object]]:
    module: ModuleType = getattr(af, name)
    prefix = f"asyncflow.{name}" if name in ("serving", "testing") else f"af.{name}"
    return [(f"{prefix}.{each}", getattr(module, each)) for each in module.__all__]


def _line(name: str, value: object) -> str:
    summary = documentation(name, value).partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    line = f"- `{name}{_arguments(value)}`: {summary}"
    return "\n".join([line, *_methods(value)]) if isinstance(value, type) else line


def documentation(name: str, value: object) -> str:
    """Return the docstring; of a constant the one below its assignment, as Python itself gives that of its type."""
    if isinstance(value, type) or inspect.isroutine(value):
        return inspect.getdoc(value) or ""
    below = re.compile(rf'^{name.rpartition(".")[2]}\b[^\n]*\n"""(.*?)"""', re.MULTILINE | re.DOTALL)
    sources = (path.read_text(encoding="utf-8") for path in sorted(Path(af.__file__).parent.rglob("*.py")))
    return next(found[1] for source in sources if (found := below.search(source)))


def _methods(kind: type) -> list[str]:
    """A line for each public method that the class itself defines, or a part of it that has no name of its own."""
    parts = [kind, *(base for base in kind.__bases__ if base.__module__.startswith("asyncflow.runtime.session."))]
    own = {name: getattr(kind, name) for part in parts for name in vars(part) if not name.startswith("_")}
    return [f"  {_line(f'.{name}', method)}" for name, method in own.items() if inspect.isroutine(method)]


def _arguments(value: object) -> str:
    """Names and defaults; of a class, only if users call it."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
        return ""
    parameters = inspect.signature(value).parameters
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in parameters.items()
        if name != "self" and not name.startswith("_")
    ]
    return str(inspect.Signature(plain))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
