"""Faults of one line, put into the code on purpose, and the cells of each run that find them: `make mutants`.

For each fault the tree is copied to a temporary folder, and the line is changed there. In each cell the conformance
tests for such faults run until one fails. Tests of one module know no cells and run once. The table in
``docs/design/tests.md`` is then written anew. With words as arguments, only faults with one of these in their names are
tried, and nothing is written. Before all faults the same tests run on the unchanged code, where they have to pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.cells import ALWAYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.cells import Arrangement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design" / "tests.md"
BEGIN, END = "<!-- faults: make mutants -->\n", "<!-- end of faults -->\n"

COPIED = ("asyncflow", "tests", "pyproject.toml")
HANGS_S = 60
"""A test that takes so long has found the fault."""
ALL_PASSED, SOME_FAILED = 0, 1
"""Exit codes of pytest; with any other code, the tests have not run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of the package, its replacement, and the tests that should find it.

    Attributes:
        name: for people, and for the command line.
        module: its path in the package.
        old: a part of a line that is nowhere else in the module.
        new: its replacement.
        tests: a file in ``tests/conformance``, without ``test_`` and ``.py``; or its path in ``tests``, such as
            ``state/test_queue``.
        chosen: selects its tests with this in their names; several such words have "or" between them.
    """

    name: str
    module: str
    old: str
    new: str
    tests: str
    chosen: str = "test"

    @property
    def path(self) -> str:
        """The file of its tests, in the tree."""
        return f"tests/{self.tests}.py" if "/" in self.tests else f"tests/conformance/test_{self.tests}.py"

    def put_into(self, root: Path) -> None:
        """Changes the line in the copy of the tree at `root`."""
        path = root / "asyncflow" / self.module
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.name}: not one place in {self.module} has {self.old!r}"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


SCHEDULER = "runtime/scheduler/scheduler.py"
ORDER = "compiler/program/order_effects.py"
PLACES = "compiler/lowering/places.py"
COPIES = "devices/cuda/transfers/copies.py"

FAULTS = (
    Fault(
        "a Merge all of whose inputs are dead does not die",
        SCHEDULER,
        "if seen == target.n_inputs:",
        "if seen > target.n_inputs:",
        "primitives",
    ),
    Fault(
        "dead Exits are not delivered when their frame ends",
        SCHEDULER,
        "if node not in frame.live_exits:",
        "if False:",
        "primitives",
    ),
    Fault(
        "who waits for a dead node by a control edge lives",
        SCHEDULER,
        "            if target.kind not in (_MERGE, _TRIGGER):",
        "            if False:",
        "cond",
    ),
    Fault(
        "one iteration too many is live",
        SCHEDULER,
        "is_full = frame.live >= frame.info.parallel_iterations or frame.parked",
        "is_full = frame.live > frame.info.parallel_iterations or frame.parked",
        "while_loop",
        "test_no_more_iterations",
    ),
    Fault(
        "ended iterations are not acknowledged",
        SCHEDULER,
        "if frame.info.acknowledges:",
        "if False:",
        "while_loop",
        "test_maximum_iterations",
    ),
    Fault(
        "no Send waits for an acknowledgement",
        PLACES,
        "is_acknowledged = source in self.drivers and len(sent) > 0",
        "is_acknowledged = False",
        "while_loop",
        "test_no_more_iterations",
    ),
    Fault(
        "transfers of an inner loop have the number of its own iteration alone",
        "runtime/scheduler/frame.py",
        "(*outer.counters(), self.index)",
        "(self.index,)",
        "while_loop",
        "test_nested_loops",
    ),
    Fault(
        "the effects of iterations are not ordered",
        ORDER,
        "_after(body, body_turns[resource].nodes())",
        "_after(body, [])",
        "while_effects",
    ),
    Fault(
        "nothing waits for the effects of a branch",
        ORDER,
        "_after(branch, [n for turn in turns.values() for n in turn.nodes()])",
        "_after(branch, [])",
        "while_effects",
        "test_program_order",
    ),
    Fault(
        "a write does not wait for the reads before it",
        ORDER,
        "order(node, turn.nodes())",
        "order(node, [turn.writer] if turn.writer is not None else [])",
        "state",
        "test_a_write_waits",
    ),
    Fault(
        "what has no inputs runs in branches not taken",
        PLACES,
        "return [self.pivot(place, device)]",
        "return controls",
        "cond",
    ),
    Fault(
        "a region rebinds its loop variables one after the other",
        "compiler/regions/code/codegen.py",
        "if value in rebound:",
        "if False:",
        "while_loop",
        "test_a_body_that_swaps",
    ),
    Fault(
        "a loop on a card rebinds its variables one after the other",
        "devices/cuda/graphs/loop.py",
        "values[index] = value.copy()",
        "pass",
        "while_loop",
        "test_arrays_that_take_turns",
    ),
    Fault(
        "a graph of a card is used for other numbers of the host",
        "devices/captures.py",
        "return value.dtype, value.tobytes()",
        "return value.dtype",
        "gradients_branches",
    ),
    Fault(
        "a graph of a card reads the inputs of the launch before",
        "devices/cuda/graphs/graph.py",
        "copy_into(cupy, self.array, value, raw)",
        "pass",
        "executor",
        "test_every_run_computes_with_its_own_feeds",
    ),
    Fault(
        "a stream of a card does not wait for another",
        "streams/cuda/stream.py",
        "if event.stream is not self and not event.seen_done:",
        "if False:",
        "while_loop",
        "test_parallel_iterations_never or test_no_more_iterations",
    ),
    Fault(
        "a copy writes to memory that earlier kernels still use",
        COPIES,
        "stream.wait(compute.record())",
        "pass",
        "runtime/test_session_cuda",
        "test_two_sessions_with_three_devices_each_on_one_card",
    ),
    Fault(
        "nobody keeps the memory that is being copied between cards",
        COPIES,
        "peer.keep(landing, there, *holds)",
        "pass",
        "while_loop",
        "test_parallel_iterations_never",
    ),
    Fault(
        "a simulated card copies what is not yet written",
        "devices/sim/device.py",
        "self.order(self.peer, (value.written,))",
        "pass",
        "while_loop",
        "test_parallel_iterations_never",
    ),
    Fault(
        "a gradient reads the saved values of the iteration after",
        "autodiff/bodies/while_gradient.py",
        "kept.indexes[body] = subtract(parameters[0], 1)",
        "kept.indexes[body] = subtract(parameters[0], 0)",
        "gradients_loops",
        "test_a_loop_of_squares",
    ),
    Fault(
        "a store that a loop begins with is taken for the one of all its iterations",
        "compiler/memory/last_reads.py",
        "if isinstance(user, WhileNode) and min(entering) < user.n_vars:",
        "if False:",
        "memory",
        "test_a_loops_initial_store",
    ),
    Fault(
        "a counter that is computed again begins with 0",
        "compiler/memory/saving/choose_saved.py",
        'np.asarray(start.node.attrs["value"], int64)',
        "np.zeros((), int64)",
        "memory",
        "test_a_counter_that",
    ),
    Fault(
        "a buffer with two names is paid for twice",
        "compiler/memory/saving/choose_saved.py",
        "_MOST_SHARED = 4",
        "_MOST_SHARED = 0",
        "memory",
        "test_a_buffer_that",
    ),
    Fault(
        "a cancelled run keeps what it has taken",
        "state/elements/taken.py",
        "            give_back(elements, where)",
        "            pass",
        "cancellation",
        "test_an_element_is_delivered",
    ),
    Fault(
        "a run claims what it waits for beside its caller's task",
        "runtime/run/run.py",
        "self.in_caller = plan.survey.waits and self.emitter is None",
        "self.in_caller = False",
        "cancellation",
        "test_an_element_is_put",
    ),
    Fault(
        "work of a stopped run is begun",
        "runtime/executor/partition_run.py",
        "            withdraw_all(self)",
        "            pass",
        "conformance/test_cancellation",
        "test_work_that_has_not_started",
    ),
    Fault(
        "what is copied out of a queue goes back into a restored one",
        "state/elements/queue.py",
        "self._in_hand = []  # the take that copies them counts as earlier",
        "pass",
        "state/test_queue",
        "test_a_take_that_copies",
    ),
    Fault(
        "what a run needs of memory is not reserved once it is known",
        "runtime/gates/run_queue.py",
        "self._reserved += cost.nbytes - run.reserved",
        "pass",
        "runtime/test_run_queue",
        "test_what_a_run_needs",
    ),
    Fault(
        "a handler stays cancelled once its client has gone",
        "serving/requests.py",
        "if not self._has_cancelled or self._task.uncancel() > self._before:",
        "if not self._has_cancelled:",
        "serving/test_requests",
        "test_a_request",
    ),
    Fault(
        "a step of a checkpoint is named before the disk has its files",
        "checkpoint/writer.py",
        "    sync_directory(folder)",
        "    pass",
        "checkpoint/test_writer",
        "test_a_step",
    ),
    Fault(
        "a pool keeps the stores of requests that have left",
        "runtime/shared/rows/pool.py",
        "slab[len(self.rows)] = None",
        "pass",
        "pooled_captures",
        "test_captures_of_left",
    ),
    Fault(
        "a row that is stepped alone has the first element of what all share",
        "runtime/shared/pools.py",
        "_first_row(x) if own else x",
        "_first_row(x) if x.ndim else x",
        "pooled_captures",
        "test_captures",
    ),
    Fault(
        "stores of different sizes are stacked in one step",
        "lift/calls/pooled.py",
        "node.op in _WHOLE or",
        "False and",
        "pooled_captures",
        "test_stores_have",
    ),
    Fault(
        "an extent that is not known broadcasts to 1",
        "graph/values/shapes.py",
        "return None if None in dims else 1",
        "return 1",
        "graph/test_shapes",
        "test_broadcast",
    ),
    Fault(
        "a quantile looks for a NaN at the wrong end",
        "ops/reductions/quantile.py",
        "greatest = gather(ordered, shape(x)[axis] - 1, axis=axis)",
        "greatest = gather(ordered, 0, axis=axis)",
        "ops/test_quantile",
        "test_nan",
    ),
    Fault(
        "what is taken from the bound of a window is added to it",
        "control/windows.py",
        "offset += int(number) if x.node.op is ADD else -int(number)",
        "offset += int(number)",
        "control/test_windows",
        "test_a_loop_carries",
    ),
    Fault(
        "an element that was put back is read on under a wrong number",
        "inputs/read_ahead.py",
        "else self._skip + n - len(kept) for n in returned]",
        "else self._skip + n for n in returned]",
        "inputs/test_read_ahead",
        "test_returned_elements",
    ),
    Fault(
        "a mean over nothing divides by 0",
        "nn/masks.py",
        "maximum(count_nonzero(chosen), 1)",
        "count_nonzero(chosen)",
        "nn/test_losses",
        "test_masked_mean",
    ),
    Fault(
        "the squares of a norm overflow",
        "optim/clipping.py",
        "sum(square(as_dtype_of(x, float64)))",
        "sum(square(x))",
        "optim/test_clipping",
        "test_squares",
    ),
    Fault(
        "all requests have the bias of the first of them",
        "vertex/shared.py",
        "not y.has_rows and is_same_for_all(y.tensor) for x, y",
        "not y.has_rows for x, y",
        "vertex/test_shared",
        "test_variables_and_fed",
    ),
    Fault(
        "a firing that follows at once gets a lane of its own",
        "profiler/lanes.py",
        "while busy and busy[0][0] <= start:",
        "while busy and busy[0][0] < start:",
        "profiler/test_lanes",
        "test_touching",
    ),
    Fault(
        "additions race with one another",
        "semantics/races.py",
        '"add": ("read", "write"),',
        '"add": ("read", "write", "add"),',
        "semantics/test_races",
        "test_additions",
    ),
    Fault(
        "virtual clocks nest",
        "testing/clock.py",
        "if self._runner is not None or current_machine() is not None:",
        "if self._runner is not None:",
        "testing/test_clock",
        "test_clocks_do_not_nest",
    ),
    Fault(
        "a program that fails ends well",
        "cli/program.py",
        "            return FAILED",
        "            return 0",
        "cli/test_main",
        "test_failing_program",
    ),
)


def run_tests(root: Path, path: str, chosen: str, cell: Arrangement | None) -> bool:
    """Return True if tests of the tree at `root` pass, in a cell or, if they know none, by themselves."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-o", f"timeout={HANGS_S}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", chosen if cell is None else f"{cell} and ({chosen})", path],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * HANGS_S,
    )
    if done.returncode not in (ALL_PASSED, SOME_FAILED):
        raise SystemExit(f"{path}, {cell}: no tests have run\n{done.stdout}\n{done.stderr}")
    return done.returncode == ALL_PASSED


