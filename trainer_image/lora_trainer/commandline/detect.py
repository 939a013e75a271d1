"""Which family a model folder is of, from its small JSON files. Imports no library of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_api.archs import Arch
from lora_trainer.commandline.refusal import Refusal

INDEX = "model_index.json"

PIPELINES: dict[str, tuple[str, ...]] = {
    "Flux2KleinPipeline": ("flux2_klein_4b", "flux2_klein_9b"),
    "Flux2Pipeline": ("flux2_dev",),
    "FluxPipeline": ("flux1",),
    "ZImagePipeline": ("zimage",),
    "StableDiffusionPipeline": ("sd15",),
    "StableDiffusionXLPipeline": ("sdxl",),
    "QwenImagePipeline": ("qwen_image",),
    "WanPipeline": ("wan21", "wan22"),
}
"""`_class_name` of model_index.json -> families; those that the trainer does not have are passed over."""

KLEIN_TEXT_WIDTH = {7680: "flux2_klein_4b", 12288: "flux2_klein_9b"}
"""Width of the denoiser's text input in the released models."""


def arch_of(folder: Path) -> str:
    """`model.arch` of a model folder.

    Raises:
        Refusal: When it is no model folder, or of no one family.
    """
    if not folder.is_dir():
        raise Refusal(f"--base_model: the folder {folder} does not exist; models are not downloaded here")
    if not (folder / INDEX).is_file():
        raise Refusal(f"--base_model: {folder} has no {INDEX}; expected the folder of a diffusers pipeline")
    pipeline = _read(folder / INDEX).get("_class_name")
    known = [arch for arch in PIPELINES.get(str(pipeline), ()) if arch in tuple(Arch)]
    if len(known) > 1:
        found = _among(folder, known)
        known = [found] if found in known else known
    if len(known) == 1:
        return known[0]
    choices = known or [str(arch) for arch in Arch]
    why = "may be one of several families" if known else "is not known to belong to one family"
    raise Refusal(f"--arch is needed: the pipeline {pipeline!r} of {folder} {why}; say --arch {' or '.join(choices)}")


def _among(folder: Path, known: list[str]) -> str | None:
    """The family of a pipeline that several share."""
    if "flux2_klein_4b" in known:
        path = folder / "transformer" / "config.json"
        return KLEIN_TEXT_WIDTH.get(_read(path).get("joint_attention_dim", 0)) if path.is_file() else None
    return "wan22" if (folder / "transformer_2").is_dir() else "wan21"


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"--base_model: {path} is not readable as JSON: {error}") from error
    return value if isinstance(value, dict) else {}
