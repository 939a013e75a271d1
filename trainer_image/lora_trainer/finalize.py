"""The end of a job: the adapter in its asked format, the samples, what it was made from; the manifest last."""

from __future__ import annotations

import logging
import platform
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from lora_api import layout
from lora_api.config import SampleConfig
from lora_api.run import FinalManifest, RunConfig, config_hash
from lora_api.store import Store
from lora_trainer import clock
from lora_trainer.checkpoint import entry
from lora_trainer.export import export_final
from lora_trainer.export_metadata import base_revision, header_of
from lora_trainer.fence import Fence
from lora_trainer.out_of_memory import is_out_of_memory
from lora_trainer.prepare import Prepared
from lora_trainer.records import Told, write_records
from lora_trainer.report import dataset_facts
from lora_trainer.runtime import TORCH_DTYPE, device_name
from lora_trainer.sampling import draw_samples
from lora_trainer.settings import Settings

log = logging.getLogger(__name__)

Report = Callable[[str], None]
_PACKAGES = ("lora-operator", "torch", "diffusers", "transformers", "peft", "safetensors")


def draw(prepared: Prepared, sample: SampleConfig, folder: Path, step: int, report: Report) -> list[Path]:
    """One picture for each prompt, in `folder`; what `report` raises ends it between two pictures.

    Pictures that the device has no room for are left out: a smaller run would not help, and training is worth more.
    """
    try:
        return _draw(prepared, sample, folder, step, report)
    except RuntimeError as error:
        if prepared.spread.sharded or not is_out_of_memory(error):
            raise
        log.warning("no samples are drawn, out of device memory: %s; lower sample.width and height", error)
        return []


def _draw(prepared: Prepared, sample: SampleConfig, folder: Path, step: int, report: Report) -> list[Path]:
    total = len(prepared.conditions)
    report(f"drawing sample 1/{total}")
    conditions, negative = prepared.conditions_now()
    drawn = draw_samples(
        prepared.model,
        conditions,
        negative if sample.guidance_scale > 0 else None,
        folder,
        width=sample.width,
        height=sample.height,
        steps=sample.sample_steps,
        guidance_scale=sample.guidance_scale,
        seed=sample.seed,
        num_frames=sample.num_frames,
        fps=sample.fps,
        texts=[
            {
                "prompt": prompt,
                "seed": str(sample.seed + number),
                "steps": str(sample.sample_steps),
                "guidance_scale": f"{sample.guidance_scale:g}",
                "step": str(step),  # of training
            }
            for number, prompt in enumerate(prepared.prompts)
        ],
        on_drawn=lambda drawn: report(f"drawing sample {min(drawn + 1, total)}/{total}"),
    )
    prepared.spread.settled()
    return drawn


def put_samples(prepared: Prepared, settings: Settings, store: Store | None, step: int, report: Report) -> None:
    """Draws the samples of a step into the run directory.

    Args:
        prepared: Model and prompts.
        settings: Sizes and number of steps.
        store: None: only takes part in drawing, as every rank has to where the model is sharded.
        step: Updates done.
        report: Told what is being done.
    """
    if not prepared.conditions:
        return
    with tempfile.TemporaryDirectory(prefix="lora-samples-") as scratch:
        for path in draw(prepared, settings.sample, Path(scratch), step, report):
            if store is not None:
                store.put(layout.samples_folder(step) + path.name, path)


def finish(
    prepared: Prepared,
    settings: Settings,
    run: RunConfig,
    *,
    store: Store,
    fence: Fence,
    step: int,
    told: Told,
    report: Report,
) -> FinalManifest:
    """Writes `final/`; the job has succeeded when this returns.

    Raises:
        FencedError: When a newer start exists; the manifest is not written then.
        StoreError: When the store can't be used.
    """
    with tempfile.TemporaryDirectory(prefix="lora-final-") as scratch:
        folder = Path(scratch)
        report("exporting the adapter")
        facts = facts_of(prepared, settings, run, step) | {
            "completed_at": clock.now(), "dtype": str(prepared.precision), "device": device_name(prepared.model.device),
        }  # fmt: skip
        save = settings.save
        adapter = export_final(
            prepared.model,
            prepared.adapter,
            folder,
            dtype=TORCH_DTYPE[save.dtype],
            metadata=header_of(facts, settings.config, name=run.job_name, completed_at=facts["completed_at"]),
            formats=save.formats,
            weights_bin=save.weights_bin,
        )
        exported = sorted(path for path in folder.rglob("*") if path.is_file())
        drawn = draw(prepared, settings.sample, folder / "samples", step, report) if prepared.conditions else []
        report("writing the report")
        facts["memory_gib"] = prepared.memory.facts()
        exported += write_records(folder, facts, settings, store=store, told=told, drawn=drawn)
        files = {path.relative_to(folder).as_posix(): path for path in exported}
        samples = {f"sample-{path.name}": path for path in drawn}
        for number, (name, path) in enumerate((files | samples).items(), 1):
            report(f"writing {number}/{len(files) + len(samples)} files")
            store.put(layout.FINAL + name, path)
        fence.check()
        manifest = FinalManifest(
            step=step,
            start=fence.claim.start,
            uid=run.uid,
            config_hash=config_hash(run.config),
            completed_at=clock.now(),
            adapter=adapter.relative_to(folder).as_posix(),
            samples=tuple(samples),
            files=tuple(entry(name, path.read_bytes()) for name, path in (files | samples).items()),
        )
    store.put(layout.FINAL_MANIFEST, manifest.model_dump_json(by_alias=True).encode())
    return manifest


def facts_of(prepared: Prepared, settings: Settings, run: RunConfig, step: int) -> dict[str, Any]:
    """What an adapter was made from, as plain data."""
    config = settings.config
    return {
        "job": f"{run.namespace}/{run.job_name}",
        "base_model": config.model.name_or_path,
        "base_model_hash": prepared.model.denoiser_identity,
        "base_model_revision": base_revision(prepared.model.folder),
        "arch": str(config.model.arch),
        "rank": config.network.linear,
        "alpha": config.network.linear_alpha or config.network.linear,
        "network": config.network.model_dump(mode="json"),
        "trigger_word": config.trigger_word or "",
        "dataset_digest": prepared.data_digest,
        "dataset": dataset_facts(prepared.samples, config.trigger_word),
        "samples": len(prepared.samples),
        "steps": step,
        "seed": config.train.seed,
        "config": config.model_dump(mode="json"),
        "config_hash": config_hash(run.config),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
