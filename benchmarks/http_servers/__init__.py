"""Servers that `benchmarks.http_serving` measures, each a program: ``python -m benchmarks.http_servers.x PORT``."""

from __future__ import annotations
