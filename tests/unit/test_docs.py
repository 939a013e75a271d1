"""The pages for users: every manifest in them is valid, every field that they name exists, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lora_api.config import TrainerConfig
from lora_api.job import JobSpec, LoRATrainingJob
from lora_api.memory.words import report_for
from lora_api.problems import parse
from lora_api.profile import LoRATrainingProfile
from lora_api.suggestions import fields_at
from lora_api.yamlfile import read_documents

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCKS = frozenset(fields_at(TrainerConfig, ()))
NEEDED: dict[str, Any] = {
    "model": {"arch": "zimage", "name_or_path": "s3://models/Z-Image"},
    "datasets": [{"folder_path": "s3://datasets/mascot"}],
}
"""What snippets leave out because their page is about something else."""

FIELD = re.compile(
    r"`(?:spec\.)?(?:config\.)?((?:model|network|datasets|train|save|sample|output|resources|runPolicy)(?:\[\])?(?:\.[A-Za-z_]+(?:\[\])?)+)(?:`|: )"
)


def snippets(tmp_path: Path) -> list[tuple[str, Any]]:
    found = []
    for page in PAGES:
        for number, text in enumerate(
            re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), 1
        ):
            file = tmp_path / f"{page.name}-{number}.yaml"
            file.write_text(text)
            found += [(file.name, document.value) for document in read_documents(str(file))]
    return found


def whole(snippet: dict[str, Any]) -> dict[str, Any]:
    """The job of which a snippet shows a part: a job, its spec, its configuration or some blocks of that."""
    if "apiVersion" in snippet:
        return snippet
    spec = snippet.get("spec", snippet if "config" in snippet else {"config": snippet})
    job = {"apiVersion": "lora-operator.io/v1alpha1", "kind": "LoRATrainingJob", "metadata": {"name": "mascot"}}
    return {**job, "spec": {**spec, "config": {**NEEDED, **spec["config"]}}}


def test_every_manifest_of_the_pages_is_valid_as_far_as_it_is_shown(tmp_path):
    jobs = 0
    for name, snippet in snippets(tmp_path):
        if "profile" in snippet:  # values of the chart, which has an image
            profile = {
                "apiVersion": "lora-operator.io/v1alpha1",
                "kind": "LoRATrainingProfile",
                "metadata": {"name": "p"},
            }
            parse(LoRATrainingProfile, {**profile, "spec": {"trainer": {"image": "i"}, **snippet["profile"]}}, name)
        else:
            parse(LoRATrainingJob, whole(snippet), name)
            jobs += 1
    assert jobs > 15


def exists(path: str) -> bool:
    parts = path.replace("[]", "").split(".")
    model = TrainerConfig if parts[0] in BLOCKS else JobSpec
    return parts[-1] in fields_at(model, parts[:-1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_field_that_a_page_names_by_its_path_exists(page):
    assert [path for path in FIELD.findall(page.read_text()) if not exists(path)] == []


def test_a_field_that_does_not_exist_would_be_noticed():
    assert FIELD.findall("`spec.config.train.stepz` and `runPolicy.oomPolicy: Shrink`") == [
        "train.stepz",
        "runPolicy.oomPolicy",
    ]
    assert (exists("train.stepz"), exists("runPolicy.oomPolicy"), exists("datasets[].weight[].value")) == (
        False,
        True,
        True,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_lead_to_one(page):
    for file, heading in re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = (page.parent / file).read_text() if file else page.read_text()
        titles = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in anchors, f"{page.name} -> {file}#{heading}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert [
        page.name
        for page in PAGES
        if page.parent.name == "docs" and page.name != "index.md" and f"({page.name})" not in index
    ] == []


def test_the_memory_page_shows_what_validate_says_of_the_job_in_the_readme(tmp_path):
    job = next(whole(snippet) for name, snippet in snippets(tmp_path) if name.startswith("README"))
    lines = report_for(parse(LoRATrainingJob, job).spec.config, None)
    assert "my-style.yaml: " + "\n".join(lines) + "\n```" in (ROOT / "docs" / "memory.md").read_text()
