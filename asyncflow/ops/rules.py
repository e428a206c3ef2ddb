"""Rules of ops stand beside the ops: a room of ops has a module for each kind of rules, named after the kind."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from asyncflow import ops


def import_rules(kind: str) -> None:
    """Import the modules of a kind, `derivatives` or `rows`, which installs the rules, and the tools of the kind.

    The import goes by name: rules build with ops of all rooms, so that imports written out would close circles.
    """
    for room in iter_modules(ops.__path__, f"{ops.__name__}."):
        if room.ispkg:
            for module in iter_modules(import_module(room.name).__path__, f"{room.name}."):
                if kind in module.name.split(".")[-2:]:
                    import_module(module.name)
