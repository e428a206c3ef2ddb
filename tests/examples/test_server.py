"""`examples/server.py`: its models are right about unseen data, and its page and endpoints answer."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from asyncflow import serving
from examples import server
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


async def answer_of(
    client: httpx.AsyncClient, path: str, is_right: Callable[[httpx.Response], object]
) -> httpx.Response:
    """The first answer that is right, of as many as it takes."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_right(answer := await client.get(path)):  # noqa: ASYNC110 - the server tells when asked
            await asyncio.sleep(0.01)
    return answer


@asynccontextmanager
async def served(app: Starlette | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = app or server.build(20)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://here", timeout=PATIENCE_S) as client,
    ):
        await answer_of(client, "/readyz", lambda answer: answer.is_success)
        yield client


async def test_all_models_answer_many_at_once() -> None:
    async with served() as client:
        numbers = range(24)
        values = [client.post("/calculate", content=f"({n} + 1) * 3 - -{n} / (2 * 4)") for n in numbers]
        texts = [client.post("/generate", content=f"The {'abc'[n % 3]}") for n in numbers]
        kinds = [client.post("/classify", content=f"for each in lines[{n}:{n + 1}]:") for n in numbers]
        found = await asyncio.gather(*values, *texts, *kinds)
        assert {answer.status_code for answer in found} == {200}
        assert [answer.json()["value"] for answer in found[:24]] == [(n + 1) * 3 + n / 8 for n in numbers]
        written = [answer.text for answer in found[24:48]]
        assert len(set(written)) == 3 and written[:3] == written[3:6]
        assert {len(text) for text in written} == {server.LONGEST}
        now = (await client.get("/live")).json()
        assert now["runs"] == now["queued"] == now["rows"] == 0
        assert max(size for _, size in now["batches"]) > 1


async def test_wrong_expressions_are_refused_in_words() -> None:
    async with served() as client:
        deep = ["-" * 5000 + "1", "(" * 500 + "1" + ")" * 500, "1+" * 5000 + "1", f"f({'-' * 900}1)"]
        large = ["1/0", "0/0", "1e400", "-1e400", "1" + "0" * 400, "9" * 5000]
        for text in ("f(1)", "1 +", "2 ** 3", "'a'", "__import__('os')", "True + 1", "\0", "", *deep, *large):
            answer = await client.post("/calculate", content=text)
            assert answer.status_code == 422 and answer.json()["error"] == "ValueError"
            assert len(answer.json()["message"]) < 300
        assert (await client.post("/calculate", content="+1 - -(+2)")).json() == {"value": 3}
        for text in ("", "é" * 100, "x" * 10_000):
            assert (await client.post("/classify", content=text)).status_code == 200
            assert (await client.post("/generate", content=text)).status_code == 200


async def test_a_seed_and_a_temperature_decide_the_text() -> None:
    """Other clients make no difference; a value that is neither a seed nor a temperature is refused."""
    async with served() as client:
        paths = [f"/generate?seed={seed}&temperature={heat}" for seed in (1, 2) for heat in (0.05, 1)]
        alone = [(await client.post(path, content="The")).text for path in paths]
        together = [each.text for each in await asyncio.gather(*(client.post(path, content="The") for path in paths))]
        assert together == alone
        assert len(set(alone)) == 4
        for query in ("seed=x", "seed=-1", f"seed={2**63}", "temperature=0", "temperature=nan", "temperature=inf"):
            answer = await client.post(f"/generate?{query}", content="The")
            assert (answer.status_code, answer.json()["error"]) == (422, "ValueError")


async def test_a_text_that_is_too_long_to_be_read_is_refused() -> None:
    """Reading one of megabytes would stop the event loop, and so all other requests, for seconds."""
    async with served() as client:
        for path in ("/classify", "/generate", "/calculate"):
            answer = await client.post(path, content="1" * (server.LARGEST_BODY + 1))
            assert (answer.status_code, answer.text) == (413, f"a text has at most {server.LARGEST_BODY} bytes")
        assert (await client.post("/classify", content="x" * server.LARGEST_BODY)).status_code == 200


