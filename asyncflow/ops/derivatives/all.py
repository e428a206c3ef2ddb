"""Imports every module of derivatives, which installs the rules."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from asyncflow.ops import derivatives

for _module in iter_modules(derivatives.__path__, f"{derivatives.__name__}."):
    import_module(_module.name)
