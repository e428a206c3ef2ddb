"""The `asyncflow` command: profile a program, list the devices."""

from __future__ import annotations
