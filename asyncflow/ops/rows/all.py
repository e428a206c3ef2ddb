"""Imports every module of row rules, which installs them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from asyncflow.ops import rows

for _module in iter_modules(rows.__path__, f"{rows.__name__}."):
    import_module(_module.name)
