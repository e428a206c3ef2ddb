"""Benchmarks: one small program a workload, asyncflow beside its peers in the same run. ``python -m benchmarks``."""

from __future__ import annotations
