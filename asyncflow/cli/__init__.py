"""The `asyncflow` command: profile a program, simulate it on other machines, list the devices."""

from __future__ import annotations
