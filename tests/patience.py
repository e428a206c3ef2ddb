"""The time that a test waits for an event before it fails."""

from __future__ import annotations

PATIENCE_S = 100.0
"""Limit for threads, processes and runs. No work takes so long, also if the machine is slow and busy with other tests.
It is less than pytest gives a test. A passing test never waits for it, so there is no reason for less.
"""
