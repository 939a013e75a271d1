"""The shape of the repository: what must be a package, what must never be one, what keeps files readable and builds repeatable."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "operator").rglob("*.py"), *(ROOT / "trainer_image").rglob("*.py")])
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
PACKAGES = ["operator/lora_api", "operator/lora_operator", "trainer_image/lora_trainer"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_folders_around_the_packages_are_no_packages():
    """A package named `operator` would shadow the standard library's."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "trainer_image" / "__init__.py").exists()


def test_the_packages_are_packages_and_so_are_their_folders():
    for package in PACKAGES:
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_wheel_has_the_three_packages():
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == PACKAGES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_enough_to_read(source):
    assert len(source.read_text().splitlines()) <= 400


def functions(source):
    tree = ast.parse(source.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_the_core_decides_without_waiting_and_in_short_functions():
    for source in (ROOT / "operator" / "lora_operator" / "core").rglob("*.py"):
        for function in functions(source):
            assert isinstance(function, ast.FunctionDef), f"{source.name}: {function.name} is async"
            body = function.end_lineno - function.lineno + 1
            assert body <= 60, f"{source.name}: {function.name} has {body} lines with its docstring"


REFERENCES = sorted((ROOT / "tests" / "reference").glob("*.py"))
REFERENCE_MAY_IMPORT = {"av", "diffusers", "numpy", "PIL", "safetensors", "torch", "transformers"}


def imported(source):
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module}"


def test_reference_implementations_know_nothing_of_the_trainer():
    assert len(REFERENCES) > 8
    for source in REFERENCES:
        foreign = {
            name
            for name in imported(source)
            if name.partition(".")[0] not in REFERENCE_MAY_IMPORT | sys.stdlib_module_names
            and not f"{name}.".startswith("tests.reference.")
        }
        assert foreign == set(), f"{source.name} is to be independent"
        assert "__import__" not in source.read_text()
        assert "importlib" not in source.read_text()


def test_every_lint_ignore_says_why():
    reasoned = re.compile(r"# noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)* +(- )?\w")
    silent = [
        f"{source.relative_to(ROOT)}:{number}"
        for source in SOURCES
        for number, line in enumerate(source.read_text().splitlines(), 1)
        if "# noqa" in line and not reasoned.search(line)
    ]
    assert silent == []


def test_every_dependency_says_what_it_is_for():
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("dependencies = [")[1].split("]")[0]
    assert [line for line in block.strip().splitlines() if "#" not in line] == []


def entries(file):
    """Requirement lines with their hashes, one string each."""
    text = re.sub(r"\s*\\\n\s*", " ", file.read_text())
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda path: path.name)
def test_requirements_are_pinned_with_hashes(file):
    assert entries(file)
    for entry in entries(file):
        assert re.match(
            r"^[a-z0-9][a-z0-9._-]*(\[[a-z0-9,_-]+\])?==\S+( ;.*?)?( --hash=sha256:[0-9a-f]{64})+$", entry
        ), entry[:80]


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda path: path.name)
def test_requirements_name_no_place_to_get_them_from(file):
    assert not re.search(r"://|--index-url|--extra-index-url|--find-links|--trusted-host", file.read_text())


def pinned(name):
    return dict(entry.split(" ")[0].split("==") for entry in entries(ROOT / "requirements" / name))


def test_the_operator_is_not_given_torch():
    assert not {"torch", "diffusers", "transformers", "peft", "safetensors"} & set(pinned("operator.txt"))


def test_what_is_tested_is_what_is_shipped():
    tested = pinned("dev.txt")
    for name in ("operator.txt", "trainer.txt"):
        differing = {package: version for package, version in pinned(name).items() if tested.get(package) != version}
        assert differing == {}


def test_the_project_is_licensed():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_papers_of_the_house_are_there_and_their_links_lead_somewhere():
    for paper in [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")] + sorted(
        (ROOT / "docs").glob("*.md")
    ):
        for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", paper.read_text()):
            assert (paper.parent / target).exists(), f"{paper.relative_to(ROOT)} -> {target}"
