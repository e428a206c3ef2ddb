"""A web server with three models in one session, and a page that shows how their requests share the work.

    make serve        # or: python examples/server.py --port 8000
    curl localhost:8000/classify -d 'if not self.done: return None'
    curl -N localhost:8000/generate -d 'The'
    curl -N 'localhost:8000/generate?temperature=0.5&seed=3' -d 'The'
    curl localhost:8000/calculate -d '(1 + 2) * 3 - 4 / 8'

- `/classify` says whether a line is code or prose. Requests that come together are rows of one product (`af.batched`).
- `/generate` writes text like that of your Python's documentation, a character an iteration, and streams it.
  Requests are rows of one loop, which they join and leave between iterations (`pool=`). Each samples at its own
  temperature and with its own seed, so a repeated request gets the same text, whichever requests run beside it.
- `/calculate` computes an expression on its syntax tree, and vertices of different trees together (`share=True`).

Open http://localhost:8000 and let some clients in. Models learn from the standard library of your Python, in a second.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import math
import socket
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path

import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import asyncflow as af
from asyncflow import serving

PAGE = Path(__file__).with_name("server.html")
FEATURES, HIDDEN = 512, 512
GENERATOR = "generate"
"""The name of the generator's loop."""
CAPACITY = 64
"""Rows of it."""
LONGEST = 400
"""Characters that are generated at most."""
LARGEST_BODY = 20_000
"""Bytes of a request: what reads them keeps the event loop busy for some tens of milliseconds."""
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz.,'-"
LETTERS = len(ALPHABET)
KINDS = {ast.Constant: 0, ast.Add: 1, ast.Sub: 2, ast.Mult: 3, ast.Div: 4, ast.USub: 5}
"""Kinds of vertices of an expression."""
LARGEST = sys.float_info.max

# -- what the models learn from ----------------------------------------------------------------------------------------


def examples(most_files: int) -> tuple[list[str], list[str]]:
    """Lines of code, and of docstrings, of the standard library."""
    code: list[str] = []
    prose: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:most_files]:
        source = file.read_text(encoding="utf-8")
        texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
        said = {line.strip() for text in texts for line in text.splitlines()}
        prose.extend(sorted(line for line in said if len(line.split()) > 3))
        code.extend(line for line in map(str.strip, source.splitlines()) if len(line) > 10 and line not in said)
    return code, prose


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def features(line: str) -> NDArray[np.float32]:
    """Return counts of triples of characters, by classes of triples."""
    found = np.zeros(FEATURES, np.float32)
    raw = f"  {line}".encode()
    for place in range(len(raw) - 2):
        found[zlib.crc32(raw[place : place + 3]) % FEATURES] += 1
    return found


