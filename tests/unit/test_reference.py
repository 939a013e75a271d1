"""Generated files are those that the types give, and the page says all there is to say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lora_api import generate, reference_words
from lora_api.__main__ import main
from lora_api.crd import job_crd, profile_crd
from lora_api.exit_codes import ExitCode
from lora_api.job import ConditionType, Phase
from lora_api.reference import range_of, reference, shown, type_of
from lora_api.schema import walk

ROOT = Path(__file__).resolve().parents[2]


def test_checked_in_files_are_up_to_date():
    assert generate.differences(ROOT) == ""


def test_generation_gives_the_same_text_every_time_and_in_every_process():
    program = "import hashlib; from lora_api.generate import generated_files as g; print(hashlib.sha256(repr(g()).encode()).hexdigest())"
    seeds = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert seeds[0] == seeds[1]


def repository(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_generate_then_verify_agrees(tmp_path, capsys):
    root = str(repository(tmp_path))
    assert main(["generate", "--root", root]) == 0
    assert "wrote docs/reference.md" in capsys.readouterr().out
    assert main(["verify", "--root", root]) == 0
    assert main(["generate", "--root", root]) == 0
    assert capsys.readouterr().out == ""


def test_verify_shows_the_difference_and_says_what_to_run(tmp_path, capsys):
    root = repository(tmp_path)
    main(["generate", "--root", str(root)])
    crd = root / "crds" / "lora-operator.io_loratrainingjobs.yaml"
    crd.write_text(crd.read_text().replace("maximum: 4096", "maximum: 4095", 1))
    capsys.readouterr()
    assert main(["verify", "--root", str(root)]) == 1
    said = capsys.readouterr()
    assert re.search(r"^-.*maximum: 4095\n\+.*maximum: 4096$", said.out, re.MULTILINE)
    assert "make generate" in said.err


def test_a_missing_file_is_a_difference(tmp_path):
    root = repository(tmp_path)
    assert "crds/lora-operator.io_loratrainingprofiles.yaml (generated)" in generate.differences(root)


def test_generating_outside_the_repository_is_refused(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--root", str(tmp_path)])
    assert stopped.value.code == 2


def test_the_chart_has_the_same_crds():
    files = generate.generated_files()
    for name in [name for name in files if name.startswith("crds/")]:
        assert files[name] == files[f"charts/lora-operator/{name}"]


def test_the_page_has_every_field():
    page = reference()
    for crd in (job_crd(), profile_crd()):
        for path, node in walk(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]):
            if path[:1] in (("spec",), ("status",)) and "properties" in node:
                assert f"### `{shown(path)}`" in page
                assert all(f"| `{name}` |" in page for name in node["properties"])


def test_the_page_speaks_of_every_condition_phase_and_exit_code():
    assert list(reference_words.CONDITIONS) == list(ConditionType)
    assert list(reference_words.PHASES) == list(Phase)
    assert list(reference_words.EXIT_CODES) == list(ExitCode)


def test_the_page_speaks_of_every_variable_that_the_programs_read():
    sources = [*(ROOT / "operator").rglob("*.py"), *(ROOT / "trainer_image").rglob("*.py")]
    pattern = re.compile(r"[\"'](LORA_[A-Z_]+|AWS_[A-Z_]+|XDG_[A-Z_]+)[\"']|environ(?:\.get\(|\[)\"([A-Z_]+)\"")
    read = {
        name
        for source in sources
        if source.name != "reference_words.py"
        for found in pattern.findall(source.read_text())
        for name in found
        if name
    }
    internal = {
        "LORA_WORD_DIR",
        "LORA_LAUNCHER_PID",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "PYTHONPATH",
    }  # from the launcher to its workers
    assert read - internal <= {name for name, *_ in reference_words.ENVIRONMENT}


@pytest.mark.parametrize(
    ("path", "mutable"),
    [
        ("spec.config.train", "steps"),
        ("spec.config.save", "save_every"),
        ("spec.runPolicy", "suspend"),
        ("spec.config.sample", "seed"),
    ],
)
def test_mutable_fields_are_marked_so(path, mutable):
    section = reference().split(f"### `{path}`")[1].split("###")[0]
    [row] = [line for line in section.splitlines() if line.startswith(f"| `{mutable}` |")]
    assert "| yes |" in row


def test_fixed_fields_are_marked_so():
    section = reference().split("### `spec.config.network`")[1].split("###")[0]
    assert section.count("| no |") == section.count("\n| `") > 5


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 10_000_000}, "1 to 10000000"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 10}, "above 0, at most 10"),
        ({"type": "number", "minimum": 0, "maximum": 1e6}, "0 to 1000000"),
        ({"type": "integer", "minimum": 32, "maximum": 64, "multipleOf": 16}, "32 to 64, multiple of 16"),
        ({"type": "string", "maxLength": 5}, "at most 5 characters"),
        (
            {"type": "array", "minItems": 1, "maxItems": 8, "items": {"type": "integer", "minimum": 1, "maximum": 2}},
            "1 to 8 items, each 1 to 2",
        ),
        ({"type": "boolean"}, "-"),
    ],
)
def test_ranges_are_said_in_words(node, words):
    assert range_of(node) == words


def test_types_are_said_in_words():
    assert type_of({"type": "array", "items": {"type": "string"}}) == "list of string"
    assert type_of({"type": "object", "additionalProperties": {"type": "string"}}) == "map of string"
    assert type_of({"type": "string", "enum": ["a", "b"]}) == "`a`, `b`"
