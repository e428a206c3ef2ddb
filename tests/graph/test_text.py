"""The text form of graphs: its look, reading it back, and the messages about bad texts."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import GraphError
from asyncflow.graph.building.build import apply, constant, group, identity, placeholder
from asyncflow.graph.building.scopes import colocate_with, control_dependencies, device, name_scope
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import is_name
from asyncflow.graph.op import Op
from asyncflow.graph.resource import Resource
from asyncflow.graph.text.parse import parse_graph
from asyncflow.graph.text.text import neighbourhood, print_graph
from asyncflow.graph.values.spec import Spec, spec
from asyncflow.graph.verify import verify
from tests.graph.programs import HOLD, OPS, add, branching, counting_loop, handwritten_loop, hold
from tests.texts import texts

HEADER = "graph effects=ordered seed=none\n"


def round_trip(graph: Graph, resources: dict[str, Resource] | None = None) -> Graph:
    text = print_graph(graph)
    parsed = parse_graph(text, ops=OPS, resources=resources or {})
    assert print_graph(parsed) == text
    assert text == print_graph(graph)
    return parsed


def value_round_trip(value: Any) -> Any:
    return round_trip(hold(value=value).graph).nodes[0].attrs["value"]


# -- golden ------------------------------------------------------------------------------------------------------


def test_golden_straight_line() -> None:
    with Graph(effects="unordered", seed=3) as graph:
        x = placeholder("float32", (2, None), name="x")
        with name_scope("layer"), device("cuda:1"), colocate_with(x):
            a, b = apply(OPS["test_split"], x, parts=2, name="halves")
            with control_dependencies([x]):
                add(b, constant([0.1, -0.0], "float32"), name="sum")
        placeholder("string", name="my text")
        group(a, name="done")
    assert print_graph(graph) == (
        "graph effects=unordered seed=3\n"
        "\n"
        "%x = placeholder() {spec=float32[2,?]} : float32[2,?]\n"
        '%layer/halves = test_split(%x) {parts=2} on "cuda:1" with %x : (float32[2,?], float32[2,?])\n'
        "%layer/constant = constant() {value=array(float32[2], [0.1, -0.0])} after(%x) "
        'on "cuda:1" with %x : float32[2]\n'
        '%layer/sum = test_add(%layer/halves:1, %layer/constant) after(%x) on "cuda:1" with %x : float32[2,2]\n'
        '%"my text" = placeholder() {spec=string[...]} : string[...]\n'
        "%done = no_op() after(%layer/halves) : ()\n"
    )
    round_trip(graph)


def test_golden_loop() -> None:
    assert print_graph(counting_loop()) == (
        "graph effects=ordered seed=7\n"
        "\n"
        "%start = constant() {value=array(int32[], 0)} : int32[]\n"
        "%limit = placeholder() {spec=int32[]} : int32[]\n"
        "%step = constant() {value=array(int32[], 1)} : int32[]\n"
        "%loop = while(%start, %limit, %step) {n_vars=1} : (int32[],) {\n"
        '  cond "loop/cond" (%loop/cond/i, %loop/cond/capture_limit, %loop/cond/capture_step) {\n'
        "    %loop/cond/i = parameter() {spec=int32[]} : int32[]\n"
        "    %loop/cond/capture_limit = capture %limit : int32[]\n"
        "    %loop/cond/test_less = test_less(%loop/cond/i, %loop/cond/capture_limit) : bool[]\n"
        "    %loop/cond/capture_step = capture %step : int32[]\n"
        "    return %loop/cond/test_less\n"
        "  }\n"
        '  body "loop/body" (%loop/body/i, %loop/body/capture_limit, %loop/body/capture_step) {\n'
        "    %loop/body/i = parameter() {spec=int32[]} : int32[]\n"
        "    %loop/body/capture_step = capture %step : int32[]\n"
        "    %loop/body/test_add = test_add(%loop/body/i, %loop/body/capture_step) : int32[]\n"
        "    %loop/body/capture_limit = capture %limit : int32[]\n"
        "    return %loop/body/test_add\n"
        "  }\n"
        "}\n"
    )


def test_golden_branch() -> None:
    assert print_graph(branching()).partition("%pick = ")[2] == (
        "cond(%pred, %x) after(%first) : (float32[?],) {\n"
        '  true_branch "pick/true" (%pick/true/capture_x) after(%first) {\n'
        "    %pick/true/capture_x = capture %x : float32[?]\n"
        "    %pick/true/test_add = test_add(%pick/true/capture_x, %pick/true/capture_x) : float32[?]\n"
        "    return %pick/true/test_add\n"
        "  }\n"
        '  false_branch "pick/false" (%pick/false/capture_x) after(%first) {\n'
        "    %pick/false/capture_x = capture %x : float32[?]\n"
        "    return %pick/false/capture_x\n"
        "  }\n"
        "}\n"
    )


def test_golden_back_edge() -> None:
    assert "%merge = merge(%start, %next) : (int32[], int32[])\n" in print_graph(handwritten_loop())


# -- structure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [counting_loop, branching, handwritten_loop, Graph])
def test_programs_read_back(program: Any) -> None:
    parsed = round_trip(program())
    verify(parsed)


def test_bodies_read_back_whole() -> None:
    graph = round_trip(counting_loop())
    loop = graph.node("loop")
    predicate, body = loop.subgraphs
    assert type(predicate) is type(body) is Subgraph
    assert (predicate.parent, predicate.root, predicate.label) == (graph, graph, "loop/cond")
    assert [x.name for x in body.inputs] == ["loop/body/i:0", "loop/body/capture_limit:0", "loop/body/capture_step:0"]
    assert body.captures[loop.inputs[2]] is body.inputs[2]
    assert body.results == [graph.tensor("loop/body/test_add")]
    with pytest.raises(GraphError, match="loop/body is finished"), body:
        constant(1)


def test_outer_controls_read_back() -> None:
    graph = round_trip(branching())
    first = graph.node("first")
    assert [list(body.outer_controls) for body in graph.node("pick").subgraphs] == [[first], [first]]


def test_back_edge_reads_back() -> None:
    graph = round_trip(handwritten_loop())
    assert graph.node("merge").inputs[1] is graph.tensor("next")


def test_a_parsed_graph_grows_without_name_clashes() -> None:
    graph = round_trip(counting_loop())
    with graph:
        assert constant(1, name="start").name == "start_1:0"


def test_nodes_remember_their_line() -> None:
    graph = parse_graph(HEADER + "\n%x = placeholder() {spec=bool[]} : bool[]")
    assert str(graph.node("x").location) == "<text>:3"


def test_comments_and_layout_mean_nothing() -> None:
    text = HEADER + "# why\n%x =\n   placeholder() { spec = bool[] , } : bool[] # what"
    with pytest.raises(GraphError, match="an attr's name"):
        parse_graph(text)
    assert len(parse_graph(text.replace(", }", "}")).nodes) == 1


def test_nodes_nest_a_hundred_deep() -> None:
    lines, ends = [], []
    for depth in range(100):
        lines.append(f'%c{depth} = test_hold() : () {{\nbody "b{depth}" () {{')
        ends.append("return } }")
    graph = parse_graph(HEADER + "\n".join(lines + ends), ops=OPS)
    assert print_graph(round_trip(graph)) == print_graph(graph)
    verify(graph)


def test_resources_are_declared_once_and_given_back() -> None:
    first, second = Resource("v", None), Resource("v", None)
    with Graph() as graph:
        for resource in (first, second, first):
            graph.add_node(HOLD, (), {"on": (resource,)}, ())
    text = print_graph(graph)
    assert "resource @v = \"Resource('v')\"\nresource @v_1 = \"Resource('v')\"\n" in text
    parsed = round_trip(graph, {"v": first, "v_1": second})
    assert [node.attrs["on"][0] for node in parsed.nodes] == [first, second, first]
    with pytest.raises(GraphError, match=r"no resource is given for @v_1 .*pass resources="):
        parse_graph(text, ops=OPS, resources={"v": first})


@pytest.mark.parametrize("name", ["a b", 'say "hi"', "new\nline", "π", "\u2028", "x.", "-", "%"])
def test_odd_names_are_quoted(name: str) -> None:
    with Graph() as graph:
        identity(constant(1, name=name))
    assert round_trip(graph).nodes[0].name == name


# -- values ------------------------------------------------------------------------------------------------------

VALUES = [
    None,
    True,
    0,
    -(10**30),
    1 << 4000,
    0.1,
    1e300,
    5e-324,
    float("inf"),
    float("-inf"),
    complex(1.5, -0.0),
    "",
    'quote " back \\ tab \t nul \0 é \ud800 \ud83d\ude00',
    (),
    (1,),
    (1, (2, [3, None])),
    [],
    {"a": 1, 2: (3,), None: [], 1.5: {}},
    slice(None, 3, -1),
    ...,
    np.dtype("float32"),
    np.dtypes.StringDType(),
    np.dtype(object),
    np.dtype(ml_dtypes.bfloat16),
    spec("int8", ()),
    spec("float64"),
    spec("variant", (None, 3)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_values_read_back(value: Any) -> None:
    found = value_round_trip(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_and_signed_zero_read_back() -> None:
    assert np.isnan(value_round_trip(float("nan")))
    assert np.signbit(value_round_trip(-0.0))


ARRAYS = [
    np.array(3, np.int32),
    np.array([[1, -2], [3, 4]], np.int8),
    np.array([True, False]),
    np.array(2**64 - 1, np.uint64),
    np.array([0.1, np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32),
    np.array([0.1, 65504, 6e-8], np.float16),
    np.array([1 / 3, 5e-324]),
    np.array([1 / 3], np.longdouble) / 3,
    np.array([complex(0.1, -0.0), complex(np.nan, np.inf)], np.complex64),
    np.array([0.1, 3e38], ml_dtypes.bfloat16),
    np.array([0x7FC00001], np.uint32).view(np.float32),
    np.array(["a", 'b"\n', ""], np.dtypes.StringDType()),
    np.array([f"row {i}" for i in range(100)], np.dtypes.StringDType()).reshape(4, 25),
    np.array("one", np.dtypes.StringDType()),
    np.arange(100, dtype=np.int16).reshape(2, 5, 10),
    np.linspace(0, 1, 33),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.arange(99, dtype=">f8"),
    np.zeros((2, 0, 3), np.float32),
    np.zeros((1,) * 32, np.uint8),
    np.arange(50) % 2 == 0,
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}{value.shape}"[:40])
def test_arrays_read_back_bit_by_bit(value: np.ndarray[Any, Any]) -> None:
    found = value_round_trip(value)
    native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    assert (found.dtype, found.shape) == (native.dtype, native.shape)
    assert not found.flags.writeable
    if value.dtype.kind == "T":
        assert found.tolist() == value.tolist()
    else:
        assert found.tobytes() == native.tobytes()


@pytest.mark.parametrize("value", [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.float64("nan")])
def test_numpy_scalars_read_back(value: np.generic) -> None:
    found = value_round_trip(value)
    assert type(found) is type(value)
    assert found.tobytes() == value.tobytes()


class _Odd:
    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize("value", [_Odd(), print, {1, 2}, b"x", [{"a": _Odd()}], {(1,): 2}, np.array([None]), Op])
def test_values_without_text_are_refused_by_node_and_attr(value: Any) -> None:
    node = hold(value=value)
    with pytest.raises(GraphError, match=r"attr 'value' of node 'hold' \(test_hold\) has no text form: .*\n  built at"):
        print_graph(node.graph)
    assert neighbourhood(node).startswith("  > %hold = test_hold() {value=")


def test_values_nested_without_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(GraphError, match="nested deeper than 64 levels"):
        print_graph(hold(value=endless).graph)


def test_neighbourhood_shortens_large_arrays() -> None:
    line = neighbourhood(hold(a=np.zeros(10**6), b="x" * 1000))
    assert "a=array(float64[1000000], ...)" in line
    assert len(line) < 200


# -- refusals ----------------------------------------------------------------------------------------------------

BAD = [
    ("", "line 1, column 1: expected 'graph', found the end of the text"),
    ("graph effects=some seed=none", "expected 'ordered' or 'unordered', found 'some'"),
    ("graph effects=ordered seed=1.5", "expected an int or none as seed"),
    (HEADER + "%x = placeholder() {spec=bool[]}", "expected ':', found the end of the text"),
    (HEADER + "%x = placeholder( {spec=bool[]} : bool[]", r"expected '\)', found '\{'"),
    (HEADER + "%x = nothing_like_it() : bool[]", "no op is named 'nothing_like_it'"),
    (HEADER + "%x = identity(%y) : bool[]", "%y is not built in this graph or body"),
    (HEADER + "%x = identity(%x) : bool[]", "%x is used before the line that builds it"),
    (HEADER + "%x = no_op() after(%y) : ()\n%y = no_op() : ()", "%y is used before the line that builds it"),
    (HEADER + "%x = no_op() : ()\n%x = no_op() : ()", "line 3, column 1: two nodes are named 'x'"),
    (HEADER + '%"" = no_op() : ()', "may not be empty"),
    (HEADER + '%"a:b" = no_op() : ()', "line 2, column 1: a node is named 'a:b'; .* has no ':' in it"),
    (HEADER + "%x = identity(%y) : bool[]\n%z = (", "line 2, column 15: %y is not built"),
    (HEADER + "%x = no_op() : ()\n%y = identity(%x) : bool[]", "%x has 0 outputs"),
    (HEADER + "%x = placeholder() {spec=bool[]} : int8[]", r"gives bool\[\], but the text says int8\[\]"),
    (HEADER + "%x = placeholder() {spec=bool[]} : (bool[],)", r"gives bool\[\], but the text says \(bool\[\]\)"),
    (HEADER + "%x = placeholder() {spec=bool[2]} : bool[3]", r"gives bool\[2\], but the text says bool\[3\]"),
    (HEADER + "%x = placeholder() {__class__=1} : bool[]", "expected an attr's name, found '__class__'"),
    (HEADER + "%x = placeholder() {self=1} : bool[]", "placeholder does not take no inputs and these attrs: TypeError"),
    (HEADER + "%x = placeholder() {spec=1, spec=2} : bool[]", "attr 'spec' is given twice"),
    (HEADER + "%x = constant() {value=3} : int64[]", "constant does not take .*AttributeError"),
    (HEADER + "%x = capture %y : bool[]", "only the body of a branch or loop can capture"),
    (HEADER + "%x = no_op() on cpu : ()", "expected a device in quotes, found 'cpu'"),
    (HEADER + "%x = no_op() with %y:1 : ()", "without an output number"),
    (HEADER + "%x = no_op() : () $", "expected a name, value or mark, found '\\$'"),
    (HEADER + "%x = no_op() : () 3", "expected a node such as '%x = ...', found '3'"),
    (HEADER + "resource @v = 3", "expected a description of the resource in quotes"),
]
BAD_VALUES = [
    ("(1)", "needs a comma"),
    ("@v", "resource @v is not declared"),
    ("float31", "expected a value or a dtype, found 'float31'"),
    ("object", "expected a value or a dtype"),
    ("float32[-1]", "expected an extent"),
    ("float32[1.5]", "expected an extent"),
    ("1" * 5000, "more than 1000 digits"),
    ('"\\q"', "expected an escape"),
    ('"\\u{110000}"', "expected an escape"),
    ('"open', "expected a name, value or mark"),
    ("{[]: 1}", "a key of a dict"),
    ("{1: 1, 1: 2}", "a key of a dict"),
    ("complex(1, 2)", "two floats"),
    ("slice(1)", "slice takes 3 values, found 1"),
    ("array(int32[?], [1])", "expected a full shape"),
    ("array(variant[1], [1])", "expected a full shape"),
    ("array(int32[3], [1, 2])", "the lists do not have 3 items"),
    ("array(int32[2,2], [[1, 2], 3])", "the lists do not have 2 items"),
    ("array(int8[1], [300])", "the data do not make int8"),
    ("array(int8[1], [1.5])", "all of type int"),
    ("array(float32[1], [1])", "all of type float"),
    ('array(float32[1], ["1"])', "all of type float"),
    ("array(string[1], [1])", "all of type str"),
    ('array(string[1], ["\\u{d800}"])', "the data do not make string"),
    ('array(string[1], base64 "AAAA")', "strings are written out"),
    ('array(int32[1000000000000], base64 "AAAA")', "the data do not make int32"),
    ('array(int32[1], base64 "*")', "this is not base64"),
    ('array(bool[1], base64 "Ag==")', "0 or 1"),
    (f"array(int32[0,{10**30}])", "the data do not make int32"),
    (f"array(int32[{'1,' * 65}], [1])", "at most 64 axes"),
    ("scalar(int32[1], [1])", "expected a scalar"),
    ("[" * 100_000, "nested deeper than 128 levels"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse_graph(text)


@pytest.mark.parametrize(
    ("value", "message"), BAD_VALUES, ids=[f"{message}-{i}" for i, (_, message) in enumerate(BAD_VALUES)]
)
def test_bad_values_are_refused(value: str, message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        parse_graph(f"{HEADER}%x = test_hold() {{value={value}}} : ()", ops=OPS)
    assert len(str(caught.value)) < 1000


def test_errors_point_at_the_place() -> None:
    with pytest.raises(GraphError) as caught:
        parse_graph(HEADER + "\n%x = identity(%gone) : bool[]\n")
    assert caught.value.reason == (
        "text line 3, column 15: %gone is not built in this graph or body; a body gets at tensors outside by "
        "'%inner = capture %outer'\n"
        "  3 | %x = identity(%gone) : bool[]\n"
        "                    ^"
    )


def test_deep_bodies_are_refused() -> None:
    text = HEADER + "".join(f'%c{i} = test_hold() : () {{ b "b" () {{' for i in range(10_000))
    with pytest.raises(GraphError, match="branches and loops are nested deeper than 128 levels"):
        parse_graph(text, ops=OPS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("return %loop/cond/test_less", "return %start"), "%start is not built in this graph or body"),
        (("return %loop/cond/test_less", ""), "or 'return', found '}'"),
        (("capture %limit", "capture %nothing"), "%nothing is no earlier node of the graph around this body"),
        (("capture_step = capture %step", "capture_step = capture %limit"), "%limit is captured twice by one body"),
        (('body "loop/body"', 'cond "loop/body"'), "attr 'cond' is given twice"),
        (('cond "loop/cond"', "cond 3"), "expected the body's label in quotes, found '3'"),
        (("capture %limit : int32[]", "capture %limit : ()"), "parameter does not take"),
    ],
)
def test_bad_bodies_are_refused(edit: tuple[str, str], message: str) -> None:
    text = print_graph(counting_loop())
    assert edit[0] in text
    with pytest.raises(GraphError, match=message):
        parse_graph(text.replace(*edit), ops=OPS)


@given(st.text(st.sampled_from("%x@\"':=(){}[],.?#-0123e\\ \nabgraph"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_as_a_graph_error(garbage: str) -> None:
    try:
        parse_graph(HEADER + garbage, ops=OPS)
    except GraphError:
        pass


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_texts_parse_or_are_refused(data: st.DataObject) -> None:
    text = print_graph(counting_loop())
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 20)))
    damaged = text[:start] + data.draw(st.sampled_from(["", " ", "%", "}", "(", "1", '"'])) + text[stop:]
    try:
        parsed = parse_graph(damaged, ops=OPS)
    except GraphError:
        return
    assert print_graph(parse_graph(print_graph(parsed), ops=OPS)) == print_graph(parsed)


# -- random graphs -----------------------------------------------------------------------------------------------

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | texts(max_size=8)
ATTRS = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(["x", "a/b", "3"]) | texts(min_size=1, max_size=5).filter(is_name)
SHAPES = st.none() | st.lists(st.none() | st.integers(0, 4), max_size=3).map(tuple)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_random_graphs_read_back(data: st.DataObject) -> None:
    draw = data.draw
    tensors = []
    with Graph(seed=draw(st.none() | st.integers())) as graph:
        for _ in range(draw(st.integers(1, 6))):
            kind = draw(st.sampled_from(["placeholder", "constant", "hold", "add", "split", "identity"]))
            name = draw(NAMES)
            controls = graph.nodes[: draw(st.integers(0, 2))]
            with control_dependencies(controls), device(draw(st.sampled_from([None, "cpu", "cuda:1"]))):
                if kind == "constant":
                    values = draw(st.lists(st.floats(width=32), max_size=4))
                    tensors.append(constant(np.array(values, np.float32), name=name))
                elif kind == "hold":
                    graph.add_node(HOLD, tensors[:2], {"value": draw(ATTRS)}, (), name=name)
                elif kind == "placeholder" or not tensors:
                    tensors.append(placeholder("float64", draw(SHAPES), name=name))
                elif kind == "split":
                    tensors.extend(apply(OPS["test_split"], tensors[-1], parts=draw(st.integers(0, 3)), name=name))
                elif kind == "add":
                    tensors.append(add(tensors[-1], tensors[-1], name=name))
                else:
                    tensors.append(
                        identity(draw(st.sampled_from(range(len(tensors))).map(tensors.__getitem__)), name=name)
                    )
    parsed = round_trip(graph)
    verify(parsed)
    assert [node.name for node in parsed.nodes] == [node.name for node in graph.nodes]
    assert [[x.name for x in node.inputs] for node in parsed.nodes] == [
        [x.name for x in node.inputs] for node in graph.nodes
    ]


def test_a_line_of_specs_is_a_tuple_exactly_when_the_op_gives_one() -> None:
    with Graph() as graph:
        x = placeholder("bool", ())
        apply(OPS["test_split"], x, parts=1)
        apply(OPS["test_split"], x, parts=0)
    lines = print_graph(graph).splitlines()
    assert re.search(r": bool\[\]$", lines[2])
    assert lines[3].endswith(": (bool[],)")
    assert lines[4].endswith(": ()")
    assert [node.single for node in round_trip(graph).nodes] == [True, False, False]


def test_specs_of_the_text_are_kept_where_they_say_more() -> None:
    text = f"{HEADER}\n%x = placeholder() {{spec=bool[...]}} : bool[2,?]\n"
    graph = parse_graph(text)
    assert graph.tensor("x").spec == Spec(np.dtype(bool), (2, None))
    assert print_graph(graph) == text
