"""The Python programs in the README and the guide run as they stand there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.packaging.pages import GUIDE, ROOT, RUNNER, programs_on

PAGES = ("README.md", *GUIDE)
CHECK_S = 240.0

PYRIGHT = {
    "typeCheckingMode": "strict",
    "reportMissingImports": False,  # PyTorch, where it is not installed
    # What a lambda gets, of a loop say, no checker can know; this family reports each of its parameters.
    "reportUnknownArgumentType": False,
    "reportUnknownLambdaType": False,
    "reportUnknownMemberType": False,
    "reportUnknownParameterType": False,
    "reportUnknownVariableType": False,
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the programs of all pages."""
    for page in PAGES:
        for number, program in enumerate(programs_on(page)):
            (tmp_path / f"{Path(page).stem.lower()}_{number}.py").write_text(program, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_programs_pass_mypy_strictly(programs: Path) -> None:
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    checked = [str(path) for path in sorted(programs.glob("*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *checked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECK_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_programs_pass_pyright_strictly(programs: Path) -> None:
    config = programs / "pyrightconfig.json"
    config.write_text(json.dumps({**PYRIGHT, "include": [str(programs)], "extraPaths": [str(ROOT)]}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "-p", str(config), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECK_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_programs_on_the_page_run(page: str, tmp_path: Path) -> None:
    """Programs run one after another in one process: most of the time would be that of the imports. Cards are the
    stand-in's.
    """
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER, encoding="utf-8")
    on_cpus, on_cards = list[Path](), list[Path]()
    for number, program in enumerate(programs_on(page)):
        if "import torch" in program and find_spec("torch") is None:
            continue  # too large for `make test` to install it
        path = tmp_path / f"program_{number}.py"
        path.write_text(program, encoding="utf-8")
        (on_cards if '"cuda:' in program else on_cpus).append(path)
    for paths, module in (on_cpus, []), (on_cards, ["-m", "tests.fake_cupy"]):
        done = subprocess.run(
            [sys.executable, "-W", "error", *module, str(runner), *paths],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert [str(path) for path in paths if str(path) not in done.stdout] == []


BODIES = {
    "no JSON": (b"{", 422),
    "no UTF-8": (b'"\xff"', 422),
    "a mapping": (b'{"x": 1}', 422),
    "rows of several lengths": (b"[[1], [1, 2]]", 422),
    "text": (b'["a"]', 422),
    "too many brackets": (b"[" * 100_000, 422),
    "too large a number": (b"[1" + b"0" * 400 + b"]", 422),
    "null": (b"null", 422),
    "too few numbers": (b"[1, 2, 3]", 422),
    "a row": (b"[" + b"0.5, " * 511 + b"1]", 200),
}


async def test_the_guides_server_answers_any_body() -> None:
    """A body that cannot be read is the client's fault."""
    (program,) = (program for program in programs_on("docs/howto/web_server.md") if "async def predict" in program)
    module = ModuleType("guide_server")
    exec(compile(program, "guide_server", "exec"), vars(module))
    app, statuses = module.app, {}
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for name, (content, _) in BODIES.items():
                statuses[name] = (await client.post("/predict", content=content)).status_code
    assert statuses == {name: status for name, (_, status) in BODIES.items()}
