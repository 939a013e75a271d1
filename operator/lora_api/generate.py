"""The files that are made from the types: written by `generate`, compared by `verify`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from lora_api.crd import job_crd, profile_crd
from lora_api.job import GROUP
from lora_api.reference import reference

COMMAND = "make generate"
HEADER = f"# Generated from operator/lora_api by `{COMMAND}`; do not edit.\n"
CRD_FOLDERS = ("crds", "charts/lora-operator/crds")


def generated_files() -> dict[str, str]:
    """Path below the repository's root, and content, of every generated file."""
    files = {}
    for crd in (job_crd(), profile_crd()):
        text = HEADER + to_yaml(crd)
        for folder in CRD_FOLDERS:
            files[f"{folder}/{GROUP}_{crd['spec']['names']['plural']}.yaml"] = text
    files["docs/reference.md"] = reference()
    return files


def to_yaml(document: dict[str, Any]) -> str:
    """YAML in the order of the data, without anchors; the same text every time."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """No anchors: what is equal is written out again, as people read it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        """Always."""
        return True


def write(root: Path) -> list[str]:
    """Writes what differs below `root`; returns the paths written."""
    written = []
    for name, text in generated_files().items():
        path = root / name
        if _read(path) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(name)
    return written


def differences(root: Path) -> str:
    """A unified diff from the files below `root` to what the types give; empty when they agree."""
    lines: list[str] = []
    for name, text in generated_files().items():
        present = _read(root / name)
        if present != text:
            lines += difflib.unified_diff(
                present.splitlines(keepends=True),
                text.splitlines(keepends=True),
                f"{name} (present)",
                f"{name} (generated)",
            )
    return "".join(lines)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
