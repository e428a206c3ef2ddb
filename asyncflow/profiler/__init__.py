"""Where did the time go? Recorded traces as files, pages and tables.

`save` writes a trace for Perfetto or as a self-contained HTML timeline; `summarize` and `format_table` turn it into
numbers. Nothing else in asyncflow depends on this package, and it reads nothing but the records of
`asyncflow.runtime.trace`.
"""

from __future__ import annotations

from asyncflow.profiler.save import TraceFormatError, save
from asyncflow.profiler.summary import LaneSummary, NodeSummary, Summary, format_table, summarize
from asyncflow.runtime.trace import install_writer

install_writer(save)

__all__ = [
    "LaneSummary",
    "NodeSummary",
    "Summary",
    "TraceFormatError",
    "format_table",
    "save",
    "summarize",
]
