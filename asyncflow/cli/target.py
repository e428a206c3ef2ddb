"""Targets: ``file.py``, ``file.py:name`` or ``package.module:name``, and how they are loaded."""

from __future__ import annotations

import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import Self

from asyncflow.errors import a_kind
from asyncflow.graph.graph import Graph


class TargetError(Exception):
    """A target that names nothing that can be called; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class Target:
    """A thing that is to be called, before anything is imported."""

    module: str
    """Dotted name; of a file, its stem."""
    file: Path | None
    """None for a module found on ``sys.path``."""
    attribute: str
    """Name inside the module, dotted for a member; empty for a file that runs as a whole."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``file.py``, ``file.py:name`` or ``package.module:name``; the file has to exist."""
        place, colon, attribute = text.rpartition(":")
        if text.endswith(".py"):
            return cls("__main__", _existing(text), "")
        if not colon or not place or not all(part.isidentifier() for part in attribute.split(".")):
            raise TargetError(
                f"{text!r} does not say what to call; write file.py, file.py:name or package.module:name, such as "
                f"{place or text or 'train.py'}:main"
            )
        if not place.endswith(".py"):
            if not all(part.isidentifier() for part in place.split(".")):
                raise TargetError(f"{place!r} is neither a file ending in .py nor a dotted module name")
            return cls(place, None, attribute)
        file = _existing(place)
        return cls(file.stem, file, attribute)

    @property
    def search_path(self) -> str:
        """The folder that ``python file.py`` or ``python -m module`` would put first on ``sys.path``."""
        return str(self.file.parent) if self.file is not None else str(Path.cwd())

    @property
    def program(self) -> str:
        """The program's ``sys.argv[0]``."""
        return str(self.file) if self.file is not None else self.module

    def load(self, on_graph: Callable[[Graph], object] | None = None) -> Callable[[], object]:
        """Import the module and return the callable; for a whole file, a callable that runs it as ``python file.py``
        would.

        Args:
            on_graph: is to be called with the graph, if the target names one.

        Raises:
            TargetError: no such module, no such name in it, not callable, or it needs arguments.
            Exception: whatever the module raises while it is imported.
        """
        if not self.attribute:
            return partial(runpy.run_path, str(self.file), run_name=self.module)
        found = self.find(graphs=on_graph is not None)
        if on_graph is not None and isinstance(found, Graph):
            return partial(on_graph, found)
        if not callable(found):
            wanted = "a function" if on_graph is None else "a graph or a function"
            raise TargetError(f"{self.attribute} of {self.program} is {a_kind(type(found))}; name {wanted}")
        _check_no_arguments(self.attribute, found)
        return found

    def find(self, *, graphs: bool = True) -> object:
        """Import the module and return the named object; `graphs` is True if the object may be a graph.

        Raises:
            TargetError: no such module, or no such name in it.
            Exception: whatever the module raises while it is imported.
        """
        module = _import_module(self.module) if self.file is None else _import_file(self.module, self.file)
        try:
            return reduce(getattr, self.attribute.split(".") if self.attribute else (), module)
        except AttributeError:
            raise TargetError(f"{self.program} has no {self.attribute!r}; {_offers(module, graphs=graphs)}") from None


def _existing(place: str) -> Path:
    file = Path(place)
    if not file.is_file():
        raise TargetError(f"there is no file {place!r} in {Path.cwd()}")
    return file.resolve()


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is the program's error, and keeps its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"there is no module {name!r} in {Path.cwd()} or elsewhere on the import path ({error}); a file is named "
            f"with its suffix, such as {name.replace('.', '/')}.py:main"
        ) from None


def _import_file(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, pickles and the module's own imports look it up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _offers(module: ModuleType, *, graphs: bool) -> str:
    """The names in the module that could have been meant."""
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (
            (graphs and isinstance(value, Graph))
            or (callable(value) and getattr(value, "__module__", None) == module.__name__)
        )
    ]
    return f"it defines {', '.join(names)}" if names else "it defines nothing to call"


def _check_no_arguments(name: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some builtins have no signature
    try:
        signature.bind()
    except TypeError as error:
        raise TargetError(
            f"{name}{signature} needs arguments ({error}), and is called without; name a function that takes none, "
            f"and read the program's arguments from sys.argv"
        ) from None