async def test_vertices_of_expressions_are_no_rows_of_the_generator() -> None:
    models = server.Models(5)
    metrics, traffic = serving.Metrics(models.session), server.Traffic(models)
    shown: dict[str, list[object]] = {}

    class Looking(server.Recent):
        def pool_stepped(self, function: str, size: int, steps: int) -> None:
            shown.setdefault(function, []).append(server.live(models, metrics, self, traffic, "ready")["rows"])

    async with models.session, metrics, Looking(models.session):
        await asyncio.gather(*(models.calculate(f"{n} + 1") for n in range(4)))
        assert {rows for steps in shown.values() for rows in steps} == {0}
        assert "".join([letter async for letter in models.generate("The", 0)])
        assert set(shown[server.GENERATOR]) == {1}


async def test_the_example_at_the_top_is_answered_as_it_says() -> None:
    (line,) = re.findall(r"/classify -d '(.*)'", server.__doc__ or "")
    async with served() as client:
        assert (await client.post("/classify", content=line)).json()["kind"] == "code"


async def test_lines_that_were_not_learned_are_told_apart() -> None:
    models = server.Models(40)
    code, prose = server.examples(60)
    async with models.session:
        scores = await asyncio.gather(*map(models.classify, [*code[-300:], *prose[-300:]]))
    right = sum(score > 0 for score in scores[:300]) + sum(score < 0 for score in scores[300:])
    assert right / 600 > 0.75, right


async def test_every_model_answers_503_when_the_server_drains_and_streams_too() -> None:
    app = server.build(20)
    async with served(app) as client:
        life = app.router.lifespan_context
        assert isinstance(life, serving.Lifespan)
        life.start_drain()
        await asyncio.sleep(0)
        for path in ("/classify", "/calculate", "/generate"):
            answer = await client.post(path, content="1 + 1")
            assert answer.status_code == 503 and "retry-after" in answer.headers


async def test_clients_come_and_go_and_nothing_is_left() -> None:
    async with served() as client:
        assert (await client.post("/clients/24")).json() == {"clients": 24}
        await answer_of(client, "/live", lambda answer: answer.json()["ended"].get("ok", 0) > 60)
        await answer_of(client, "/live", lambda answer: answer.json()["rows"])
        assert (await client.post("/clients/0")).json() == {"clients": 0}
        assert (await client.get("/live")).json()["runs"] == 0


async def test_the_page_is_self_contained_and_asks_for_present_models() -> None:
    text = server.PAGE.read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in text and '<html lang="en">' in text
    ids = set(re.findall(r'id="(\w+)"', text))
    assert set(re.findall(r'at\("(\w+)"\)', text)) <= ids
    assert set(re.findall(r'for="(\w+)"', text)) <= ids
    async with served() as client:
        assert (await client.get("/")).text == text
        now = (await client.get("/live")).json()
        assert set(re.findall(r"now\.(\w+)", text)) <= now.keys()


async def test_it_runs_on_a_real_server_and_a_client_that_goes_ends_its_stream() -> None:
    config = uvicorn.Config(server.build(20), port=0, log_config=None, timeout_graceful_shutdown=10)
    process = uvicorn.Server(config)
    ended = asyncio.ensure_future(process._serve())
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: process.started or ended.done())
        port = process.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            await answer_of(client, "/readyz", lambda answer: answer.is_success)
            async with client.stream("POST", "/generate", content="The") as stream:
                assert await anext(stream.aiter_text())
            await answer_of(client, "/live", lambda answer: not answer.json()["runs"])
        process.should_exit = True
        await ended


def test_only_numbers_and_signs_are_read() -> None:
    assert list(server.vertices("-1 + 2")) == [
        (-1, server.KINDS[ast.Add], 0.0),
        (0, server.KINDS[ast.USub], 0.0),
        (0, server.KINDS[ast.Constant], 2.0),
        (1, server.KINDS[ast.Constant], 1.0),
    ]


def test_a_port_that_is_taken_is_told_before_anything_is_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        server.main(["--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and "in use" in told.err and "choose another --port" in told.err
