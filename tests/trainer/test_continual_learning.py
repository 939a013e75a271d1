"""The example of docs/continual-learning.md, on a tiny model: every part of it does what the page says."""

from __future__ import annotations

import torch
from safetensors.torch import load

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.exit_codes import ExitCode
from lora_api.yamlfile import read_documents
from lora_trainer import checkpoint
from lora_trainer.course import Course
from tests.trainer.jobs import ROOT, Job, make_pictures
from tests.trainer.test_resume import same_training

EXAMPLE = ROOT / "examples" / "continual-learning.yaml"


def earlier_adapter(job: Job) -> str:
    """The file of an adapter that was trained before."""
    first = job.copy("earlier").change(network={"type": "lora", "linear": 16}, train={"steps": 2})
    assert first.run() == ExitCode.DONE
    return str(first.folder / "run" / layout.FINAL / "adapter.safetensors")


def example(job: Job, folders) -> Job:
    """The example's own blocks, with places, sizes and lengths of the tests."""
    config = read_documents(str(EXAMPLE))[0].value["spec"]["config"]
    TrainerConfig.model_validate(config)
    for dataset, folder in zip(config["datasets"], folders, strict=True):
        dataset |= {"folder_path": str(folder), "resolution": [64]}
        for point in dataset["weight"]:
            point["at_step"] = point.get("at_step", 0) // 1000
    config["train"] |= {"dtype": "fp32", "stages": [{"steps": 2, "batch_size": 2}, {"steps": 4, "batch_size": 1}]}
    config["network"]["init_from"] = earlier_adapter(job)
    found = job.copy("whole").change(**{name: config[name] for name in ("trigger_word", "network", "train")})
    found.config["train"].pop("steps")  # the stages say it
    found.config["datasets"] = config["datasets"]
    return found


def test_the_example_trains_as_its_page_says_and_resumes_to_the_bit(tmp_path, tiny_model_folder, monkeypatch):
    folders = [make_pictures(tmp_path / name, [(64, 64)] * 3) for name in ("old", "new", "toys")]
    base = Job(tmp_path / "base", tiny_model_folder("zimage"), folders[0], tmp_path / "cache")
    whole, rates, seen = example(base, folders), [], []
    made = Course._order

    def order(course, stage, share, seed):
        found = made(course, stage, share, seed)
        count = 2 * (2 if stage.number == 0 else 4)
        seen.extend(course._samples[found.batch(position)[0]].dataset for position in range(count))
        return found

    monkeypatch.setattr(Course, "_order", order)
    hook = lambda session, step: rates.append([group["lr"] for group in session.optimizer.param_groups])  # noqa: E731
    assert whole.run(hook=hook) == ExitCode.DONE
    assert {rate for step in rates for rate in step} == {1e-4, 1e-4 * (2e-5 / 1e-4)}
    assert seen.count(2) == 4  # a third of twelve
    assert seen[:4].count(0) > seen[:4].count(1)
    assert seen[4:].count(0) < seen[4:].count(1)

    before, after = load_final(whole.config["network"]["init_from"]), load(whole.newest()[checkpoint.ADAPTER])
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == ("feed_forward" in name), name

    monkeypatch.setattr(Course, "_order", made)
    broken = whole.copy("broken")
    assert broken.run(stop_after=2) == ExitCode.PREEMPTED
    assert broken.run(stop_after=5) == ExitCode.PREEMPTED
    assert broken.run() == ExitCode.DONE
    assert same_training(whole, broken)


def load_final(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
