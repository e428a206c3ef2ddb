"""Fault F75: programs that end with open sessions, runs in flight and plans half compiled."""

from __future__ import annotations

import pytest

from tests.faults.programs import run
from tests.patience import PATIENCE_S

PROGRAM = """
from asyncflow.runtime.calls import plans
from asyncflow.runtime.session import session as session_module

with af.Graph() as graph:
    answer, forever = af.constant(42) + 0, endless()
kept = []  # until the interpreter takes modules apart
compiling = threading.Event()

def compile_forever(*_, **__):
    compiling.set()
    threading.Event().wait()

async def main(ends):
    for options in ({}, {"regions": False}):
        session = af.Session(graph, **options)
        assert await session.run(answer) == 42
        kept.extend([session, asyncio.ensure_future(session.run(forever))])
        await until(lambda: session._runs.in_flight.runs)
    idle = af.Session(graph)
    assert await idle.run(answer) == 42
    plans._COMPILED_INLINE, session_module.compile_plan = 0, compile_forever
    kept.extend([idle, asyncio.ensure_future(af.Session(graph).run(answer))])
    await until(compiling.is_set)
    async with af.Session(graph):
        ends()

def by_itself():
    loop = FACTORY()
    kept.append(loop)  # left open
    loop.run_until_complete(main(lambda: None))

def by_exit():
    with asyncio.Runner(loop_factory=FACTORY) as runner:
        runner.run(main(lambda: sys.exit(3)))

warnings.simplefilter("ignore")
for end, status in ((by_itself, 0), (by_exit, 3)):
    if not os.fork():  # a program that has imported everything already
        signal.alarm(ALARM_S)  # ends one that hangs
        end()
        break
    print(end.__name__, os.waitstatus_to_exitcode(os.wait()[1]) - status, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_program_may_end_with_everything_open(loop: str) -> None:
    """Fault F75, Behaviour 110: sessions, runs that never end, and a plan that is compiled on a thread."""
    _, out, err = run(PROGRAM.replace("ALARM_S", str(int(PATIENCE_S / 4))), loop)
    assert out.split() == ["by_itself", "0", "by_exit", "0"], (out, err)
    assert "Fatal" not in err
