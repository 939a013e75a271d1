"""The flags of `lora-trainer train`: what they decide, and what they say when they can't be meant. No torch here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lora_api import layout
from lora_api.config import TrainerConfig
from lora_api.run import CheckpointManifest, FinalManifest, RunFile
from lora_api.stores import DirectoryStore
from lora_trainer.commandline import flags, rundir
from lora_trainer.commandline.command import begin, plan_run
from lora_trainer.commandline.refusal import Refusal
from lora_trainer.retention import remove_old_checkpoints
from tests.local_runs import job_manifest
from tests.unit.test_aitoolkit import preset, put

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model and three pictures, which is the current one."""
    monkeypatch.chdir(tmp_path)
    model("model")
    Path("data").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8)).save(f"data/{number}.png")
    return tmp_path


def model(folder, pipeline="ZImagePipeline", **transformer):
    (Path(folder) / "transformer").mkdir(parents=True, exist_ok=True)
    (Path(folder) / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    (Path(folder) / "transformer" / "config.json").write_text(json.dumps(transformer))


BASE = ("--base_model", "model", "--train_data", "data", "--output_dir", "out")


def plan(*arguments, variables=None):
    return plan_run(flags.parse(arguments, "train"), variables or {})


def config_of(*arguments):
    return plan(*BASE, *arguments).run.config


def refusal(*arguments, base=BASE, code=64):
    with pytest.raises(Refusal) as caught:
        plan(*base, *arguments)
    assert caught.value.code == code
    return str(caught.value)


# ------------------------------------------------------------------ what flags decide
def test_the_usual_flags_make_a_run_without_any_manifest(here):
    run = plan(*BASE, "--resolution", "1024", "--batch_size", "4", "--num_epochs", "10", "--device", "cpu").run
    assert run.config.model.name_or_path == str(here / "model")
    assert run.config.datasets[0].resolution == (1024,)
    assert run.config.train.batch_size == 4
    assert (run.store.directory, run.path, run.attempt, run.if_exists) == (str(here), "out", 1, "Refuse")


def test_every_flag_reaches_its_field(here):
    config = config_of(
        "--arch", "zimage", "--resolution", "512", "768", "--caption_dropout", "0.1", "--num_repeats", "2",
        "--trigger_word", "007", "--network_type", "lokr", "--rank", "8", "--alpha", "4", "--steps", "50",
        "--batch_size", "2", "--gradient_accumulation", "3", "--optimizer", "lion", "--learning_rate", "1e-3", "--lr_scheduler", "cosine",
        "--warmup_steps", "5", "--mixed_precision", "float16", "--gradient_checkpointing", "--seed", "7", "--save_every", "9",
        "--max_step_saves", "2", "--prompt", "a cat, sitting", "--prompt", "a dog", "--device", "cpu",
    )  # fmt: skip
    wire = config.model_dump(mode="json")
    found = {}
    for name, path in flags.FIELDS.items():
        owner = wire
        for part in path.split("."):
            owner = owner[0][part] if isinstance(owner, list) else owner[part]
        found[name] = owner
    assert found == {
        "base_model": str(here / "model"), "arch": "zimage", "train_data": str(here / "data"), "resolution": [512, 768], "caption_dropout": 0.1,
        "num_repeats": 2, "trigger_word": "007", "network_type": "lokr", "rank": 8, "alpha": 4, "steps": 50, "batch_size": 2,
        "gradient_accumulation": 3, "optimizer": "lion", "learning_rate": 1e-3, "lr_scheduler": "cosine", "warmup_steps": 5,
        "mixed_precision": "fp16", "gradient_checkpointing": True, "seed": 7, "save_every": 9, "max_step_saves": 2,
        "prompt": ["a cat, sitting", "a dog"], "device": "cpu",
    }  # fmt: skip


def test_dashes_and_short_names_are_the_same_flags(here):
    assert config_of("--batch-size=2", "--lr", "1e-3").train.lr == 1e-3


def test_lists_are_written_with_commas_or_apart(here):
    assert config_of("--resolution", "512,768").datasets[0].resolution == (512, 768)
    assert config_of("--resolution", "512", "--resolution", "768").datasets[0].resolution == (512, 768)


def test_several_folders_are_several_datasets_and_share_their_flags(here):
    Path("more").mkdir()
    config = config_of("--train_data", "more", "--caption_dropout", "0.2", "--set", "datasets[1].num_repeats=3")
    assert [(Path(d.folder_path).name, d.caption_dropout, d.num_repeats) for d in config.datasets] == [
        ("data", 0.2, 1),
        ("more", 0.2, 3),
    ]


def test_set_reaches_any_field_with_the_type_it_has(here):
    config = config_of(
        "--set", "train.weight_decay=1e-2", "--set", "network.ignore_if_contains=attn", "--set", "datasets.caption_ext=001",
        "--set", "train.train_unet=true",
    )  # fmt: skip
    assert config.train.weight_decay == 0.01
    assert config.network.ignore_if_contains == ("attn",)
    assert config.datasets[0].caption_ext == "001"


def test_every_field_of_the_types_can_be_set_or_has_a_flag(here):
    said = flags.build_parser("train").format_help()
    assert "Each has at_step, value." in " ".join(said.split())
    for path in flags.settable():
        assert path in flags.FIELDS.values() or re.search(rf"^  {re.escape(path)}\n      \S", said, re.MULTILINE), path


def test_every_flag_is_explained_with_its_default():
    said = flags.build_parser("train").format_help()
    for name in flags.FIELDS:
        assert f"--{name}" in said
    assert re.search(r"--learning_rate X\s+Learning rate.*?\(default:\s+0\.0001\)", said, re.DOTALL)


# ------------------------------------------------------------------ epochs
def test_epochs_are_told_in_steps(here):
    found = plan(
        *BASE, "--num_epochs", "10", "--batch_size", "2", "--resolution", "512", "768", "--nproc-per-node", "2"
    )
    assert found.run.config.train.steps == 15
    assert found.notes[-1] == (
        "10 epochs of 6 samples, 4 in each step, are 15 steps (batch 2 x accumulation 1 x processes 2)"
    )


STAGES = "train.stages=[{steps: 2, batch_size: 4}, {batch_size: 2}]"


def test_epochs_make_the_last_stage_as_long_as_it_has_to_be(here):
    found = plan(*BASE, "--num_epochs", "10", "--set", STAGES)  # 30 samples, 8 of them in the first stage
    assert found.run.config.train.steps == 2 + 11
    assert found.notes[-1] == (
        "10 epochs of 3 samples are 13 steps: the stages before the last one show 8 samples, and the last shows 2 in each step"
    )


def test_epochs_that_the_first_stages_have_shown_already_are_refused(here):
    assert "the stages before the last one show 8" in refusal("--num_epochs", "1", "--set", STAGES)
    fixed = "train.stages=[{steps: 2}, {steps: 3}]"
    assert refusal("--num_epochs", "1", "--set", fixed).startswith("--num_epochs: the stages have their steps already")


def test_epochs_and_steps_exclude_each_other(here):
    assert refusal("--num_epochs", "1", "--steps", "1").startswith("--num_epochs and --steps exclude each other")


@pytest.mark.parametrize("number", ["0", "1.5", "ten", "-1"])
def test_epochs_are_whole(here, number):
    assert "expected a whole number of at least 1" in refusal(f"--num_epochs={number}")


def test_a_folder_without_pictures_is_a_problem_of_the_data(here):
    Path("empty").mkdir()
    assert f"no pictures in {here}/empty" in refusal("--train_data", "empty", "--num_epochs", "1", code=65)


# ------------------------------------------------------------------ the family
@pytest.mark.parametrize(
    ("pipeline", "width", "arch"),
    [
        ("ZImagePipeline", None, "zimage"),
        ("Flux2KleinPipeline", 7680, "flux2_klein_4b"),
        ("Flux2KleinPipeline", 12288, "flux2_klein_9b"),
    ],
)
def test_the_family_is_seen_from_the_model_folder(here, pipeline, width, arch):
    model("model", pipeline, joint_attention_dim=width)
    found = plan(*BASE)
    assert found.run.config.model.arch == arch
    assert found.notes == (f"arch {arch}, seen from {here}/model/model_index.json",)


def test_a_klein_of_unknown_width_needs_to_be_named(here):
    model("model", "Flux2KleinPipeline", joint_attention_dim=48)
    assert "say --arch flux2_klein_4b or flux2_klein_9b" in refusal()
    assert config_of("--arch", "flux2_klein_9b").model.arch == "flux2_klein_9b"


def test_a_folder_that_is_no_model_is_refused_before_torch_is_needed(here):
    assert "nothere does not exist" in refusal("--base_model", "nothere")
    assert f"{here}/data has no model_index.json" in refusal("--base_model", "data")
    assert "is not known to belong to one family" in refusal("--base_model", unknown_model())


def unknown_model():
    model("other", "AudioPipeline")
    return "other"


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--base_modle", "x"), "--base_modle: unknown flag; did you mean --base_model?"),
        (("--lokr_factor", "8"), "--lokr_factor: unknown flag; did you mean --set network.lokr_factor=VALUE?"),
        (("--linear", "8"), "--linear: unknown flag; did you mean --rank?"),
        (("--network_dim", "8"), "--network_dim: unknown flag; did you mean --rank?"),
        (("--max_train_steps", "8"), "--max_train_steps: unknown flag; did you mean --steps?"),
        (("--snr_gamma", "5"), "--snr_gamma: unknown flag; did you mean --set train.min_snr_gamma=VALUE?"),
        (("--num", "5"), "--num: unknown flag; did you mean --num_repeats or --num_epochs?"),
        (("--set", "train.lr=1", "train.weight_decay=0"), "did you mean --set train.weight_decay=0?"),
        (("--rank", "0"), "--rank: 0 is below the minimum 1"),
        (("--learning_rate", "fast"), '--learning_rate: found "fast" (string), expected a number'),
        (("--arch", "zimege"), '--arch: "zimege" is not one of'),
        (("--network_type", "lorkr"), '--network_type: "lorkr" is not one of'),
        (("--resolution", "8"), "--resolution: 8 is below the minimum 32"),
        (("--set", "train.lrr=1"), "--set train.lrr: unknown field; did you mean lr?"),
        (("--set", "train.weight_decay=-1"), "--set train.weight_decay: -1 is below the minimum 0"),
        (("--set", "train.weight_decay"), "--set train.weight_decay: expected PATH=VALUE"),
        (("--set", "datasets[3].num_repeats=1"), "--set datasets[3].num_repeats: datasets[3]: there are 1 of them"),
        (("--set", "train.lr.x=1", "--lr", "1"), "--set train.lr.x: lr holds no fields"),
        (("--steps",), "argument --steps: expected one argument"),
        (("--nproc_per_node", "0"), "--nproc_per_node: 0 is below the minimum 1"),
        (("--process", "1"), "--process chooses from an ai-toolkit file"),
        (("--config", "nothere.yaml"), "nothere.yaml: can't be read"),
        (("--base_model", "s3://models/x", "--arch", "zimage"), "--base_model: s3://models/x: stores are reached with a manifest"),
    ],
)  # fmt: skip
def test_what_can_not_be_meant_is_told_at_its_flag(here, arguments, said):
    assert said in refusal(*arguments)


