"""A class of the package has few attributes, and few of them are booleans."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MOST_ATTRIBUTES = 20
MOST_BOOLEANS = 8

CLASS = re.compile(r"^(class \w+(?:\([^:]*\))?:\n)((?:(?: .*)?\n)+)", re.MULTILINE)
MEMBER = re.compile(r"^(?=    (?:@|def |async def ))", re.MULTILINE)
MAKING = "    def __init__(", "    def __post_init__("

# How many attributes and booleans the classes above a limit have. The list only shrinks.
LARGER: dict[str, tuple[int, int]] = {
    "Run": (36, 6),
    "SimDevice": (32, 1),
    "CudaDevice": (34, 1),
    "Timeline": (29, 1),
    "Progress": (29, 0),
    "CudaSwapping": (28, 5),
    "SessionOptions": (29, 9),
    "SlicedRegion": (26, 9),
    "GradientBody": (26, 1),
    "PickGuide": (21, 2),
    "LoopPool": (25, 4),
    "RegionGenerator": (25, 3),
    "SharedLoop": (24, 0),
    "SharedSets": (23, 1),
    "Subgraph": (23, 1),
    "VertexPool": (24, 3),
    "_Lowering": (23, 1),
    "_TraceBody": (23, 1),
    "Executor": (22, 6),
    "Graph": (22, 1),
    "PartitionRun": (22, 6),
    "BatchMember": (21, 2),
    "FlatBuilder": (21, 1),
}


def attributes(node: ast.ClassDef) -> dict[str, bool]:
    """The attributes of instances that the class itself gives them; True for each that is a boolean.

    They are annotated in the body, named by `__slots__`, or assigned in `__init__` or `__post_init__`.
    """
    found: dict[str, bool] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith(("ClassVar", "Final", "InitVar", "KW_ONLY")):
                found[statement.target.id] = annotation == "bool"
        elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__slots__":
            for each in ast.walk(statement.value):
                if isinstance(each, ast.Constant) and each.value != "__weakref__":
                    found.setdefault(str(each.value), False)
        elif isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__post_init__"):
            for name, is_bool in assigned(statement):
                found[name] = found.get(name, False) or is_bool
    return found


def assigned(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """The attributes of `self` that a function assigns, each with whether it is seen to be a boolean."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    flags = {each.arg for each in arguments if each.annotation is not None and ast.unparse(each.annotation) == "bool"}
    for statement in ast.walk(function):
        if isinstance(statement, ast.AnnAssign) and is_own(statement.target):
            yield ast.unparse(statement.target)[5:], ast.unparse(statement.annotation) == "bool"
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from assigned_by(target, statement.value, flags)


def assigned_by(target: ast.expr, value: ast.expr | None, flags: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of `self` that one assignment sets, each with True if it can only be a boolean.

    Args:
        target: of the assignment.
        value: of the assignment; None if it is a part of a value that cannot be taken apart.
        flags: names of parameters that are booleans.
    """
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
        for part, given in zip(target.elts, values, strict=True):
            yield from assigned_by(part, given, flags)
    elif is_own(target):
        is_constant = isinstance(value, ast.Constant) and isinstance(value.value, bool)
        is_flag = isinstance(value, ast.Name) and value.id in flags
        yield ast.unparse(target)[5:], is_constant or is_flag or isinstance(value, ast.Compare)


def is_own(target: ast.expr) -> bool:
    """True for an attribute of `self`."""
    return isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"


def declarations(text: str) -> Iterator[ast.ClassDef]:
    """The classes of a module without most of their methods, as to parse them all takes long."""
    for header, body in CLASS.findall(text):
        kept = [part for part in MEMBER.split(body) if not MEMBER.match(part) or part.startswith(MAKING)]
        (node,) = ast.parse(header + "".join(kept)).body
        assert isinstance(node, ast.ClassDef)
        yield node


def counts(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the numbers of attributes and booleans of instances of each class below `folder`, with their bases'
    attributes.
    """
    modules = sorted(folder.rglob("*.py"))
    classes = {node.name: node for path in modules for node in declarations(path.read_text(encoding="utf-8"))}

    def all_of(node: ast.ClassDef) -> dict[str, bool]:
        bases = [classes[name] for base in node.bases if (name := ast.unparse(base).partition("[")[0]) in classes]
        inherited = {name: is_bool for base in bases if base is not node for name, is_bool in all_of(base).items()}
        return inherited | attributes(node)

    return {name: (len(found), sum(found.values())) for name, node in classes.items() if (found := all_of(node))}


def test_no_class_has_many_attributes_or_booleans() -> None:
    found = {
        name: count
        for name, count in counts(ROOT / "asyncflow").items()
        if count[0] > MOST_ATTRIBUTES or count[1] > MOST_BOOLEANS
    }
    assert found == LARGER, "group by subject what belongs together; take a class that has shrunk from the list"


def test_each_way_of_giving_an_attribute_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    __slots__ = ('a', 'b', '__weakref__')\n"
        "    def __init__(self, a: int, is_d: bool) -> None:\n"
        "        self.a, self.c = a, a > 1\n"
        "        self.is_d = is_d\n"
        "        self.e: bool = find()\n"
        "        other.f = 1\n"
        "@dataclass\n"
        "class B(A):\n"
        "    WORD: ClassVar[str] = ''\n"
        "    given: InitVar[int]\n"
        "    g: bool = field(init=False)\n"
        "    def __post_init__(self) -> None:\n"
        "        self.g, (self.h, self.i) = True, (1, 2)\n"
    )
    assert counts(tmp_path) == {"A": (5, 3), "B": (8, 4)}
