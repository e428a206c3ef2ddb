"""Serve a session: its life in a server, runs that end with their requests, overload, errors, health, metrics.

Works in any ASGI application; Starlette and FastAPI take its parts as they are::

    from asyncflow import serving

    life = serving.lifespan(session)
    app = Starlette(
        lifespan=life,
        routes=[Route("/predict", predict, methods=["POST"]), Route("/readyz", serving.readyz(life))],
        exception_handlers={af.AsyncflowError: serving.respond},
        middleware=[Middleware(life.shed)],
    )
"""

from __future__ import annotations

import typing as _typing

from asyncflow.foreign_names import facade as _facade
from asyncflow.runtime.watch.observer import ObservedBatch as ObservedBatch
from asyncflow.runtime.watch.observer import ObservedRun as ObservedRun
from asyncflow.runtime.watch.observer import RunObserver as RunObserver
from asyncflow.serving.edge import HEALTH as HEALTH
from asyncflow.serving.health import HealthEndpoint as HealthEndpoint
from asyncflow.serving.health import livez as livez
from asyncflow.serving.health import readyz as readyz
from asyncflow.serving.lifespan import Lifespan as Lifespan
from asyncflow.serving.lifespan import lifespan as lifespan
from asyncflow.serving.metrics import Metric as Metric
from asyncflow.serving.metrics import Metrics as Metrics
from asyncflow.serving.metrics import Sample as Sample
from asyncflow.serving.prometheus import PrometheusCollector as PrometheusCollector
from asyncflow.serving.prometheus import PrometheusWorker as PrometheusWorker
from asyncflow.serving.prometheus import prometheus_collector as prometheus_collector
from asyncflow.serving.reload import Reload as Reload
from asyncflow.serving.requests import run_or_disconnect as run_or_disconnect
from asyncflow.serving.requests import start_stream as start_stream
from asyncflow.serving.requests import stream_or_stall as stream_or_stall
from asyncflow.serving.responses import ErrorResponse as ErrorResponse
from asyncflow.serving.responses import error_response as error_response
from asyncflow.serving.responses import respond as respond
from asyncflow.serving.responses import status_code as status_code
from asyncflow.serving.spans import Spans as Spans

if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade("asyncflow.serving", globals())
