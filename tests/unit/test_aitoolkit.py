"""Files of ai-toolkit: what every key becomes, and that nothing is passed over in silence."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from lora_api.aitoolkit import convert, is_ai_toolkit, tables, training
from lora_api.aitoolkit.findings import Ignored, Refused
from lora_api.config import TrainerConfig
from lora_api.problems import InvalidDocument, parse
from lora_api.suggestions import fields_at
from lora_api.yamlfile import read_documents

PRESETS = Path(__file__).parent / "aitoolkit_presets"


def preset(name="klein-4b"):
    return read_documents(str(PRESETS / f"{name}.yaml"))[0].value


def put(raw, path, value):
    """The file with a value at a path below its process, such as `train.lr` or `datasets.0.flip_x`."""
    raw = copy.deepcopy(raw)
    owner = raw["config"]["process"][0]
    *parents, last = path.split(".")
    for part in parents:
        owner = owner[int(part)] if part.isdigit() else owner.setdefault(part, {})
    owner[last] = value
    return raw


def without(raw, *paths):
    raw = copy.deepcopy(raw)
    for path in paths:
        owner = raw["config"]["process"][0]
        *parents, last = path.split(".")
        for part in parents:
            owner = owner[int(part)] if part.isdigit() else owner[part]
        del owner[last]
    return raw


def imported(**changes):
    raw = preset(changes.pop("preset", "klein-4b"))
    for path, value in changes.items():
        raw = put(raw, path.replace("__", "."), value)
    return convert(raw, {})


def problems(raw, variables=None, process=None):
    with pytest.raises(InvalidDocument) as caught:
        convert(raw, variables or {}, process)
    return list(map(str, caught.value.problems))


def notes_about(found, word):
    return [note for note in found.notes if word in note]


# ------------------------------------------------------------------ the file as a whole
def test_only_a_file_with_a_list_of_processes_is_ai_toolkits():
    assert is_ai_toolkit(preset())
    assert not is_ai_toolkit({"model": {}, "datasets": []})
    assert not is_ai_toolkit({"kind": "LoRATrainingJob", "spec": {"config": {}}})
    assert not is_ai_toolkit(["config"])


def test_the_name_is_filled_in_everywhere():
    raw = put(preset(), "datasets.0.folder_path", "/data/[name]/pictures")
    found = convert(raw, {})
    assert found.name == "my_first_lora_v1"
    assert found.config["datasets"][0]["folder_path"] == "/data/my_first_lora_v1/pictures"


def test_variables_come_from_the_environment_and_may_be_numbers():
    raw = put(put(preset(), "train.steps", "${STEPS}"), "datasets.0.folder_path", "${HOME}/pictures")
    config = convert(raw, {"STEPS": "50", "HOME": "/home/me"}).config
    assert config["train"]["steps"] == 50
    assert config["datasets"][0]["folder_path"] == "/home/me/pictures"


def test_a_variable_that_is_not_set_is_an_error_that_names_it():
    assert problems(put(preset(), "model.name_or_path", "${MODELS}/klein")) == [
        "${MODELS} stands in the file, but the environment variable MODELS is not set"
    ]


def test_numbers_without_a_dot_are_numbers():
    found = imported()
    assert found.config["train"]["lr"] == 1e-4
    assert found.config["train"]["weight_decay"] == 1e-4


def test_of_several_processes_one_has_to_be_chosen():
    raw = preset()
    raw["config"]["process"].append(put(raw, "train.steps", 7)["config"]["process"][0])
    assert problems(raw) == ["config.process: holds 2 processes; choose one by its number, 0 to 1"]
    assert convert(raw, {}, 1).config["train"]["steps"] == 7
    assert problems(raw, process=2) == ["config.process: has no process 2; expected 0 to 1"]


def test_another_kind_of_job_or_process_is_refused():
    assert problems(preset() | {"job": "generate"})[0].startswith('job: found "generate"')
    assert problems(put(preset(), "type", "slider"))[0].startswith('config.process[0].type: found "slider"')


def test_without_a_network_block_the_whole_model_would_be_trained_so_it_is_an_error():
    assert "trains the whole model there" in problems(without(preset(), "network"))[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("train.learning_rate", "; did you mean lr?"),
        ("train.batchsize", "; did you mean batch_size?"),
        ("save.max_step_saves_to_kep", "; did you mean max_step_saves_to_keep?"),
        ("network.lokr_rank", "; did you mean lokr_full_rank?"),
        ("datasets.0.caption_dropout_rat", "; did you mean caption_dropout_rate?"),
        ("model.quantise", "; did you mean quantize?"),
        ("sample.promts", "; did you mean prompts?"),
        ("train.ema_config.ema_dekay", "; did you mean ema_decay?"),
        ("tringer_word", "; did you mean trigger_word?"),
    ],
)
def test_a_key_that_neither_program_knows_is_an_error_not_silence(path, expected):
    said = problems(put(preset(), path, 1))
    shown = re.sub(r"\.(\d+)", r"[\1]", path)
    assert [line for line in said if "unknown key" in line] == [f"config.process[0].{shown}: unknown key{expected}"]


def test_every_decision_of_every_table_is_made_when_its_key_is_there():
    places = {
        "": tables.PROCESS, "network": tables.NETWORK, "network.network_kwargs": tables.NETWORK_KWARGS,
        "datasets.0": tables.DATASET, "train": tables.TRAIN, "train.ema_config": tables.EMA, "save": tables.SAVE,
        "model": tables.MODEL, "sample": tables.SAMPLE, "sample.samples.0": tables.SAMPLE_ITEM,
    }  # fmt: skip
    for place, table in places.items():
        fields = fields_at(TrainerConfig, [part for part in place.split(".") if part and not part.isdigit()])
        for key, decision in table.items():
            if key in fields:
                continue  # the trainer has it by now, and that comes before the table
            raw = put(preset(), f"{place}.{key}".removeprefix("."), "something")
            if isinstance(decision, Refused):
                assert any("is not supported; " in line for line in problems(raw)), key
            elif isinstance(decision, Ignored):
                said = notes_about(convert(raw, {}), f"{key}: ")
                assert bool(said) != decision.always_quiet, key


def test_an_adapter_to_begin_with_becomes_the_warm_start():
    found = convert(put(preset(), "network.pretrained_lora_path", "/adapters/old.safetensors"), {})
    assert found.config["network"]["init_from"] == "/adapters/old.safetensors"
    assert "pretrained_lora_path" not in found.config["network"]


# ------------------------------------------------------------------ meanings that differ
def test_aliases_become_our_names():
    raw = put(without(preset(), "network.linear"), "network.rank", 8)
    config = convert(raw, {}).config
    assert config["network"]["linear"] == 8
    assert config["save"]["max_step_saves"] == 4
    assert config["datasets"][0]["caption_dropout"] == 0.05
    assert "max_step_saves_to_keep" not in config["save"]


def test_rank_wins_over_linear_as_it_does_there():
    assert imported(network__rank=8).config["network"]["linear"] == 8


def test_alpha_is_the_rank_on_models_of_blocks_and_that_is_said():
    found = imported(network__linear_alpha=16)
    assert found.config["network"]["linear_alpha"] == 32
    assert "16 counts as the rank, 32, on this model there (scale 1)" in notes_about(found, "network.linear_alpha")[0]


def test_alpha_is_honoured_for_lokr_and_on_unets():
    lokr = convert(put(put(preset(), "network.type", "lokr"), "network.linear_alpha", 16), {})
    assert lokr.config["network"]["linear_alpha"] == 16
    unet = convert(put(put(preset(), "model.arch", "sdxl"), "network.linear_alpha", 16), {})
    assert unet.config["network"]["linear_alpha"] == 16
    assert notes_about(unet, "network.linear_alpha") == []


def test_summed_gradients_become_averaged_ones_and_the_rate_is_left_alone():
    found = imported(train__gradient_accumulation=4)
    assert found.config["train"] | {"gradient_accumulation": 4, "lr": 1e-4} == found.config["train"]
    assert "averaged here and summed there; lr is not rescaled" in notes_about(found, "gradient_accumulation")[0]


def test_the_old_accumulation_counts_forward_passes_so_steps_are_converted():
    raw = put(without(preset(), "train.gradient_accumulation"), "train.gradient_accumulation_steps", 4)
    raw = put(
        put(raw, "train.lr_scheduler", "constant_with_warmup"), "train.lr_scheduler_params", {"num_warmup_steps": 90}
    )
    config = convert(raw, {}).config
    assert (config["train"]["gradient_accumulation"], config["train"]["warmup_steps"]) == (4, 23)
    assert (config["train"]["steps"], config["save"]["save_every"], config["sample"]["sample_every"]) == (750, 63, 63)


def test_both_kinds_of_accumulation_exclude_each_other():
    raw = put(put(preset(), "train.gradient_accumulation", 2), "train.gradient_accumulation_steps", 2)
    assert problems(raw) == [
        "config.process[0].train.gradient_accumulation_steps: excludes gradient_accumulation; keep one of them"
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"), [("sigmoid", "logit_normal"), ("linear", "uniform"), ("weighted", "uniform")]
)
def test_noise_levels_have_our_names(theirs, ours):
    assert imported(train__timestep_type=theirs).config["train"]["timestep_type"] == ours


def test_noise_levels_that_we_lack_are_refused_with_what_to_use():
    (said,) = problems(put(preset(), "train.timestep_type", "lognorm_blend"))
    assert said.startswith('config.process[0].train.timestep_type: "lognorm_blend" has no counterpart here; ')
    assert "use logit_normal" in said
    (said,) = problems(put(preset(), "train.timestep_type", "sigmoidal"))
    assert said.endswith(
        "expected one of sigmoid, linear, weighted, shift, flux_shift, lumina2_shift, logit_normal, uniform, mode, cosmap"
    )


def test_noise_levels_are_not_shifted_there_so_they_are_not_here():
    assert imported(preset="zimage", train__timestep_type="sigmoid").config["train"]["timestep_shift"] == 1
    assert "timestep_shift" not in imported(train__timestep_type="sigmoid").config["train"], "Klein has no static shift"
    ours = imported(preset="zimage", train__timestep_type="logit_normal").config["train"]
    assert "timestep_shift" not in ours, "our own word has our own meaning"


@pytest.mark.parametrize("kind", ["shift", "flux_shift", "lumina2_shift"])
def test_shifted_noise_levels_are_those_of_sampling(kind):
    klein = imported(train__timestep_type=kind).config["train"]
    assert (klein["timestep_type"], klein["timestep_dynamic_shift"]) == ("uniform", True)
    zimage = imported(preset="zimage", train__timestep_type=kind).config["train"]
    assert zimage["timestep_type"] == "uniform"
    assert {"timestep_dynamic_shift", "timestep_shift"}.isdisjoint(zimage), "the scheduler's own counts"


@pytest.mark.parametrize(
    ("kind", "first", "last", "levels"),
    [
        ("linear", 0, 500, (500, 1000)),
        ("linear", 200, 1000, (0, 800)),
        ("sigmoid", 0, 500, (500, 1000)),
        ("sigmoid", 159, 841, (269.2, 730.8)),  # one standard deviation on both sides: sigmoid(1) = 0.731
    ],
)
def test_a_range_of_denoising_steps_becomes_one_of_noise_levels(kind, first, last, levels):
    found = imported(train__timestep_type=kind, train__min_denoising_steps=first, train__max_denoising_steps=last)
    train = found.config["train"]
    assert (train["min_timestep"], train["max_timestep"]) == pytest.approx(levels, abs=0.2)
    assert notes_about(found, "min_denoising_steps")


def test_the_whole_range_of_denoising_steps_is_nothing_to_speak_of():
    found = imported(train__min_denoising_steps=0, train__max_denoising_steps=999)
    assert "min_timestep" not in found.config["train"]
    assert not notes_about(found, "denoising")
    assert "must be below" in problems(put(preset(), "train.min_denoising_steps", 1000))[0]
    with_shift = put(put(preset(), "train.max_denoising_steps", 500), "train.timestep_type", "shift")
    assert "use max_timestep and min_timestep" in problems(with_shift)[0]


def test_losses_and_noise_have_the_same_names():
    found = imported(
        train__loss_type="pseudo_huber",
        train__noise_offset=0.05,
        train__min_snr_gamma=5,
        train__content_or_style="style",
    )
    train = found.config["train"]
    assert (train["loss_type"], train["huber_delta"], train["noise_offset"]) == ("pseudo_huber", 0.01, 0.05)
    assert (train["min_snr_gamma"], train["content_or_style"]) == (5, "style")
    parse(TrainerConfig, found.config, found.path)
    assert "min_snr_gamma" not in imported(train__min_snr_gamma=0).config["train"]
    assert "use min_snr_gamma" in problems(put(preset(), "train.snr_gamma", 5))[0]


def test_averaged_weights_keep_their_decay_which_is_not_warmed_up_there():
    off = imported(train__ema_config={"use_ema": False, "ema_decay": 0.99, "use_feedback": False})
    assert "ema_config" not in off.config["train"]
    found = imported(train__ema_config={"use_ema": True, "ema_decay": 0.99})
    assert found.config["train"]["ema_config"] == {"use_ema": True, "ema_decay": 0.99, "ema_warmup": False}
    parse(TrainerConfig, found.config)
    fed_back = put(preset(), "train.ema_config", {"use_ema": True, "use_feedback": True})
    assert "feeding the average back" in problems(fed_back)[0]


def test_masks_have_the_same_names():
    found = imported(datasets__0__mask_path="/masks", datasets__0__invert_mask=True, datasets__0__mask_min_value=0.1)
    dataset = found.config["datasets"][0]
    assert (dataset["mask_path"], dataset["invert_mask"], dataset["mask_min_value"]) == ("/masks", True, 0.1)
    parse(TrainerConfig, found.config, found.path)
    assert "mask_min_value" not in imported(datasets__0__mask_min_value=0.1).config["datasets"][0]


def test_what_is_left_out_has_the_value_it_has_there():
    raw = without(
        preset(), "train.lr", "train.steps", "train.dtype", "save.save_every", "network.linear", "network.linear_alpha"
    )
    found = convert(raw, {})
    assert found.config["train"] | {"lr": 1e-6, "steps": 1000, "dtype": "fp32"} == found.config["train"]
    assert found.config["network"] | {"linear": 4, "linear_alpha": 4} == found.config["network"]
    assert found.config["save"]["save_every"] == 1000
    assert "train.lr 1e-06" in found.notes[-1]


def test_a_warm_up_is_a_number_of_steps():
    raw = put(
        put(preset(), "train.lr_scheduler", "constant_with_warmup"),
        "train.lr_scheduler_params",
        {"num_warmup_steps": 50},
    )
    train = convert(raw, {}).config["train"]
    assert (train["lr_scheduler"], train["warmup_steps"]) == ("constant", 50)


def test_a_scheduler_that_means_something_else_there_is_refused():
    assert "rises from a third of lr" in problems(put(preset(), "train.lr_scheduler", "linear"))[0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("adamw8bit", "adamw8bit"), ("AdamW8bit", "adamw8bit"), ("adam", "adamw"), ("adam8bit", "adamw8bit"),
        ("lion8bit", "lion"), ("prodigy8bit", "prodigy"), ("adafactor", "adafactor"),
    ],
)  # fmt: skip
def test_optimizers_have_our_names_and_fit_our_types(theirs, ours):
    found = imported(train__optimizer=theirs, train__optimizer_params={"weight_decay": 0.01})
    assert (found.config["train"]["optimizer"], found.config["train"]["weight_decay"]) == (ours, 0.01)
    parse(TrainerConfig, found.config)


def test_parameters_of_an_optimizer_go_where_they_belong():
    params = {"d_coef": 2, "betas": [0.9, 0.99], "eps": 1e-7, "decouple": True, "use_bias_correction": True}
    train = imported(train__optimizer="prodigy", train__optimizer_params=params).config["train"]
    assert train["optimizer_params"] == {"d_coef": 2, "use_bias_correction": True}
    assert (train["adam_beta2"], train["adam_epsilon"]) == (0.99, 1e-7)
    lion = imported(train__optimizer="lion", train__optimizer_params={"betas": [0.95, 0.98]}).config["train"]
    assert lion["optimizer_params"] == {"beta1": 0.95, "beta2": 0.98}
    off = {"relative_step": False, "scale_parameter": False, "warmup_init": False, "eps": [1e-30, 1e-3]}
    factored = imported(train__optimizer="adafactor", train__optimizer_params=off).config["train"]
    assert factored["optimizer_params"] == {"scale_parameter": False}
    refused = put(put(preset(), "train.optimizer", "adafactor"), "train.optimizer_params", {"relative_step": True})
    assert "Adafactor's own rate is not supported; set it to false, and set lr" in problems(refused)[0]


def test_a_rate_for_prodigy_that_is_taken_as_1_there_is_1_here():
    found = imported(train__optimizer="prodigy", train__lr=1e-4)
    assert found.config["train"]["lr"] == 1.0
    assert "taken as 1 there" in notes_about(found, "train.lr")[0]
    parse(TrainerConfig, found.config)
    kept = imported(train__optimizer="prodigy", train__lr=0.5)
    assert kept.config["train"]["lr"] == 0.5


def test_schedules_keep_their_shape():
    never = imported(train__lr_scheduler="cosine_with_restarts").config["train"]
    assert never["lr_scheduler"] == "cosine"  # one period over all steps there
    found = imported(train__lr_scheduler="cosine", train__lr_scheduler_params={"eta_min": 2e-5}).config["train"]
    assert found["lr_scheduler_params"] == {"min_lr_ratio": pytest.approx(0.2)}
    found = imported(train__lr_scheduler="polynomial", train__lr_scheduler_params={"power": 2}).config["train"]
    assert (found["lr_scheduler"], found["lr_scheduler_params"]) == ("polynomial", {"power": 2})
    own = imported(train__lr_scheduler="cosine_with_restarts", train__lr_scheduler_params={"num_cycles": 3})
    assert own.config["train"]["lr_scheduler"] == "cosine_with_restarts"
    assert "eta_mim" in problems(put(preset(), "train.lr_scheduler_params", {"eta_mim": 0}))[0]


def test_guidance_of_z_image_is_counted_from_0_here():
    found = imported(preset="zimage")
    assert found.config["sample"]["guidance_scale"] == 3
    assert notes_about(found, "sample.guidance_scale")


def test_prompts_come_from_either_list_and_flags_in_them_are_said():
    assert imported().config["sample"]["prompts"][1] == "a horse is a DJ at a night club, fish eye lens"
    found = convert(put(without(preset(), "sample.samples"), "sample.prompts", ["a cat --w 512 --n ugly"]), {})
    assert found.config["sample"]["prompts"] == ["a cat"]
    assert notes_about(found, "--w 512 --n ugly")


def test_a_sample_of_its_own_size_is_said_to_be_drawn_like_the_others():
    found = imported(sample__samples=[{"prompt": "a cat", "width": 256, "seed": 42}])
    assert notes_about(found, "samples[0]") == ["ignored: sample.samples[0].width: 256 (all samples are drawn alike)"]


def test_no_samples_are_drawn_where_sampling_is_switched_off():
    assert "sample" not in imported(train__disable_sampling=True).config


def test_a_numbered_gpu_is_cuda_and_the_way_to_choose_it_is_said():
    found = imported(device="cuda:1")
    assert found.config["device"] == "cuda"
    assert "CUDA_VISIBLE_DEVICES=1" in notes_about(found, "cuda:1")[0]


def test_a_name_on_the_hub_is_said_to_be_no_folder_where_models_are_not_downloaded(monkeypatch):
    monkeypatch.setattr(training, "HUB_SCHEME", "")
    assert notes_about(imported(), "Hugging Face Hub")
    assert not notes_about(imported(model__name_or_path="/models/klein"), "Hugging Face Hub")
    assert not notes_about(convert(preset(), {}, is_local=lambda place: True), "Hugging Face Hub")


def test_a_name_on_the_hub_gets_its_scheme_where_models_are_downloaded(monkeypatch):
    monkeypatch.setattr(training, "HUB_SCHEME", "hf://")
    assert imported().config["model"]["name_or_path"] == "hf://black-forest-labs/FLUX.2-klein-base-4B"
    assert convert(preset(), {}, is_local=lambda place: True).config["model"]["name_or_path"].startswith("black-forest")
    assert imported(model__name_or_path="./models/klein").config["model"]["name_or_path"] == "./models/klein"


def test_clips_are_refused_by_the_name_of_the_key_where_only_pictures_are_trained():
    raw = put(preset(), "datasets.0.num_frames", 41)
    try:
        found = convert(raw, {})
    except InvalidDocument as error:
        said = str(error)
    else:  # a trainer that takes clips knows for which families
        with pytest.raises(InvalidDocument) as caught:
            parse(TrainerConfig, found.config, found.path)
        said = str(caught.value)
    assert "datasets[0].num_frames" in said


def test_fields_of_our_own_may_stand_in_the_file_too():
    raw = put(without(preset(), "save.max_step_saves_to_keep"), "save.max_step_saves", 9)
    raw = put(raw, "train.warmup_steps", 30)
    config = convert(raw, {}).config
    assert (config["save"]["max_step_saves"], config["train"]["warmup_steps"]) == (9, 30)


@pytest.mark.parametrize(
    ("model", "expected", "noted"),
    [
        ({}, {}, ""),
        ({"quantize": False, "qtype": "qfloat8"}, {}, ""),
        ({"quantize": True}, {"quantize": "fp8", "quantize_te": "fp8"}, ""),
        ({"quantize": True, "quantize_te": False}, {"quantize": "fp8"}, ""),
        ({"quantize": True, "qtype": "qint8", "qtype_te": "qfloat8"}, {"quantize": "int8", "quantize_te": "fp8"}, ""),
        ({"quantize": "int8", "quantize_te": False}, {"quantize": "int8"}, ""),
        ({"quantize_te": True, "qtype_te": "uint4"}, {"quantize_te": "nf4"}, "is nf4 here"),
        ({"quantize": True, "qtype": "uint3|org/adapter.safetensors", "quantize_te": False}, {"quantize": "nf4"}, "ignored: the adapter"),
    ],
)  # fmt: skip
def test_formats_of_frozen_weights_are_those_of_the_file(model, expected, noted):
    raw = preset()
    for key in ("quantize", "quantize_te", "qtype", "qtype_te"):
        raw = without(raw, f"model.{key}")
    for key, value in model.items():
        raw = put(raw, f"model.{key}", value)
    found = convert(raw, {})
    assert {key: value for key, value in found.config["model"].items() if key.startswith("quantize")} == expected
    assert noted in " ".join(found.notes)


def test_offloading_and_compiling_are_those_of_the_file():
    raw = put(put(preset(), "model.layer_offloading", True), "model.layer_offloading_transformer_percent", 0.5)
    assert convert(raw, {}).config["model"]["offload_blocks"] == 0.5
    assert convert(put(preset(), "model.layer_offloading", True), {}).config["model"]["offload_blocks"] == 1.0
    assert "offload_blocks" not in convert(put(preset(), "model.layer_offloading", False), {}).config["model"]
    assert convert(put(preset(), "model.block_compile", True), {}).config["train"]["compile"] is True
    assert "compile" not in convert(put(preset(), "model.compile", False), {}).config["train"]


def test_a_format_of_weights_that_is_not_known_is_refused():
    raw = put(put(put(preset(), "model.quantize", True), "model.quantize_te", False), "model.qtype", "ternary")
    (said,) = problems(raw)
    assert said.startswith('config.process[0].model.qtype: "ternary" has no counterpart here; expected one of qfloat8')


# ------------------------------------------------------------------ regularisation sets
def with_sets(*sets):
    raw = put(preset(), "train.reg_weight", 0.5)
    first = raw["config"]["process"][0]["datasets"][0]
    return put(
        raw, "datasets", [first, *({"folder_path": f"/reg{n}", "is_reg": is_reg} for n, is_reg in enumerate(sets))]
    )


def test_a_regularisation_set_is_seen_in_every_second_step_as_there():
    found = convert(with_sets(True), {})
    config = parse(TrainerConfig, found.config)
    assert [each.is_reg for each in config.datasets] == [False, True]
    assert [each.weight[0].value for each in config.datasets] == [1.0, 1.0]
    assert config.train.reg_weight == 0.5


def test_several_datasets_beside_a_regularisation_set_go_by_size_which_is_said():
    found = convert(with_sets(False, True), {})
    assert [each.weight for each in parse(TrainerConfig, found.config).datasets] == [(), (), ()]
    assert "every second step is on regularisation sets there" in notes_about(found, "is_reg")[0]


def test_a_set_that_is_none_gets_no_weight():
    assert "weight" not in convert(with_sets(False), {}).config["datasets"][0]
