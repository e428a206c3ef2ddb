"""Tests with PyTorch itself are collected where it is installed: it is too large for `make test` to install it."""

from __future__ import annotations

from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None

collect_ignore = [] if HAS_TORCH else ["test_torch_feeds.py", "test_from_torch.py"]


def pytest_report_header() -> str:
    return "PyTorch: tested" if HAS_TORCH else "PyTorch: not installed, so what needs it is not tested"
