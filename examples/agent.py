"""An agent whose tools have limits: a loop in the graph asks a model for the next action, and performs it.

The model and the search are services that many clients overload. So the functions that call them have a timeout, a
number of retries, a maximum number of concurrent calls, and a rate a second. Eight tasks run at once and share these
limits; a call that waits for its turn holds no thread. A function with effects sends the mail. It is not tried again,
since a mail may have gone out although sending it failed.

One task is recorded. Its replay gives the same answer, decision by decision, without asking a service or sending a
mail. The program needs no network: its services are functions that take their time, and fail now and then. The time is
virtual, so the program checks its rates to the nanosecond on any machine. With services of your own call ``af.run``.

    python examples/agent.py
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncflow as af
from asyncflow.testing import virtual_clock

SEARCH, ADD, MAIL, DONE = range(4)
"""Decisions of the model."""

TEXT = af.spec("string", ())

PEOPLE = {"Lima": 10_092_000, "Oslo": 717_710, "Graz": 298_479, "Kyoto": 1_463_723, "Accra": 2_514_000}

MODEL_RATE, SEARCH_RATE = (8, 0.1), (4, 0.1)
"""Calls and seconds in which they may begin."""

RETRIES = 5
"""Number of retries of the functions; a service refuses no request more often."""


class Overloaded(Exception):
    """A service says to come back later."""


@dataclass
class Services:
    """The world outside: services that note their requests, and refuse some of them.

    Attributes:
        chance: of a call that fails.
        asked: when each service was asked.
        attempts: number of times that each request came to a service.
        sent: the mails.
    """

    chance: float
    asked: dict[str, list[float]] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    sent: list[str] = field(default_factory=list)

    async def ask(self, service: str, request: str) -> None:
        """Take a service's time, and fail now and then: the same attempts, in whatever order requests come."""
        self.asked.setdefault(service, []).append(asyncio.get_running_loop().time())
        number = self.attempts[request]
        self.attempts[request] += 1
        draw = random.Random(f"{request} {number}")
        await asyncio.sleep(draw.uniform(0.002, 0.02))
        if number < RETRIES and draw.random() < self.chance:
            raise Overloaded(f"{service}: 429 too many requests")


def decide(task: str, notes: str) -> tuple[int, str]:
    """Return the next tool and its argument, as a language model would that reads task and notes."""
    cities, lines = task.split(), notes.splitlines()
    known = {line.split(": ")[0]: line.split(": ")[1] for line in lines}
    for city in cities:
        if city not in known:
            return SEARCH, city
    if "total" not in known:
        return ADD, " ".join(known[city] for city in cities)
    if "mail" not in known:
        return MAIL, f"{' and '.join(cities)} have {known['total']} people"
    return DONE, known["total"]


def build(services: Services) -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """Build the graph of the agent; return it with its task and its answer."""

    decision = af.spec("int64", ()), TEXT

    @af.op(outputs=decision, timeout=1.0, retries=RETRIES, retry_on=Overloaded, backoff=0.01, rate=MODEL_RATE)
    async def model(task: str, notes: str) -> tuple[int, str]:
        await services.ask("model", f"{task}: {notes}")
        return decide(str(task), str(notes))

    @af.op(
        outputs=TEXT,
        timeout=1.0,
        retries=RETRIES,
        retry_on=Overloaded,
        backoff=0.01,
        rate=SEARCH_RATE,
        max_concurrency=3,
    )
    async def search(city: str) -> str:
        await services.ask("search", str(city))
        return f"{city}: {PEOPLE[str(city)]}"

    @af.op(outputs=TEXT, timeout=1.0)
    def add(numbers: str) -> str:
        return f"total: {sum(map(int, str(numbers).split()))}"

    @af.op(outputs=TEXT, stateful=True, max_concurrency=1)
    async def mail(text: str) -> str:
        await asyncio.sleep(0.002)
        services.sent.append(str(text))
        return "mail: sent"

    @af.op(outputs=TEXT)
    def noted(notes: str, line: str) -> str:
        return f"{notes}{line}\n"

    with af.Graph() as graph:
        task = af.placeholder("string", (), name="task")

        def goes_on(tool: af.Tensor, text: af.Tensor, notes: af.Tensor) -> af.Tensor:
            return tool != DONE

        def act(tool: af.Tensor, text: af.Tensor, notes: af.Tensor) -> tuple[af.Tensor, ...]:
            tools = [lambda: search(text), lambda: add(text), lambda: mail(text)]
            notes = noted(notes, af.switch_case(tool, tools))
            return *model(task, notes), notes

        begin = *model(task, ""), af.constant("")
        _, answer, _ = af.while_loop(goes_on, act, begin, maximum_iterations=20, name="agent")
    return graph, task, answer


def most_within(times: Sequence[float], seconds: float) -> int:
    """Return the largest number of calls that began within a number of seconds."""
    return max((sum(begun <= time < begun + seconds for time in times) for begun in times), default=0)


async def work(services: Services, tasks: Sequence[str], record: Path) -> tuple[list[str], tuple[str, str, bool]]:
    """Return the answers to all tasks; and that of the first task recorded, replayed, and if the replay did nothing."""
    graph, task, answer = build(services)
    async with af.Session(graph, max_runs=4, max_queued=100) as session:
        runs = [session.run(answer, {task: each}, timeout=60.0) for each in tasks]
        answers = list(map(str, await asyncio.gather(*runs)))
        print("  attempts of each function, and how many were retries:")
        for name, counts in session.statistics().limits.items():
            print(f"    {name:8} {counts.calls:3} calls  {counts.attempts:3} attempts  {counts.retries:2} retries")
        recorded = await session.run(answer, {task: tasks[0]}, record=record)
    before = len(services.sent), sum(map(len, services.asked.values()))
    (again,) = (await af.replay(record, graph)).values()
    after = len(services.sent), sum(map(len, services.asked.values()))
    print(f"  the replay of {record.name} sent {after[0] - before[0]} mails and asked {after[1] - before[1]} times")
    return answers, (str(recorded), str(again), before == after)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the answers are right, the limits held, and each mail was sent once; else 1."""
    parser = argparse.ArgumentParser(description="An agent with rate limits, retries, and a replay.")
    parser.add_argument("--tasks", type=int, default=8, help="how many run at once")
    parser.add_argument("--chance", type=float, default=0.2, help="of a call that fails")
    options = parser.parse_args(argv)

    draw = random.Random(0)
    tasks = [" ".join(draw.sample(sorted(PEOPLE), 3)) for _ in range(options.tasks)]
    services = Services(options.chance)
    print(f"{len(tasks)} tasks; {options.chance:.0%} of the calls to model and search fail")
    with tempfile.TemporaryDirectory() as folder, virtual_clock() as clock:
        answers, (recorded, again, is_silent) = clock.run(work(services, tasks, Path(folder) / "run.json"))

    wanted = [str(sum(PEOPLE[city] for city in task.split())) for task in tasks]
    within = all(
        most_within(services.asked.get(name, []), seconds) <= count
        for name, (count, seconds) in (("model", MODEL_RATE), ("search", SEARCH_RATE))
    )
    checks = {
        "every answer is right": answers == wanted,
        "no more calls began than the rates allow": within,
        "each mail was sent once": len(services.sent) == len(tasks) + 1,
        "the replay gave the same, and did nothing": recorded == again == wanted[0] and is_silent,
    }
    for what, holds in checks.items():
        print(f"{'PASS' if holds else 'FAIL'}: {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