@pytest.mark.parametrize("missing", ["--base_model", "--train_data", "--output_dir"])
def test_what_is_missing_is_named(here, missing):
    at = BASE.index(missing)
    assert refusal(base=(*BASE[:at], *BASE[at + 2 :])).startswith(f"{missing} is missing: ")


def test_a_missing_folder_of_pictures_is_a_problem_of_the_data(here):
    assert refusal("--train_data", "nothere", code=65) == f"--train_data: the folder {here}/nothere does not exist"


# ------------------------------------------------------------------ configuration files
def native():
    return {
        "model": {"name_or_path": "model"},
        "datasets": [{"folder_path": "data"}],
        "train": {"steps": 5, "lr": 1e-3},
    }


@pytest.mark.parametrize("form", ["blocks", "manifest", "json"])
def test_a_file_of_our_own_is_read_and_flags_override_it(here, form):
    Path("configs").mkdir()
    raw = native() | {"model": {"name_or_path": "../model"}, "datasets": [{"folder_path": "../data", "num_repeats": 2}]}
    if form == "manifest":
        raw = job_manifest() | {"spec": {"config": raw, "resources": {"nodes": 2}}}
    name = "configs/file." + ("json" if form == "json" else "yaml")
    Path(name).write_text(json.dumps(raw))
    found = plan("--config", name, "--output_dir", "out", "--steps", "9", "--train_data", "data")
    config = found.run.config
    assert config.model.name_or_path == str(here / "model")
    assert (config.train.steps, config.train.lr) == (9, 1e-3)
    assert (config.datasets[0].folder_path, config.datasets[0].num_repeats) == (str(here / "data"), 2)
    assert ("ignored: spec.resources" in "".join(found.notes)) == (form == "manifest")


