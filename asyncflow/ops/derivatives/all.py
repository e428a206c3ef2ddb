"""Imports every module of derivatives, which installs the rules: that of each room of ops, and those here."""

from __future__ import annotations

from asyncflow.ops.rules import import_rules

import_rules("derivatives")
