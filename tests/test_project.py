"""Rules of the house that matter, held by machine: layers, packaging, pins, sizes, what the documents say."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("deployment", "actors", "router")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_the_customers_layout_stands() -> None:
    for name in ("pyproject.toml", "deployment", "actors", "router", "tests", "configs"):
        assert (ROOT / name).exists(), name


def test_files_are_small() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}

    assert statistics.median(lengths.values()) < 150
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 400} == {}


def test_every_folder_is_a_package_and_every_module_says_what_it_is() -> None:
    for path in SOURCES:
        assert (path.parent / "__init__.py").exists(), path
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.parametrize(
    ("needle", "owners"),
    [
        (r"ray\.remote\(|ray\.init\(", {"deployment/cluster.py", "deployment/commands/up.py", "deployment/client.py"}),
        (r"^\s*(import|from) sglang", {"actors/engine/", "router/net/tokenizer.py"}),
        (r"\btime\.(time|monotonic)\(|os\.environ", {"router/net/", "actors/", "deployment/"}),
    ],
    ids=["Ray's making", "SGLang", "clock and environment"],
)
def test_some_things_are_said_in_one_place_only(needle: str, owners: set[str]) -> None:
    saying = {
        str(path.relative_to(ROOT)) for path in SOURCES if re.search(needle, path.read_text(), flags=re.MULTILINE)
    }

    assert {path for path in saying if not any(path.startswith(owner) for owner in owners)} == set()


def test_dependencies_are_pinned_alike_everywhere() -> None:
    constraints = dict(
        line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras["dev"]]:
        name, version = requirement.split("==")
        assert constraints[name.split("[")[0].lower().replace("_", "-")] == version, requirement


def test_no_file_names_a_registry() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run"):
        assert "://" not in (ROOT / name).read_text(), name


def test_what_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:router|actors|deployment|configs|tests)/[\w./-]+)`", text))

    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_wheel_holds_all_modules_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
        timeout=300,
    )

    (wheel,) = tmp_path.glob("loray-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert packed == {str(path.relative_to(ROOT)) for path in SOURCES}


def test_the_core_runs_without_ray_or_sglang() -> None:
    program = (
        "import sys; from router.core import RouterCore; "
        "assert not {'ray', 'sglang', 'torch', 'zmq', 'aiohttp'} & set(sys.modules), sys.modules.keys()"
    )

    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("path", sorted(ROOT.glob("router/*.py")), ids=lambda path: path.name)
def test_what_is_compiled_uses_nothing_of_other_files(path: Path) -> None:
    """Numba keeps compiled functions until their own file changes: they would go on with another's old constants."""
    tree = ast.parse(path.read_text())
    imports = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("router")
    ]
    foreign = {name.asname or name.name for node in imports for name in node.names}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    compiled = [f for f in functions if any("njit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    used = {node.id for f in compiled for node in ast.walk(f) if isinstance(node, ast.Name)}
    assert used & foreign == set()
