"""The options of a session: `SessionOptions`, the parameters of `Session`, checked where they are given."""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Concatenate, Final, Literal, ParamSpec, TypeVar, get_args

import numpy as np

from asyncflow.checkpoint.saver import Saver, as_path
from asyncflow.compiler.pipeline import check_dump, check_without
from asyncflow.compiler.program.kernels.device_kernels import Kernels
from asyncflow.compiler.program.request import PlanOptions, SavedValuesChoice
from asyncflow.foreign_names import close_names
from asyncflow.graph.graph import Graph

P = ParamSpec("P")
S = TypeVar("S")
Options = TypeVar("Options")

_LEAST: Final = {
    "seed": None,
    "threads": 1,
    "compute_streams": 1,
    "placement_seed": None,
    "max_iterations": 1,
    "plans": 1,
    "max_runs": 1,
    "max_queued": 0,
    "max_queued_bytes": 0,
    "host_memory_limit": 0,
}
"""The least that each integer may be; devices check their memory limits."""

OF_ITS_PLACE: Final = (
    *("graph", "devices", "dump", "spill_directory", "plans", "restore", "kernels"),
    *("max_runs", "max_queued", "max_queued_bytes"),
)
"""Options that make no difference to one run, or mean something on one machine alone: a record leaves them out."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a `Session`: its parameters, which are added, documented and checked here alone.

    Args:
        graph: where names in fetches and feeds are looked up; tensors know their own graph.
        devices: names such as ``["cpu:0", "cpu:1"]``; None for one CPU device.
        optimize: fold constants, join equal nodes and move invariant ones out of loops before a graph runs.
        loop_batching: with `optimize`, compute matrix products of many iterations of a loop at once. These products
            do not need the loop's variables, or nothing in the loop needs them. Results are the same within rounding.
        regions: compile clusters of nodes that never wait into generated Python functions.
        fusion: with `regions`, make one CUDA kernel of each chain of elementwise ones. It is compiled when it first
            runs; results are the same but for rounding in transcendental functions.
        cuda_graphs: with `regions`, launch a region of elementwise operations, reductions and products of matrices as
            one CUDA graph, with its loops, stores and variables. That begins once it has run a few times with the same
            shapes and the same integers on the host. ``Plan.explain()`` says for each region whether a graph launches
            it. New; right on the one card it ran on, and about three times as fast there. Graphs with stores and
            variables have run on the stand-in for a card alone.
        device_while: run loops that decide by arrays on the card, with no copy to the host in between. Their bodies
            are such operations, branches and loops, and so are their gradients. It needs the package
            ``cuda-bindings``, which the extras ``cuda13`` and ``cuda12`` bring, and a driver of CUDA 13.
            ``Plan.explain()`` says for each loop whether the card runs it. New; right on the one card it ran on, and
            with gradients on the stand-in for a card alone.
        without: names of compiler passes that are left out, such as ``["fold"]``, to find which one a result depends
            on; ``docs/design/README.md`` lists them. Results are the same within rounding.
        dump: print to the standard error what compiler passes change when a plan is compiled, as a diff of the graph's
            text: True for all passes, a name such as ``"fold"`` for one. Or a function, which is called with the name
            of each pass and its diff, which is empty if nothing has changed.
        debug: verify the graph after every compiler pass and every kernel's outputs against the op's shape rule.
        seed: picks among ready firings at random, and among the orders of the nodes of a region, to show that results
            do not depend on them; and draws the delays before retries (``@af.op(backoff=)``). None: in order, and
            delays of its own in each session.
        memory_limit: bytes per device; None for no limit. Runs that only compute, and pass it together, are done one
            after the other; what passes it alone fails with `OutOfMemoryError`.
        host_memory_limit: bytes of the host's memory for values that loops save for gradients and that leave the
            memory of their device (`while_loop`), for all devices together; None for no limit.
        spill_directory: directory for such values beyond that, and for CPU devices with a `memory_limit`: a file there
            has no name and goes with the session. None for nowhere.
        threads: BLAS threads a stream. One is best when several runs are in flight.
        compute_streams: streams for kernels on each device; with more than one, the compiler divides a run's
            independent branches, and the iterations of its loops, over them. Kernels of different runs on a CPU overlap
            in any case: it has a thread for each core, up to 8, and two more, one of them for short work alone.
        transfer_dtype: ``"bfloat16"`` sends float32 values between devices as their upper 16 bits, in half the bytes
            and with 8 bits of precision. None sends them unchanged.
        saved_values: treatment of the values that loops save for their gradients. ``"auto"`` keeps them while they are
            predicted to fit into `memory_limit`; else a plan moves some away and back (`while_loop`), computes others
            again, and runs some iterations again, whatever is predicted to take least time.
            ``plan.explain(memory=True)`` shows the choice, and the cost of less memory. If only a run knows the number
            of iterations, fitting iterations keep their values, and the others run again; or values move once memory is
            short. ``"keep"`` leaves them where they are. ``"swap"`` moves all that are large from the first byte.
            ``"recompute"`` has loops save their variables once a segment of iterations, and gradients run each segment
            forward again: of n iterations, about ``2 * sqrt(n)`` are held, for the time of one more forward loop. Some
            loops would have to run an effect twice, or a function of yours that is not declared ``@af.op(pure=True)``.
            Such a loop is a `GraphError` with ``"recompute"``, and is not run again with ``"auto"``. Results are the
            same within rounding.
        soft_placement: a node goes to another device if it has no kernel for the one asked for; False makes that an
            error.
        kernels: kernels for kinds of device in this session alone, such as ``{("softmax", "cuda"): function}``, before
            the ones of `register_kernel`. A key has an op, as for that, and a kind.
        placement_seed: puts nodes on devices at random, as far as requests allow, to show that results do not depend on
            it. None: where they finish first.
        check_numerics: fail on the first NaN or infinity, naming the node.
        max_iterations: most iterations of any one loop; None for no limit.
        plans: most compiled plans that the session keeps; the one used least recently goes first. Entries for a graph
            go when the graph does.
        max_runs: most runs in flight at once; others wait their turn, with a `memory_limit` also for the memory that
            runs of their kind needed before. Three kinds of runs do not count: runs without a scheduler, as they are
            over at once; runs requested inside a run; and waiting runs, until they go on. These wait for other runs at
            a queue, an input, a mutex or a barrier, or for the consumer of a stream. ``"auto"`` allows two more runs of
            about the same length than the devices have threads, so that short runs never wait for long ones. It counts
            no run that waits in any way, such as in a coroutine. Nor does it count runs that share batches or pools, or
            take eight times as long as usual. None for no limit.
        max_queued: with `max_runs`, most runs that wait. Further runs, and runs that would not end within their
            ``timeout=``, are refused (`OverloadedError`). None for no limit. Of runs of several priorities
            (`Session.run`) the less important ones give way.
        max_queued_bytes: with `max_runs`, most bytes of feeds of queued runs; None for no limit.
        restore: a checkpoint that variables take their values from when the session is entered, as if by
            `Session.restore`. Or a `Saver`: then there need not be one yet, and the saver publishes from then on.

    Raises:
        TypeError, ValueError: an option is of another type than it says, or out of its range.
        GraphError: `kernels` names an unknown op, or a function that cannot be its kernel.
        PlacementError: `devices` names a missing device, `kernels` an unknown kind of device, or `device_while` lacks
            ``cuda-bindings``.
    """

    graph: Graph | None = None
    devices: Sequence[str] | None = None
    _: KW_ONLY
    optimize: bool = True
    loop_batching: bool = True
    regions: bool = True
    fusion: bool = True
    cuda_graphs: bool = False
    device_while: bool = False
    without: Collection[str] = ()
    dump: bool | str | Callable[[str, str], object] = False
    debug: bool = False
    seed: int | None = None
    memory_limit: int | None = None
    host_memory_limit: int | None = None
    spill_directory: str | None = None
    threads: int = 1
    compute_streams: int = 1
    transfer_dtype: str | None = None
    saved_values: SavedValuesChoice = "auto"
    soft_placement: bool = True
    kernels: Mapping[tuple[object, str], Callable[..., object]] | None = None
    placement_seed: int | None = None
    check_numerics: bool = False
    max_iterations: int | None = None
    plans: int = 256
    max_runs: int | Literal["auto"] | None = "auto"
    max_queued: int | None = None
    max_queued_bytes: int | None = None
    restore: str | os.PathLike[str] | Saver | None = None

    def __post_init__(self) -> None:
        if self.graph is not None and not isinstance(self.graph, Graph):
            raise TypeError(f"graph is a Graph or None; got {type(self.graph).__name__} {self.graph!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                _check_flag(value, field.name)
            elif field.name == "max_runs" and isinstance(value, str):
                if value != "auto":
                    raise ValueError(f"max_runs is 'auto', an integer, or None for no limit; got {value!r}")
            elif field.name in _LEAST and (value is not None or field.type == "int"):
                _check_integer(value, field.name, _LEAST[field.name])
        for name in ("max_queued", "max_queued_bytes"):
            if getattr(self, name) is not None and self.max_runs is None:
                raise ValueError(f"{name} limits the runs that wait, and without max_runs none ever does: give both")
        if self.restore is not None and not isinstance(self.restore, Saver):
            as_path(self.restore)
        Kernels(self.kernels)
        check_without(self.without)
        check_dump(self.dump)
        if self.spill_directory is not None and not os.path.isdir(self.spill_directory):
            raise ValueError(f"spill_directory is an existing directory; got {self.spill_directory!r}")
        if self.transfer_dtype not in (None, "bfloat16"):
            raise ValueError(f"transfer_dtype is None or 'bfloat16'; got {self.transfer_dtype!r}")
        if self.saved_values not in get_args(SavedValuesChoice):
            choices = " or ".join(map(repr, get_args(SavedValuesChoice)))
            raise ValueError(f"saved_values is {choices}; got {self.saved_values!r}")

    def for_plans(self) -> PlanOptions:
        """Return the options that plans are compiled with."""
        return PlanOptions(**{field.name: getattr(self, field.name) for field in fields(PlanOptions)})


def _check_integer(value: object, name: str, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is an integer; got {type(value).__name__} {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} is at least {least}; got {value}")


def _check_flag(value: object, name: str) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is True or False; got {type(value).__name__} {value!r}")


def taking(
    options: Callable[P, Options],
) -> Callable[[Callable[[S, Options], None]], Callable[Concatenate[S, P], None]]:
    """Gives an ``__init__(self, options)`` the parameters of `options`, for callers, type checkers and `help`.

    Said once: 21 parameters with their types and defaults, in a signature and again in what keeps them, would differ.
    """
    init_of_options = vars(options)["__init__"]
    known = list(inspect.signature(init_of_options).parameters)[1:]

    def decorate(init: Callable[[S, Options], None]) -> Callable[Concatenate[S, P], None]:
        def taken(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            for unknown in [name for name in kwargs if name not in known]:
                close = close_names(unknown, known)
                hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
                raise TypeError(f"{init.__qualname__.partition('.')[0]} has no option {unknown!r}; {hint}")
            init(self, options(*args, **kwargs))

        # Python's errors about arguments show the function's name.
        taken.__name__, taken.__qualname__ = init.__name__, init.__qualname__
        init_of_options.__qualname__ = init.__qualname__
        taken.__annotations__ = init_of_options.__annotations__
        taken.__signature__ = inspect.signature(init_of_options)  # type: ignore[attr-defined]
        return taken

    return decorate


def with_arguments(doc: str | None, options: type) -> str | None:
    """Insert the sections of the docstring of `options` before the example that ends a docstring."""
    if doc is None or options.__doc__ is None:
        return None  # python -OO
    head, sign, example = doc.partition(">>>")
    return head + options.__doc__.partition("\n\n")[2].strip() + "\n\n    " + sign + example
