"""The HTML timeline: one file, no network, and names that stay text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from asyncflow.profiler.colours import CONTROL_FLOW_COLOUR, OTHERS_COLOUR, PALETTE
from asyncflow.profiler.html import render_html, timeline_data
from asyncflow.runtime.watch.trace import Firing, MemorySample, Trace, Transfer


class Page(HTMLParser):
    """The elements of a page and the text of its data element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._in_data = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_data = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data


def render(trace: Trace) -> str:
    return "".join(render_html(trace))


def embedded(trace: Trace) -> dict[str, Any]:
    data = json.loads(Page(render(trace)).data)
    assert isinstance(data, dict)
    return data


def named(name: str) -> Trace:
    return Trace(firings=[Firing(0, name, name, name, "cpu:0", "inline", 0, 1, 2, name, "ok", name)])


def test_the_page_holds_every_firing(trace: Trace) -> None:
    data = embedded(trace)
    lanes = [
        (group["device"], lane["label"], len(lane["start"])) for group in data["groups"] for lane in group["lanes"]
    ]
    assert lanes == [("cpu:0", "inline", 2), ("cpu:0", "async", 2), ("cpu:0", "async 2", 1), ("cpu:1", "compute", 1)]
    assert data["wall"] == 10_000
    assert data["dropped"] == 3


def test_columns_of_a_lane(trace: Trace) -> None:
    data = embedded(trace)
    (lane,) = data["groups"][1]["lanes"]
    assert (lane["start"], lane["duration"], lane["queued"], lane["run"]) == ([4_000], [5_000], [999], [0])
    assert data["sites"][lane["site"][0]] == ["loop/matmul", "matmul", "model.py:7"]
    assert data["tags"][lane["tag"][0]] == "loop/0"
    assert data["outputs"][lane["output"][0]] == "float32[64,64]"
    assert data["statuses"][lane["status"][0]] == "ok"


def test_attempts_of_functions_with_limits_reach_the_page(trace: Trace) -> None:
    trace.firings = [trace.firings[0]._replace(attempt=number) for number in (1, 2)]
    assert [lane["attempt"] for lane in embedded(trace)["groups"][0]["lanes"]] == [[1], [2]]
    assert "(attempt ${row.attempt[i]})" in render(trace)


def test_sites_know_their_family_in_the_legend(trace: Trace) -> None:
    data = embedded(trace)
    shown = [
        (op, data["legend"][number][0]) for (_, op, _), number in zip(data["sites"], data["families"], strict=True)
    ]
    assert shown == [("less", "less"), ("http_get", "http_get"), ("matmul", "matmul")]
    assert [name for name, _ in data["legend"]] == ["http_get", "matmul", "less"]


def test_names_are_shown_whole(trace: Trace) -> None:
    """A cell of the table breaks lines; no rule and no code cuts text, but for labels in slices."""
    text = render(trace)
    style, script = text[text.index("<style>") : text.index("</style>")], text[text.index("<script>") :]
    assert "text-overflow" not in style
    assert re.search(r"td\.node \{[^}]*white-space: normal; overflow-wrap: anywhere", style)
    assert [line for line in script.splitlines() if "…" in line and "fitLabel" not in line and "keep" not in line] == [
        line for line in script.splitlines() if "2 * colours" in line
    ]


def test_statuses_reach_the_page(trace: Trace) -> None:
    data = embedded(trace)
    seen = [data["statuses"][s] for group in data["groups"] for lane in group["lanes"] for s in lane["status"]]
    assert sorted(seen) == ["cancelled", "error", "ok", "ok", "ok", "ok"]


def test_runs_and_memory_reach_the_page(trace: Trace) -> None:
    data = embedded(trace)
    assert [(row["label"], row["name"], row["start"], row["duration"], row["status"]) for row in data["runs"]] == [
        ("runs", ["predict"], [0], [9_000], ["ok"]),
        ("runs 2", ["run 1"], [2_000], [8_000], ["error"]),
    ]
    assert data["groups"][1]["memory"] == [{"label": "memory", "time": [4_000, 9_000], "nbytes": [8_192, 16_384]}]


