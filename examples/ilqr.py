"""Swing up a pole on a cart: iterative LQR as one graph, whose loops are the loops of the method.

A cart of 1 kg moves on a rail, and a pole hangs from it. Which forces on the cart bring the pole up and keep it there?
The method (iLQR; Li and Todorov, 2004) starts with any forces and repeats three steps:

- It expands dynamics and costs around the current motion: `vmap` of `jacobian` and `hessian` over all moments.
- It goes backward in time, a `scan` that solves a small linear system (`linalg.solve`) for each moment. The result is a
  change of the forces, and a rule how they react to another motion.
- It goes forward with that change, a `scan` of the dynamics. While the costs do not fall, it takes half of the change:
  the line search, a `while_loop` inside the `while_loop` of the method.

The program has no derivative written by hand, and no loop in Python. It prints each iteration as it ends.

    python examples/ilqr.py
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

STEP_S = 0.05
"""Seconds between two forces."""

CART_KG, POLE_KG, POLE_M, GRAVITY = 1.0, 0.3, 0.5, 9.81

STATES, FORCES = 4, 1
"""Numbers of a state (place of the cart, angle of the pole, and how fast both change), and forces."""

START = (0.0, math.pi, 0.0, 0.0)
"""The pole hangs down; the angle 0 is upright."""

Array = NDArray[np.float64]
Motion = tuple[af.Tensor, af.Tensor, af.Tensor, af.Tensor]
"""States and forces of all moments, the state after the last one, and the costs of it all."""


# -- the task --------------------------------------------------------------------------------------------------------


def step(x: af.Tensor, u: af.Tensor) -> af.Tensor:
    """Return the next state."""
    place, angle, speed, spin = (x[k] for k in range(STATES))
    sine, cosine = af.sin(angle), af.cos(angle)
    pull = POLE_KG * sine * (POLE_M * spin**2 - GRAVITY * cosine)
    faster = (u[0] + pull) / (CART_KG + POLE_KG * sine**2)
    speed += STEP_S * faster
    spin += STEP_S * (GRAVITY * sine - faster * cosine) / POLE_M
    return af.stack([place + STEP_S * speed, angle + STEP_S * spin, speed, spin])


def cost(x: af.Tensor, u: af.Tensor) -> af.Tensor:
    """Return what one moment costs: for a pole that is not up, for motion, and for force."""
    still = 0.1 * x[0] ** 2 + 0.01 * x[2] ** 2 + 0.01 * x[3] ** 2
    return STEP_S * (1 - af.cos(x[1]) + still + 0.02 * u[0] ** 2)


def last_cost(x: af.Tensor) -> af.Tensor:
    """Return what the last state costs: the pole should stand still above the middle."""
    return 100 * (1 - af.cos(x[1])) + 5 * (x[0] ** 2 + x[2] ** 2 + x[3] ** 2)


# -- the method ------------------------------------------------------------------------------------------------------


def moved(motion: Motion, changes: af.Tensor, reactions: af.Tensor, share: af.Tensor) -> Motion:
    """Go forward: return the motion with a share of the changes, and the reactions to what that brings."""
    states, forces, _, _ = motion

    def forward(state: tuple[af.Tensor, ...], row: tuple[af.Tensor, ...]) -> tuple[af.Tensor, ...]:
        x, _, _, total = state
        old_x, old_u, change, reaction = row
        u = old_u + share * change + reaction @ (x - old_x)
        return step(x, u), x, u, total + cost(x, u)

    first = af.constant(START), af.constant(START), af.zeros((FORCES,)), af.constant(0.0)
    following, xs, us, totals = af.scan(forward, (states, forces, changes, reactions), first)
    last = following[-1]
    return xs, us, last, totals[-1] + last_cost(last)


def improved(motion: Motion, caution: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    """Go backward: return for each moment the change of its forces, and their reactions to another state."""
    states, forces, last, _ = motion

    def expanded(x: af.Tensor, u: af.Tensor) -> tuple[af.Tensor, ...]:
        """Return the derivatives of the next state and of the costs, by state and forces."""
        both = af.concat([x, u])
        x, u = both[:STATES], both[STATES:]
        costs = cost(x, u)
        return af.jacobian(step(x, u), both), af.gradients(costs, both), af.hessian(costs, both)

    def backward(state: tuple[af.Tensor, ...], row: tuple[af.Tensor, ...]) -> tuple[af.Tensor, ...]:
        """Return slope and curvature of the costs to come, by the state before a moment, from the ones after it."""
        slope, curvature, _, _ = state
        dynamics, costs, curved = row
        q = costs + dynamics.mT @ slope
        qq = curved + dynamics.mT @ curvature @ dynamics
        qx, qu = q[:STATES], q[STATES:]
        qxx, qux, quu = qq[:STATES, :STATES], qq[STATES:, :STATES], qq[STATES:, STATES:]
        careful = quu + caution * af.eye(FORCES)
        solved = -af.linalg.solve(careful, af.concat([qu[:, None], qux], axis=1))
        change, reaction = solved[:, 0], solved[:, 1:]
        slope = qx + reaction.mT @ (quu @ change + qu) + qux.mT @ change
        curvature = qxx + reaction.mT @ quu @ reaction + reaction.mT @ qux + qux.mT @ reaction
        return slope, (curvature + curvature.mT) / 2, change, reaction

    end = last_cost(last)
    first = (
        *(af.gradients(end, last), af.hessian(end, last)),
        *(af.zeros((FORCES,)), af.zeros((FORCES, STATES))),
    )
    _, _, changes, reactions = af.scan(backward, af.vmap(expanded)(states, forces), first, reverse=True)
    return changes, reactions


def build(moments: int, most: int) -> tuple[af.Graph, tuple[af.Tensor, ...]]:
    """Build the graph of the method.

    Args:
        moments: number of forces.
        most: iterations at most.

    Returns:
        The graph, and what to watch in each iteration: the costs, the share of the change that was taken, the caution
        of the change, and the forces and the last state of the motion.
    """
    watched: list[af.Tensor] = []

    def goes_on(n: af.Tensor, motion: Motion, caution: af.Tensor, gain: af.Tensor) -> af.Tensor:
        return af.logical_and(n < most, gain > 1e-3 * motion[3])

    def iteration(n: af.Tensor, motion: Motion, caution: af.Tensor, gain: af.Tensor) -> tuple[object, ...]:
        changes, reactions = improved(motion, caution)

        def is_worse(share: af.Tensor, tried: Motion) -> af.Tensor:
            return af.logical_and(tried[3] >= motion[3], share > 1e-3)

        def with_half(share: af.Tensor, tried: Motion) -> tuple[af.Tensor, Motion]:
            return share / 2, moved(motion, changes, reactions, share / 2)

        whole = af.constant(1.0)
        begin = whole, moved(motion, changes, reactions, whole)
        share, found = af.while_loop(is_worse, with_half, begin, name="line_search")
        is_better = found[3] < motion[3]
        best = tuple(af.where(is_better, new, old) for new, old in zip(found, motion, strict=True))
        # The expansion holds near the motion alone: be more cautious after a change that was too bold for it.
        more = af.where(is_better, af.maximum(caution / 4, 1e-3), caution * 8)
        gained = af.where(is_better, motion[3] - best[3], af.where(caution < 1e8, math.inf, 0.0))
        watched[:] = best[3], share, caution, best[1], best[2]
        return n + 1, best, more, gained

    with af.Graph() as graph:
        # Any forces will do, but without any the pole would hang still, where all slopes are 0.
        forces = af.constant(np.sin(0.3 * np.arange(moments))[:, None])
        still = af.zeros((moments, STATES)), forces, af.constant(START), af.constant(0.0)
        nothing = af.zeros((moments, FORCES)), af.zeros((moments, FORCES, STATES)), af.constant(0.0)
        begin = 0, moved(still, *nothing), af.constant(1.0), af.constant(math.inf)
        af.while_loop(goes_on, iteration, begin, name="ilqr")
    return graph, tuple(watched)


# -- the program -----------------------------------------------------------------------------------------------------


def simulated(forces: Array) -> Array:
    """Return the last state that these forces lead to, in plain Python."""
    place, angle, speed, spin = START
    for (force,) in forces.tolist():
        sine, cosine = math.sin(angle), math.cos(angle)
        pull = POLE_KG * sine * (POLE_M * spin**2 - GRAVITY * cosine)
        faster = (force + pull) / (CART_KG + POLE_KG * sine**2)
        speed += STEP_S * faster
        spin += STEP_S * (GRAVITY * sine - faster * cosine) / POLE_M
        place, angle = place + STEP_S * speed, angle + STEP_S * spin
    return np.array([place, angle, speed, spin])


async def solve(moments: int, most: int) -> tuple[list[float], Array, Array]:
    """Return the costs after each iteration, and the forces and the last state of the motion."""
    graph, watched = build(moments, most)
    costs: list[float] = []
    motion: list[Array] = []
    async with af.Session(graph) as session:
        async for seen in session.stream(watched):
            total, share, caution, *motion = seen
            costs.append(float(total))
            print(f"  iteration {len(costs):3}  costs {total:9.4f}  step {share:.4f}  caution {caution:.1e}")
    forces, last = motion
    return costs, forces, last


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the pole stands at the end, by plain Python too; else 1."""
    parser = argparse.ArgumentParser(description="Swing up a pendulum on a cart by iterative LQR.")
    parser.add_argument("--moments", type=int, default=60, help=f"forces, one for each {STEP_S} s")
    parser.add_argument("--iterations", type=int, default=60, help="at most so many")
    options = parser.parse_args(argv)

    began = time.perf_counter()
    costs, forces, (place, angle, speed, spin) = af.run(solve(options.moments, options.iterations))
    off = math.remainder(angle, 2 * math.pi)
    print(
        f"{len(costs)} iterations in {time.perf_counter() - began:.1f} s; after {options.moments * STEP_S:.1f} s the "
        f"cart is at {place:+.3f} m and the pole {off:+.3f} rad from upright, at {speed:+.3f} m/s and {spin:+.3f} rad/s"
    )
    checks = {
        "the pole stands": abs(off) < 0.1 and max(abs(speed), abs(spin)) < 0.3,
        "the costs never rise": all(b <= a for a, b in pairwise(costs)),
        "plain Python agrees": np.allclose(simulated(forces), [place, angle, speed, spin], atol=1e-6),
    }
    for what, holds in checks.items():
        print(f"{'PASS' if holds else 'FAIL'}: {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