def test_an_ai_toolkit_file_is_read_as_it_is(here):
    raw = put(put(preset("zimage"), "model.name_or_path", "model"), "datasets.0.folder_path", "data")
    Path("aitk.yaml").write_text(yaml.safe_dump(raw))
    found = plan("--config", "aitk.yaml", "--steps", "4", "--device", "cpu")
    assert (found.run.config.train.steps, found.run.config.network.linear) == (4, 32)
    assert found.folder == here / "output" / "my_first_lora_v1"
    assert any("weighted" in note for note in found.notes)


def test_a_problem_in_a_file_is_told_at_its_place(here):
    Path("file.yaml").write_text(json.dumps(native() | {"train": {"steps": 0}}))
    assert (
        refusal(base=("--config", "file.yaml", "--output_dir", "out"))
        == "file.yaml: train.steps: 0 is below the minimum 1"
    )
    Path("aitk.yaml").write_text(yaml.safe_dump(put(preset(), "train.stepps", 1)))
    assert refusal(base=("--config", "aitk.yaml")).startswith(
        "aitk.yaml: config.process[0].train.stepps: unknown key; did you"
    )


def test_a_file_that_is_no_configuration_is_refused(here):
    Path("file.yaml").write_text("a: 1\n")
    assert "is neither a configuration" in refusal("--config", "file.yaml")