def test_requests_of_runs_reach_the_page(trace: Trace) -> None:
    assert timeline_data(trace)["requests"] == [(0, "cuda:0", 29, 0, 4, 35), (1, "cuda:0", 0, 1, 2, 3)]


def test_counters_of_saved_values_reach_the_page_where_any_moved() -> None:
    samples = [MemorySample("sim:0", 1, 9, 5, host=2, disk=1), MemorySample("sim:0", 2, 9, 6, host=1, coming=2)]
    (group,) = embedded(Trace(memory=samples))["groups"]
    rows = [(row["label"], row["nbytes"]) for row in group["memory"]]
    assert rows == [("memory", [9, 9]), ("saved, away", [3, 1]), ("saved, coming back", [0, 2])]


def test_transfers_reach_the_page_by_start_with_the_lanes_of_their_ends(trace: Trace) -> None:
    start = trace.firings[0].scheduled_ns
    trace.transfers += [
        Transfer(0, "loop/matmul/recv", "loop/0", "cpu:1", "cpu:0", start + 9_100, start + 9_200, 16_384),
        Transfer(0, "loop/loop_cond/recv", "loop/0", "cpu:0", "cpu:1", start + 3_100, start + 3_200, 1),
    ]
    data = embedded(trace)
    moved = data["transfers"]
    assert [data["tensors"][k] for k in moved["tensor"]] == ["loop/loop_cond", "loop/matmul"]
    assert [data["tags"][k] for k in moved["tag"]] == ["loop/0", "loop/0"]
    assert (moved["run"], moved["nbytes"]) == ([0, 0], [1, 16_384])
    assert moved["source"] == {"group": [0, 1], "lane": [-1, 3], "index": [-1, 0], "time": [3_100, 8_999]}
    assert moved["target"] == {"group": [1, 0], "lane": [-1, -1], "index": [-1, -1], "time": [3_200, 9_200]}


def test_strings_are_written_once() -> None:
    one = Firing(0, "node", "op", "", "cpu:0", "inline", 0, 1, 2, "", "ok", "")
    data = timeline_data(Trace(firings=[one._replace(started_ns=k, ended_ns=k + 1) for k in range(100)]))
    assert data["sites"] == [("node", "op", "")]


@pytest.mark.parametrize(
    "name",
    ["</script><b>", "<!--<script>", "]]>", "{{data}}", "/*{{script}}*/", "/*{{style}}*/", "\u2028'\"\\", "\ud800"],
)
def test_a_hostile_name_changes_nothing_but_the_data(name: str) -> None:
    page, plain = Page(render(named(name))), Page(render(named("plain")))
    assert page.elements == plain.elements
    assert json.loads(page.data)["sites"] == [[name, name, name]]


def test_the_page_asks_the_network_for_nothing(trace: Trace) -> None:
    text = render(trace)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    for tag, attributes in Page(text).elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,"


def test_the_page_forbids_itself_the_network(trace: Trace) -> None:
    policies = [a["content"] for tag, a in Page(render(trace)).elements if a.get("http-equiv")]
    assert policies == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"]


def test_the_script_never_makes_markup_from_data(trace: Trace) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", render(trace))


def test_every_slot_of_the_template_is_filled(trace: Trace) -> None:
    assert "{{" not in render(trace)


def test_an_empty_trace_makes_a_page_that_says_so() -> None:
    text = render(Trace())
    assert "This trace is empty" in text
    assert embedded(Trace()) == {
        "wall": 0,
        "dropped": 0,
        "groups": [],
        "transfers": {
            "tensor": [],
            "tag": [],
            "run": [],
            "nbytes": [],
            "stall": [],
            "source": {"group": [], "lane": [], "index": [], "time": []},
            "target": {"group": [], "lane": [], "index": [], "time": []},
        },
        "legend": [],
        "families": [],
        "colours": {"iterations": list(PALETTE), "control flow": CONTROL_FLOW_COLOUR, "others": OTHERS_COLOUR},
        "runs": [],
        "requests": [],
        "sites": [],
        "tags": [],
        "outputs": [],
        "statuses": [],
        "tensors": [],
    }
