"""Serve a session: its life in a server, runs that end with their requests, errors as responses, health, metrics.

Works in any ASGI application; Starlette and FastAPI take its parts as they are::

    from asyncflow import serving

    life = serving.lifespan(session)
    app = Starlette(
        lifespan=life,
        routes=[Route("/predict", predict, methods=["POST"]), Route("/readyz", serving.readyz(life))],
        exception_handlers={af.AsyncflowError: serving.respond},
    )
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.foreign_names import public_names
from asyncflow.runtime.observer import ObservedBatch, ObservedRun, RunObserver
from asyncflow.serving.health import HealthEndpoint, livez, readyz
from asyncflow.serving.lifespan import Lifespan, lifespan
from asyncflow.serving.metrics import Metric, Metrics, Sample
from asyncflow.serving.prometheus import PrometheusCollector, prometheus_collector
from asyncflow.serving.reload import Reload
from asyncflow.serving.requests import run_or_disconnect, stream_or_stall
from asyncflow.serving.responses import ErrorResponse, error_response, respond, status_code
from asyncflow.serving.spans import Spans

__all__ = [
    "ErrorResponse",
    "HealthEndpoint",
    "Lifespan",
    "Metric",
    "Metrics",
    "ObservedBatch",
    "ObservedRun",
    "PrometheusCollector",
    "Reload",
    "RunObserver",
    "Sample",
    "Spans",
    "error_response",
    "lifespan",
    "livez",
    "prometheus_collector",
    "readyz",
    "respond",
    "run_or_disconnect",
    "status_code",
    "stream_or_stall",
]

if not TYPE_CHECKING:  # or every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.serving", __all__)
