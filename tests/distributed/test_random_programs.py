"""Random programs, cut over devices at random, give the same bits as plain NumPy.

`tests.property` describes these programs, and runs them on one device. Here each node is on a device picked
at random, ready nodes fire in random order, and simulated kernels and copies take random times.
"""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import asyncflow as af
from tests.distributed.clusters import Cluster
from tests.property.graphs import build
from tests.property.large import build as build_large
from tests.property.large import interpret as interpret_large
from tests.property.large import write_program as write_large_program
from tests.property.programs import Program, Type, interpret
from tests.property.strategies import TYPES, VECTORS, programs, write_program
from tests.property.test_large_programs import assert_same
from tests.property.test_random_programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import OpenSession

RUNS = 2
"""Variables keep their values between them, and the second one shuffles differently."""

SEEDS = int(os.environ.get("ASYNCFLOW_SEEDS", "1"))

SWEEP = settings(
    max_examples=50 * SEEDS,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def check(
    cluster: Cluster,
    program: Program,
    parallel_iterations: int,
    where: Callable[[], str | None] = lambda: None,
    **options: Any,
) -> None:
    graph, fetches, feeds = build(program, parallel_iterations, where)
    state = dict(program.variables)

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph, **options) as session:
            for _ in range(RUNS):
                expected = interpret(program, state)
                actual = await session.run(fetches, feeds)
                for name, value in expected.items():
                    assert_same_bits(name, actual[name], value)

    cluster.run(main)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failure takes hypothesis up to five minutes to simplify
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@given(program=programs(), seed=st.integers(0, 1 << 16), parallel_iterations=st.sampled_from([1, 2, 32]))
@SWEEP
def test_random_programs_on_simulated_devices(
    count: int, program: Program, seed: int, parallel_iterations: int
) -> None:
    note(f"Cluster({count}, seed={seed}, jitter=0.5), Session(seed={seed}, placement_seed={seed})")
    cluster = Cluster(count, seed=seed, jitter=0.5)
    check(cluster, program, parallel_iterations, seed=seed, placement_seed=seed, debug=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@pytest.mark.parametrize("count", [2, 3, 8])
@given(program=programs(), seed=st.integers(0, 1 << 16), parallel_iterations=st.sampled_from([1, 2, 32]))
@SWEEP
def test_random_programs_on_cpus(
    count: int, regions: bool, program: Program, seed: int, parallel_iterations: int
) -> None:
    note(f"Cluster({count}, 'cpu'), Session(seed={seed}, placement_seed={seed}, regions={regions})")
    options: dict[str, Any] = {} if regions else {"seed": seed}
    check(Cluster(count, "cpu"), program, parallel_iterations, placement_seed=seed, regions=regions, **options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 3])
@given(program=programs(), seed=st.integers(0, 1 << 16), parallel_iterations=st.sampled_from([1, 2, 32]))
@settings(SWEEP, max_examples=SWEEP.max_examples // 2)
def test_random_programs_on_cards(count: int, program: Program, seed: int, parallel_iterations: int) -> None:
    note(f"Cluster({count}, 'cuda', seed={seed}), Session(placement_seed={seed})")
    cluster = Cluster(count, "cuda", seed=seed)
    # Fused kernels round transcendental functions in their own way.
    check(cluster, program, parallel_iterations, placement_seed=seed, debug=True, fusion=False)


@pytest.mark.slow
@pytest.mark.parametrize("types", [TYPES, VECTORS], ids=["all", "vectors"])
@pytest.mark.parametrize("seed", range(100 * SEEDS))
def test_random_programs_on_a_cpu_and_cards(seed: int, types: Sequence[Type]) -> None:
    """Small arrays of whole numbers, such as shapes and masks, may be on the host or in the memory of a card.

    Each statement asks for a device at random: with each node on one of its own, there would be few regions.
    """
    random = Random(seed)
    program = write_program(random.randrange, types)
    cluster = Cluster(2 + seed % 2, "mixed", seed=seed)
    options: dict[str, Any] = {"placement_seed": seed if seed % 3 == 0 else None, "device_while": seed % 4 > 1}
    check(cluster, program, 2, lambda: random.choice(cluster.devices), fusion=False, **options)


@pytest.mark.parametrize("kind", ["sim", "cpu", "cuda", "mixed"])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 10 * SEEDS))])
def test_large_programs(seed: int, kind: Literal["sim", "cpu", "cuda", "mixed"]) -> None:
    """Behaviour 92: arrays of 48 KiB to 1 MiB on three devices; `tests.property.large` describes the programs."""
    program = write_large_program(seed, (240, 250) if seed % 2 else (64, 100))
    graph, fetches, feeds = build_large(program, 2, is_open=seed % 3 == 0)
    state = dict(program.variables)

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph, placement_seed=seed, fusion=False) as session:
            for _ in range(RUNS):
                expected = interpret_large(program, state)
                actual = await session.run(fetches, feeds)
                for name, value in expected.items():
                    assert_same(name, actual[name], value)

    Cluster(3, kind, seed=seed).run(main)


def test_the_nodes_are_spread() -> None:
    """Otherwise nothing above would be tested: a random placement uses all devices."""
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        parts = [x * k for k in range(40)]

    async def main(open_session: OpenSession) -> list[str]:
        async with open_session(graph, placement_seed=3) as session:
            return [partition.device for partition in session.plan(parts, [x]).partitions]

    assert Cluster(8).run(main) == Cluster(8).devices
