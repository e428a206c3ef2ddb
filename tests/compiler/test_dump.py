"""Changes of passes, as text."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.pipeline import PASSES

FOLDED = """\
--- multiply_1:0 before fold
+++ multiply_1:0 after fold
@@ -2,5 +2,5 @@
 %constant = constant() {value=array(float32[], 2.0)} : float32[]
 %constant_1 = constant() {value=array(float32[], 3.0)} : float32[]
-%multiply = multiply(%constant, %constant_1) : float32[]
+%multiply = constant() {value=array(float32[], 6.0)} : float32[]
 %multiply_1 = multiply(%feed, %multiply) : float32[4]
 %fetch = fetch(%multiply_1) : ()"""


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("float32", (4,), name="x")


@pytest.fixture
def y(x: af.Tensor) -> af.Tensor:
    return x * (af.constant(2, "float32") * 3)


def changes(fetch: af.Tensor, feed: af.Tensor, **options: object) -> dict[str, str]:
    """Return the changes of each pass that runs, in the order in which passes run."""
    told: dict[str, str] = {}

    def tell(name: str, change: str) -> None:
        assert name not in told
        told[name] = change

    af.Session(dump=tell, **options).plan(fetch, [feed])  # type: ignore[arg-type]
    return told


def test_a_change_is_a_diff(x: af.Tensor, y: af.Tensor) -> None:
    told = changes(y, x)
    assert told["fold"] == FOLDED
    assert told["cse"] == ""
    assert "-%x = placeholder()" in told["extract"], "the first diff is with what the user has built"
    assert '+%multiply_1 = multiply(%feed, %multiply) on "cpu:0" : float32[4]' in told["place"]


def test_passes_run_in_the_order_of_the_list(x: af.Tensor, y: af.Tensor) -> None:
    on_cards = {
        "homes",
        "host_vectors",
        "device_loops",
        "host_values",
        "assign_streams",
        "fuse",
        "delay_recvs",
        "move_saved",
    }
    if_asked = {"segments", "plan_memory"}
    assert list(changes(y, x)) == [each.name for each in PASSES if each.name not in on_cards | if_asked]
    assert "segments" in changes(y, x, saved_values="recompute")
    assert "plan_memory" in changes(y, x, memory_limit=1 << 30)
    assert "assign_streams" in changes(y, x, compute_streams=2)


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"without": ["fold", "cse"]}, {"fold", "cse"}),
        ({"without": {"regions"}}, {"regions"}),
        ({"regions": False}, {"regions"}),
        ({"loop_batching": False}, {"batch_loops"}),
        ({"check_numerics": True}, {"hoist", "batch_loops"}),
        (
            {"optimize": False},
            {
                "loop_variables",
                "fold",
                "simplify",
                "cse",
                "hoist",
                "choose_saved",
                "batch_loops",
                "prune",
                "last_reads",
                "free_early",
            },
        ),
    ],
)
def test_passes_that_are_left_out(x: af.Tensor, y: af.Tensor, options: dict[str, object], left_out: set[str]) -> None:
    assert changes(y, x).keys() - changes(y, x, **options).keys() == left_out, "list new passes above"


def test_optimizations_leave_control_flow_written_by_hand_alone(x: af.Tensor, y: af.Tensor) -> None:
    _, live = af.raw.switch(y, True)
    assert changes(live, x).keys() & {"fold", "simplify", "cse", "hoist", "prune"} == set()


def test_objects_without_text_form_are_shown_all_the_same(x: af.Tensor, y: af.Tensor) -> None:
    """Regions with their nodes, and streams."""
    told = changes(af.matmul(x, af.tanh(y)), x)
    assert "\n+%region = region(%feed) {region=<3 nodes>} on " in told["regions"]
    assert "\n+  | %tanh = tanh(%multiply_1) on " in told["regions"]
    big = af.placeholder("float32", (512, 512))
    branches = [af.matmul(big, big + float(k)) for k in range(2)]
    assert "  # stream 1" in changes(branches[0] @ branches[1], big, compute_streams=2)["assign_streams"]


def test_it_is_printed_to_the_standard_error(x: af.Tensor, y: af.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    af.Session(dump="fold").plan(y, [x])
    assert capsys.readouterr() == ("", f"{FOLDED}\n")
    af.Session(dump="cse").plan(y, [x])
    assert capsys.readouterr().err == "cse changes nothing\n"
    af.Session(dump=True).plan(y, [x])
    printed = capsys.readouterr().err
    assert printed.startswith("--- multiply_1:0 before extract\n")
    assert printed.endswith("bind changes nothing\n")


def test_the_head_names_what_the_plan_gives(x: af.Tensor) -> None:
    def head(*fetches: object) -> str:
        told: list[str] = []
        af.Session(dump=lambda _, change: told.append(change)).plan(fetches, [x])
        return told[0].splitlines()[0]

    values = [x * float(k) for k in range(5)]
    weight = af.Variable(np.float32(1), name="w")
    assert head(*values) == "--- multiply:0, multiply_1:0, multiply_2:0, 2 more before extract"
    assert head(weight, values[0].node) == "--- w, multiply before extract"
    assert head() == "--- nothing before extract"
