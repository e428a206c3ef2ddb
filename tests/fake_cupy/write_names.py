"""Writes names.json from the CuPy that is installed: ``python tests/fake_cupy/write_names.py`` (no GPU needed).

It holds the public names of CuPy's namespaces with the signatures of functions; of anything else, its type in ``<>``.
A signature is a list of parameters: ``=`` at the end is a default, ``+`` in front keyword-only.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from pathlib import Path
from typing import Any

import cupy

MARKS = {
    inspect.Parameter.POSITIONAL_ONLY: "/",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "+",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def signature(parameters: list[inspect.Parameter]) -> str:
    return " ".join(f"{MARKS[p.kind]}{p.name}{'' if p.default is p.empty else '='}" for p in parameters)


def functions(module: Any) -> dict[str, str]:
    names = [name for name in sorted(dir(module)) if not name.startswith("_") and name != "annotations"]
    things = {name: getattr(module, name) for name in names}
    return {
        name: signature(list(inspect.signature(thing).parameters.values()))
        if isinstance(thing, types.FunctionType)
        else f"<{type(thing).__name__}>"
        for name, thing in things.items()
    }


def method(name: str, thing: Any) -> str:
    """The signature of a compiled method, which is the first line of its docstring."""
    if type(thing).__name__ == "getset_descriptor":
        return "<attribute>"
    found = re.match(rf"[\w.]*\b{name}\((self.*?)\)( ->.*)?$", (thing.__doc__ or "").split("\n")[0])
    if found is None:
        return signature(list(inspect.signature(thing).parameters.values())[1:])
    words, mark = [], ""
    for part in re.split(r", (?![^()\[\]]*[)\]])", found.group(1))[1:]:
        stars = part[: len(part) - len(part.lstrip("*"))]
        if part == "*":
            mark = "+"
        else:
            plain = re.sub(r"[:=].*", "", part.lstrip("*")).split()[-1]
            words.append(f"{stars or mark}{plain}{'=' if '=' in part else ''}")
    return " ".join(words)


def methods(kind: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in kind.__mro__[:-1]:
        for name, thing in vars(base).items():
            if not name.startswith("_") and name not in found:
                found[name] = method(name, thing)
    return dict(sorted(found.items()))


def main() -> None:
    tables = {
        "cupy": functions(cupy),
        "cupy.linalg": functions(cupy.linalg),
        "cupy.fft": functions(cupy.fft),
        "cupy.ndarray": methods(cupy.ndarray),
    }
    Path(__file__).with_name("names.json").write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