def fit(code: list[str], prose: list[str]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Two layers: random features, and what tells the two kinds of lines apart by them (ridge regression)."""
    first = np.random.default_rng(0).normal(scale=1 / 8, size=(FEATURES, HIDDEN)).astype(np.float32)
    kinds = [lines[:: max(1, len(lines) // 3000)] for lines in (code, prose)]
    hidden = np.tanh(np.stack([features(line) for lines in kinds for line in lines]) @ first)
    wanted = np.repeat(np.array([1, -1], np.float32), list(map(len, kinds)))
    second = np.linalg.solve(hidden.T @ hidden + 10 * np.eye(HIDDEN, dtype=np.float32), hidden.T @ wanted)
    return first, second.astype(np.float32)


def letters(text: str) -> NDArray[np.int64]:
    """The characters of a text by their places in the alphabet; others are left out."""
    return np.array([place for place in map(ALPHABET.find, text.lower()) if place >= 0], np.int64)


def following(prose: list[str]) -> NDArray[np.float32]:
    """Return the log-probability of each character after three others."""
    text = letters("\n".join(prose))
    counts = np.full((LETTERS**3, LETTERS), 1e-9, np.float32)
    contexts = (text[:-3] * LETTERS + text[1:-2]) * LETTERS + text[2:-1]
    np.add.at(counts, (contexts, text[3:]), 1)
    logits: NDArray[np.float32] = np.log(counts / counts.sum(axis=1, keepdims=True))
    return logits


# -- the models --------------------------------------------------------------------------------------------------------


class Models:
    """Three programs in one graph, and the session that runs them."""

    def __init__(self, most_files: int) -> None:
        code, prose = examples(most_files)
        with af.Graph() as graph:
            self._build_classifier(*fit(code, prose))
            self._build_generator(following(prose))
            self._build_calculator()
        self.session = af.Session(graph, max_runs=256, max_queued=512)

    def _build_classifier(self, first: NDArray[np.float32], second: NDArray[np.float32]) -> None:
        weights = af.Variable(first, name="first"), af.Variable(second, name="second")

        @af.batched(max_size=64)
        def classify(row: af.Tensor) -> af.Tensor:
            return af.tanh(row @ weights[0]) @ weights[1]

        self._line = af.placeholder("float32", (FEATURES,), name="line")
        self._score = classify(self._line)

    def _build_generator(self, logits: NDArray[np.float32]) -> None:
        table = af.Variable(logits, name="logits")
        self._start = af.placeholder("int64", (), name="start")
        self._seed = af.placeholder("int64", (), name="seed")
        self._temperature = af.placeholder("float32", (), name="temperature")
        self._length = length = af.placeholder("int64", (), name="length")

        def step(number: af.Tensor, context: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            self._letter = af.random.categorical(table[context] / self._temperature, seed=self._seed)
            return number + 1, (context % LETTERS**2) * LETTERS + self._letter

        first = (af.constant(0, "int64"), self._start)
        af.while_loop(lambda number, *_: number < length, step, first, pool=af.Pool(CAPACITY), name=GENERATOR)

    def _build_calculator(self) -> None:
        self._tree = af.InputGraph.placeholder()
        self._kinds = af.placeholder("int64", (None,), name="kinds")
        self._numbers = af.placeholder("float64", (None,), name="numbers")

        @af.vertex_function(state=af.spec("float64", ()), children=2)
        def calculate(v: af.Vertex) -> None:
            left, right, kind = v.gather(0), v.gather(1), v.pull("kind")
            divisor = af.where(kind == KINDS[ast.Div], right, 1.0)
            found = [v.pull("number"), left + right, left - right, left * right, left / divisor, -left]
            v.scatter(af.stack(found)[kind])

        values = af.vertex_map(calculate, self._tree, {"kind": self._kinds, "number": self._numbers}, share=True)
        self._value = values.roots

    async def classify(self, line: str) -> float:
        """Return a score: above 0 if a line looks like code, below 0 if like prose."""
        return float(await self.session.run(self._score, {self._line: features(line)}, timeout=2.0))

    async def generate(self, start: str, seed: int, temperature: float = 1.0) -> AsyncGenerator[str, None]:
        """Characters that may follow, one by one: the same ones for a seed; likely ones where it is cold."""
        known = letters(f"\n\n\n{start}")[-3:]
        context = (known[0] * LETTERS + known[1]) * LETTERS + known[2]
        feeds = {self._start: context, self._seed: seed, self._temperature: temperature, self._length: LONGEST}
        async with aclosing(serving.stream_or_stall(self.session.stream(self._letter, feeds))) as items:
            async for letter in items:
                yield ALPHABET[int(letter)]

    async def calculate(self, text: str) -> float:
        """The value of an expression.

        Raises:
            ValueError: it is none, or has no finite value.
        """
        parents, kinds, numbers = zip(*vertices(text), strict=True)
        feeds = {
            **self._tree.feeds(af.InputGraph.from_parents(parents)),
            self._kinds: np.array(kinds, np.int64),
            self._numbers: np.array(numbers, np.float64),
        }
        (value,) = await self.session.run(self._value, feeds, timeout=2.0)
        if not math.isfinite(value):
            raise ValueError(f"its value is {value}, which is no finite number")
        return float(value)


def vertices(text: str) -> Iterator[tuple[int, int, float]]:
    """Of each vertex of an expression: its parent, its kind and its number."""
    try:
        waiting: deque[tuple[ast.expr, int]] = deque([(ast.parse(text.strip(), mode="eval").body, -1)])
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two are of those that are nested too deep
        raise ValueError(f"this is no expression: {getattr(error, 'msg', error)}") from None
    for place in count():
        if not waiting:
            return
        node, parent = waiting.popleft()
        while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            node = node.operand
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                yield parent, KINDS[ast.Constant], float(number) if number <= LARGEST else math.inf
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right):
                yield parent, KINDS[type(op)], 0.0
                waiting.extend(((left, place), (right, place)))
            case ast.UnaryOp(ast.USub(), operand):
                yield parent, KINDS[ast.USub], 0.0
                waiting.append((operand, place))
            case _:
                found = ast.get_source_segment(text.strip(), node)
                raise ValueError(f"numbers, + - * / and parentheses are all it knows; got {found!r:.80}")


# -- the server --------------------------------------------------------------------------------------------------------


def sampling(query: Mapping[str, str], seed: int) -> tuple[int, float]:
    """The seed and the temperature that a request asks for.

    Raises:
        ValueError: one of them is out of its range.
    """
    try:
        chosen, temperature = int(query.get("seed", seed)), float(query.get("temperature", 1))
    except ValueError:
        chosen, temperature = 0, math.nan
    if not (0 <= chosen < 2**63 and 0.05 <= temperature <= 10):
        raise ValueError("seed= is an integer from 0 to 2**63 - 1, temperature= a number from 0.05 to 10")
    return chosen, temperature


class Recent:
    """The latest calls of the classifier, and steps of the generator's loop, for the page."""

    def __init__(self, session: af.Session) -> None:
        self._session = session
        self.batches: deque[tuple[int, int]] = deque(maxlen=96)
        """Number and size of each."""
        self._numbers = count()

    async def __aenter__(self) -> None:
        self._remove = self._session.observe(self)

    async def __aexit__(self, *exc: object) -> None:
        self._remove()

    def run_began(self, run: serving.ObservedRun) -> None:
        """Does nothing."""

    def run_ended(self, run: serving.ObservedRun) -> None:
        """Does nothing."""

    def batch_ended(self, batch: serving.ObservedBatch) -> None:
        """Keeps its size."""
        self.batches.append((next(self._numbers), batch.size))

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        """Does nothing: the metrics have the rows of the latest step."""


class Traffic:
    """Clients of the three models in this process, so that there is something to see."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        """Begins with none."""

    async def __aexit__(self, *exc: object) -> None:
        await self.let_in(0)

    async def let_in(self, number: int) -> None:
        """Set the number of clients."""
        leaving, self._clients = self._clients[number:], self._clients[:number]
        for client in leaving:
            client.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        while len(self._clients) < number:
            self._clients.append(asyncio.create_task(self._client(len(self._clients))))

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self._clients)

    async def _client(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while True:
            try:
                await asyncio.sleep(rng.exponential(0.01))
                if number % 3 == 0:
                    await self._models.classify(f"for line in lines[{number}:]:")
                elif number % 3 == 1:
                    async with aclosing(self._models.generate("The ", int(rng.integers(2**31)))) as text:
                        async for _ in text:
                            await asyncio.sleep(0.005)  # it reads
                else:
                    await self._models.calculate(f"({number} + 1) * 3 - -{number} / (2 * 4)")
            except af.OverloadedError as error:
                await asyncio.sleep(error.retry_after_s)
            except (af.DeadlineExceeded, af.SessionClosedError):
                await asyncio.sleep(0.1)


def live(models: Models, metrics: serving.Metrics, recent: Recent, traffic: Traffic, phase: str) -> dict[str, object]:
    """Return the contents of the page."""
    found = {metric.name.removeprefix("asyncflow_"): metric.samples for metric in metrics.snapshot()}
    ended: dict[str, float] = {}
    for labels, value, _ in found["requests_total"]:
        ended[labels["status"]] = ended.get(labels["status"], 0) + value
    return {
        "phase": phase,
        "clients": traffic.clients,
        "runs": found["inflight_runs"][0].value,
        "queued": found["queue_depth"][0].value,
        "lag_s": found["event_loop_lag_seconds"][0].value,
        "ended": ended,
        "duration_s": [sample.value for sample in found["request_duration_seconds"]],
        "rows": sum(value for labels, value, _ in found["pool_rows"] if labels["function"] == GENERATOR),
        "capacity": CAPACITY,
        "batches": list(recent.batches),
    }


def build(most_files: int = 80) -> Starlette:
    """The application."""
    models = Models(most_files)
    metrics, recent, traffic = serving.Metrics(models.session), Recent(models.session), Traffic(models)

    async def text_of(request: Request) -> str:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise HTTPException(413, f"a text has at most {LARGEST_BODY} bytes")
        return body.decode("utf-8", "replace")

    async def classify(request: Request) -> Response:
        score = await serving.run_or_disconnect(request, models.classify(await text_of(request)))
        return JSONResponse({"kind": "code" if score > 0 else "prose", "score": round(score, 3)})

    async def generate(request: Request) -> Response:
        text = await text_of(request)
        try:
            seed, temperature = sampling(request.query_params, zlib.crc32(text.encode()))
        except ValueError as error:
            return JSONResponse({"error": "ValueError", "message": str(error)}, 422)
        items = await serving.start_stream(request, models.generate(text, seed, temperature))
        return StreamingResponse(items, media_type="text/plain")

    async def calculate(request: Request) -> Response:
        try:
            value = await serving.run_or_disconnect(request, models.calculate(await text_of(request)))
        except ValueError as error:
            return JSONResponse({"error": "ValueError", "message": str(error)}, 422)
        return JSONResponse({"value": value})

    async def let_in(request: Request) -> Response:
        await traffic.let_in(min(int(request.path_params["number"]), 200))
        return JSONResponse({"clients": traffic.clients})

    async def page(request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def now(request: Request) -> Response:
        return JSONResponse(live(models, metrics, recent, traffic, life.phase))

    async def warm_up(session: af.Session) -> None:
        await models.classify("x = 1")
        await models.calculate("-1 + 2")
        _ = [letter async for letter in models.generate("The", 0)]

    life = serving.lifespan(models.session, warm_up=warm_up, beside=[metrics, recent, traffic], grace_s=5)
    return Starlette(
        lifespan=life,
        routes=[
            Route("/", page),
            Route("/live", now),
            Route("/classify", classify, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/calculate", calculate, methods=["POST"]),
            Route("/clients/{number:int}", let_in, methods=["POST"]),
            Route("/livez", serving.livez(life)),
            Route("/readyz", serving.readyz(life)),
        ],
        exception_handlers={af.AsyncflowError: serving.respond},
        middleware=[Middleware(life.shed, passes=[*serving.HEALTH, "/", "/live", "/clients/*"])],
    )


def main(arguments: list[str] | None = None) -> None:
    """The server, until it is stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--files", type=int, default=80, help="so many files of the standard library are read")
    options = parser.parse_args(arguments)

    try:
        listener = socket.create_server((options.host, options.port))
    except OSError as error:
        parser.error(f"cannot listen on {options.host}:{options.port} ({error.strerror}); choose another --port")
    with listener, suppress(KeyboardInterrupt):
        print("learning from the standard library", flush=True)
        config = uvicorn.Config(build(options.files), log_level="warning", timeout_graceful_shutdown=10)
        print("http://{}:{}".format(*listener.getsockname()), flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