# ------------------------------------------------------------------ the run directory
def owner(namespace, uid="u1"):
    return RunFile(uid=uid, job_name="x", namespace=namespace, config_hash="", created_at="2026-01-01T00:00:00Z")


def test_the_same_folder_is_the_same_run_and_may_be_moved(here):
    first = plan(*BASE).run.uid
    assert plan(*BASE, "--steps", "7").run.uid == first
    assert plan(*BASE, "--output_dir", "other").run.uid != first
    DirectoryStore(Path("moved")).put(
        layout.RUN_FILE, owner(rundir.NAMESPACE, first).model_dump_json(by_alias=True).encode()
    )
    assert plan(*BASE, "--output_dir", "moved").run.uid == first


def test_a_folder_of_an_operators_job_is_refused(here):
    DirectoryStore(Path("out")).put(layout.RUN_FILE, owner("team-a").model_dump_json(by_alias=True).encode())
    assert "--output_dir: " in refusal()
    assert "belongs to the job team-a/x" in refusal()


def checkpoint(store, step, start=1):
    manifest = CheckpointManifest(
        step=step, start=start, attempt=1, uid="u", config_hash="", committed_at="2026-01-01T00:00:00Z", files=()
    )
    store.put(layout.checkpoint_folder(step, start) + "adapter.safetensors", b"x")
    store.put(layout.checkpoint_manifest(step, start), manifest.model_dump_json(by_alias=True).encode())


