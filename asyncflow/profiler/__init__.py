"""Where did the time go? Recorded traces as files, pages and tables.

`save` writes a trace for Perfetto, as a self-contained HTML timeline or as a picture; `summarize` and `format_table`
turn it into numbers. Nothing else in asyncflow depends on this package, and it reads nothing but the records of
`asyncflow.runtime.trace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.foreign_names import public_names
from asyncflow.profiler.save import TraceFormatError, save
from asyncflow.profiler.summary import (
    DeviceSummary,
    LaneSummary,
    NodeSummary,
    Summary,
    TransferSummary,
    format_table,
    summarize,
)
from asyncflow.runtime.trace import install_writer

install_writer(save)

__all__ = [
    "DeviceSummary",
    "LaneSummary",
    "NodeSummary",
    "Summary",
    "TraceFormatError",
    "TransferSummary",
    "format_table",
    "save",
    "summarize",
]

if not TYPE_CHECKING:  # or every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.profiler", __all__)
