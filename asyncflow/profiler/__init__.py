"""Recorded traces as files, pages and tables, which show where the time went.

`save` writes a trace for Perfetto, as a self-contained HTML timeline or as a picture; `summarize` and `format_table`
turn it into numbers. Nothing else in asyncflow depends on this package, and it reads nothing but the records of
`asyncflow.runtime.watch.trace`.
"""

from __future__ import annotations

import typing as _typing

from asyncflow.foreign_names import facade as _facade
from asyncflow.profiler.save import TraceFormatError as TraceFormatError
from asyncflow.profiler.save import save as save
from asyncflow.profiler.summary import DeviceSummary as DeviceSummary
from asyncflow.profiler.summary import LaneSummary as LaneSummary
from asyncflow.profiler.summary import NodeSummary as NodeSummary
from asyncflow.profiler.summary import Summary as Summary
from asyncflow.profiler.summary import TransferSummary as TransferSummary
from asyncflow.profiler.summary import format_table as format_table
from asyncflow.profiler.summary import summarize as summarize
from asyncflow.runtime.watch.trace import install_writer as _install_writer

_install_writer(save)

if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade("asyncflow.profiler", globals())