def test_settings_that_define_the_run_can_not_change_under_its_checkpoints(here, monkeypatch):
    for name in ("LORA_RUN_CONFIG", "LORA_RETENTION", "LORA_COMMAND"):
        monkeypatch.setenv(name, "")
    begin(plan(*BASE, "--rank", "4"), "train")
    assert config_of("--rank", "8").network.linear == 8  # nothing is trained yet
    checkpoint(DirectoryStore(Path("out")), 2)
    assert refusal("--rank", "8").startswith("--rank (network.linear): is 8, but the run was begun with 4\n")
    assert config_of("--rank", "4", "--steps", "9", "--lr", "1", "--device", "cpu").train.steps == 9


def test_the_last_stage_may_become_longer_under_its_checkpoints_and_no_other(here, monkeypatch):
    for name in ("LORA_RUN_CONFIG", "LORA_RETENTION", "LORA_COMMAND"):
        monkeypatch.setenv(name, "")
    begin(plan(*BASE, "--set", "train.stages=[{steps: 2}, {steps: 3}]"), "train")
    checkpoint(DirectoryStore(Path("out")), 2)
    assert config_of("--set", "train.stages=[{steps: 2}, {steps: 9}]").train.steps == 11
    assert config_of("--set", "train.stages=[{steps: 2}, {}]", "--steps", "7").train.steps == 7
    assert "(train.stages)" in refusal("--set", "train.stages=[{steps: 3}, {steps: 3}]")


def test_a_finished_run_is_opened_again_for_more_steps_only(here):
    store, uid = DirectoryStore(here / "out"), "u1"
    final = FinalManifest(step=10, start=1, uid=uid, config_hash="", completed_at="2026-01-01T00:00:00Z", adapter="a")
    store.put(layout.FINAL_MANIFEST, final.model_dump_json(by_alias=True).encode())
    assert rundir.reopen_if_longer(here / "out", uid, 10) is None
    assert rundir.reopen_if_longer(here / "out", "u2", 20) is None
    assert rundir.reopen_if_longer(here / "out", uid, 20) == "the run was finished at step 10; going on to step 20"
    assert store.get(layout.FINAL_MANIFEST) is None


def test_old_checkpoints_are_removed_and_nothing_else(tmp_path):
    store = DirectoryStore(tmp_path)
    for step, start in ((2, 1), (4, 1), (4, 2), (6, 2)):
        checkpoint(store, step, start)
    store.put("samples/step-000000002/00.png", b"x")
    assert remove_old_checkpoints(store, 2) == 2
    kept = [item.key for item in store.list() if item.key.endswith("manifest.json")]
    assert kept == [layout.checkpoint_manifest(4, 2), layout.checkpoint_manifest(6, 2)]
    assert len(store.list()) == 5
    assert remove_old_checkpoints(store, 0) == 1
    assert [item.key for item in store.list("checkpoints/")][-1] == layout.checkpoint_manifest(6, 2)


# ------------------------------------------------------------------ the program
def test_help_and_refusals_come_without_torch(here):
    script = (
        "import sys; sys.argv = ['train_lora.py', *sys.argv[1:]]\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train_lora\n"
        "try:\n    train_lora.main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    for arguments, code in ((["--help"], 0), ([*BASE, "--rank", "0"], 64), ([], 64)):
        command = [sys.executable, "-c", script, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr


def test_flags_do_not_outlive_their_fields():
    for name, path in flags.FIELDS.items():
        assert flags.field_at(path, TrainerConfig) is not None, name
