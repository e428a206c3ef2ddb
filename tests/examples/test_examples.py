"""Every program in `examples/` runs, agrees with its own check, and writes the stated files."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import asyncflow as af
from asyncflow.cli.main import main as command
from examples import (
    agent,
    coroutine_nodes,
    data_flow,
    goes_on,
    ilqr,
    ngram_beam_search,
    pagerank,
    pipeline,
    producer_and_consumers,
    syntax_trees,
    word_lstm,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {
        "agent",
        "character_lstm",  # in a file of its own
        "coroutine_nodes",
        "data_flow",
        "digits",  # in a file of its own
        "dqn",  # in a file of its own
        "goes_on",
        "ilqr",
        "ngram_beam_search",
        "pagerank",
        "pipeline",
        "producer_and_consumers",
        "server",  # in a file of its own
        "syntax_trees",
        "word_lstm",
    }


@pytest.mark.parametrize(
    ("main", "arguments", "written"),
    [
        (pagerank.main, ["--runs", "4", "--files", "60"], {"pagerank.html", "pagerank.json"}),
        (
            coroutine_nodes.main,
            ["--count", "6", "--latency", "0.005"],
            {"coroutine_nodes_1.html", "coroutine_nodes_16.html"},
        ),
        (ngram_beam_search.main, ["--prompts", "2"], {"ngram_beam_search.html"}),
        (pipeline.main, ["--layers", "3", "--steps", "5", "--batch", "2", "--size", "8"], {"pipeline.html"}),
        (
            syntax_trees.main,
            ["--files", "30", "--steps", "20", "--hidden", "16", "--target", "0.6"],
            {"syntax_trees.html"},
        ),
        (
            word_lstm.main,
            [
                *("--files", "60", "--steps", "30", "--batch", "16"),
                *("--hidden", "16", "--words", "200", "--target", "120"),
            ],
            {"word_lstm.html"},
        ),
        (
            data_flow.main,
            ["--files", "150", "--steps", "60", "--hidden", "32", "--target", "0.4"],
            {"data_flow.html"},
        ),
    ],
    ids=["pagerank", "coroutine_nodes", "ngram_beam_search", "pipeline", "syntax_trees", "word_lstm", "data_flow"],
)
def test_example_passes_its_own_check_and_writes_its_timelines(
    main: Callable[[list[str]], int],
    arguments: list[str],
    written: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "new" / "folder"
    assert main([*arguments, "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed
    assert {file.name for file in folder.iterdir()} == written
    for file in folder.iterdir():
        assert str(file) in printed
        assert file.stat().st_size > 10_000


def test_pagerank_says_so_when_numpy_disagrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagerank, "solve_directly", lambda imports, damping: np.zeros(len(imports.names)))
    assert pagerank.main(["--runs", "2", "--files", "20", "--output", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_imports_are_resolved_as_python_does() -> None:
    source = "import os.path, re\nfrom . import events\nfrom ..json.decoder import JSONDecoder as Decoder\n"
    names = list(pagerank.imports(ast.parse(source), "asyncio.inner"))
    assert names == ["os.path", "re", "asyncio.inner.events", "asyncio.json.decoder.JSONDecoder"]


def test_import_graph_joins_modules_of_the_library() -> None:
    graph = pagerank.read_import_graph(most_files=120)
    edges = {(graph.names[a], graph.names[b]) for a, b in zip(graph.importers, graph.imported, strict=True)}
    assert ("asyncio.runners", "asyncio.events") in edges  # from . import events
    assert ("asyncio.base_events", "collections") in edges
    assert all(importer != imported for importer, imported in edges)
    assert not [name for name in graph.names if "test" in name.split(".")]


def test_ranks_of_a_graph_worked_out_by_hand() -> None:
    # Modules 0 and 1 import 2, which imports nothing. With damping 1/2: r2 = r0 + (r0 + r1) / 2, and r0 = r1.
    imports = pagerank.ImportGraph(["zero", "one", "two"], np.array([0, 1]), np.array([2, 2]))
    (ranks,) = af.run(pagerank.rank_for_all(pagerank.build_pagerank(imports), [0.5]))
    np.testing.assert_allclose(ranks, [0.25, 0.25, 0.5], atol=1e-9)
    np.testing.assert_allclose(pagerank.solve_directly(imports, 0.5), [0.25, 0.25, 0.5])


def test_both_branches_of_pagerank_are_taken(tmp_path: Path) -> None:
    pagerank.main(["--runs", "2", "--files", "60", "--output", str(tmp_path)])
    events = json.loads((tmp_path / "pagerank.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"pagerank/body/cond/true/index_add", "pagerank/body/cond/false/index_add"} <= names


def test_sentences_of_a_docstring_are_words_and_marks() -> None:
    source = '"""Return the size of x.  It is 0\n    or more, and so on.\n\n    no sentence here\n    """'
    assert [" ".join(words) for words in word_lstm.sentences_in(source.encode())] == [
        "return the size of x .",
        "it is 0 or more , and so on .",
    ]


def test_data_flow_of_a_function_shares_the_values_of_variables() -> None:
    source = "def f(x, n):\n    size = x.size // 2\n    for a in x:\n        size += a\n    return g(size * size, -n)\n"
    (found,) = data_flow.functions_in(ast.parse(source))
    offsets, children = np.asarray(found.flow.offsets), np.asarray(found.flow.children)

    def below(vertex: int) -> str:
        inner = [below(child) for child in children[offsets[vertex] : offsets[vertex + 1]].tolist()]
        name = found.operators.get(vertex) or found.names[vertex] or found.kinds[vertex]
        return f"{name}({', '.join(inner)})" if inner else name

    floor, add, mult = (f"{name}(left({{}}), right({{}}))" for name in ("FloorDiv", "Add", "Mult"))
    size = add.format(floor.format("size(x)", "2"), "element(x)")
    assert [below(vertex) for vertex in found.operators] == [
        floor.format("size(x)", "2"),
        size,
        mult.format(size, size),
    ]
    assert len(set(found.kinds)) == 7, "what goes into no operator is left out"
    assert found.kinds.count("argument") == 1, "both uses share it"
    assert found.flow.roots.tolist() == [found.flow.n_vertices - 1]


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.5, 1e-12]])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    values: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        with pagerank.progress("damping 0.9") as report:
            for value in values:
                report(value)
        assert "iteration" in capsys.readouterr().out


SMALL_PIPELINE = ["--layers", "4", "--steps", "6", "--batch", "2", "--size", "8"]


def test_pipeline_says_so_when_numpy_disagrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "compute_directly", lambda model, xs: np.zeros_like(xs))
    assert pipeline.main([*SMALL_PIPELINE, "--output", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_pipeline_explains_its_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.main([*SMALL_PIPELINE, "--output", str(tmp_path)])
    assert "asked for" not in capsys.readouterr().out
    pipeline.main([*SMALL_PIPELINE, "--explain", "--output", str(tmp_path)])
    assert "asked for 'cpu:1'" in capsys.readouterr().out


def test_pipeline_on_simulated_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{EXAMPLES / 'pipeline.py'}:main"
    arguments = ["simulate", target, "--devices", "4 x v100, nvlink2", *SMALL_PIPELINE, "--output", str(tmp_path)]
    assert command(arguments) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed
    # Each device has a layer, and one link from the layer below.
    for index in range(4):
        streams = re.findall(rf"^sim:{index} +(compute|peer)", printed, re.MULTILINE)
        assert streams == (["compute", "peer"] if index else ["compute"])


def test_each_sentence_goes_to_one_trainer() -> None:
    """No word is lost and none is seen twice."""
    found = af.run(producer_and_consumers.main(100))
    assert sum(words for _, words in found) == sum(map(len, producer_and_consumers.sentences(100)))
    assert all(steps for steps, _ in found)


def test_training_that_is_killed_ends_as_if_undisturbed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["goes_on", "--steps", "140"])
    goes_on.main()
    told = capsys.readouterr().out
    assert told.count("killed\n") == 3
    assert re.findall(r"begins after step (\d+)", told)[0] == "0"
    assert told.endswith("the same loss, to the bit\n")


def test_the_pole_is_swung_up_and_each_iteration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ilqr.main([]) == 0
    printed = capsys.readouterr().out
    costs = [float(found) for found in re.findall(r"costs +([0-9.]+)", printed)]
    assert 10 < len(costs) < 60
    assert costs[-1] < 8 < 150 < costs[0]
    assert printed.count("PASS") == 3


def test_a_pole_that_does_not_stand_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ilqr, "simulated", lambda forces: np.zeros(4))
    assert ilqr.main(["--moments", "8", "--iterations", "2"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL: the pole stands" in printed
    assert "FAIL: plain Python agrees" in printed


def test_agents_share_limits_and_a_replay_sends_no_mail(capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.main(["--tasks", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("PASS") == 4
    assert "sent 0 mails and asked 0 times" in printed


def test_agents_that_answer_wrongly_are_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "decide", lambda task, notes: (agent.DONE, "42"))
    assert agent.main(["--tasks", "2", "--chance", "0"]) == 1
    assert "FAIL: every answer is right" in capsys.readouterr().out