def cells_that_find(fault: Fault) -> list[bool]:
    """For each cell, whether its tests fail with the fault."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, root / name)
        fault.put_into(root)
        if "/" in fault.tests:
            found = [not run_tests(root, fault.path, fault.chosen, None)] * len(ALWAYS)
        else:
            found = [not run_tests(root, fault.path, fault.chosen, cell) for cell in ALWAYS]
    print(
        fault.name,
        *(str(cell) for cell, is_found in zip(ALWAYS, found, strict=True) if is_found),
        sep="\n  ",
        flush=True,
    )
    return found


def table(found: Iterable[Sequence[bool]]) -> str:
    """A line a fault: its name, its module, and a mark in the column of each cell that finds it."""
    head = f"| fault | in | {' | '.join(map(str, ALWAYS))} |\n|---|---|{'---|' * len(ALWAYS)}\n"
    marks = (" | ".join("found" if is_found else "" for is_found in each) for each in found)
    return head + "".join(
        f"| {fault.name} | `{fault.module}` | {mark} |\n" for fault, mark in zip(FAULTS, marks, strict=True)
    )


def write(found: Iterable[Sequence[bool]]) -> None:
    """Puts the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")


def main(words: Sequence[str]) -> None:
    """Tries the faults with one of the words in their names; all of them, and writes the table, if there are none."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        as_it_is = dict.fromkeys(
            (fault.path, fault.chosen, cell) for fault in chosen for cell in ([None] if "/" in fault.tests else ALWAYS)
        )
        runs = [(ROOT, *tests) for tests in as_it_is]
        if not all(workers.map(run_tests, *zip(*runs, strict=True))):
            raise SystemExit("tests fail in the code as it is")
        found = list(workers.map(cells_that_find, chosen))
    if not words:
        write(found)


if __name__ == "__main__":
    main(sys.argv[1:])
