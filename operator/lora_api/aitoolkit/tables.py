"""What becomes of every key that is neither converted nor a field of the trainer under the same name.

`Ignored` where only speed, memory, logging or convenience differ; `Refused` where the trained adapter would be another.
"""

from __future__ import annotations

from lora_api.aitoolkit.findings import Ignored, Refused, Table

_QUIET = Ignored(always_quiet=True)
_MEMORY = Ignored("the base model is kept whole in train.dtype, which needs more memory")
_LOADER = Ignored("data is encoded once and read by this trainer's own loader")
_AUGMENT = Refused("changing pictures at random")
_VIDEO = Refused("training on clips")
_TOKENS = Refused("changing captions at random")

FILE: Table = {"meta": Ignored("name and version of an adapter are not recorded")}

PROCESS: Table = {
    "log_dir": Ignored("metrics are in the run directory"),
    "torch_profiler": Ignored("performance_log_every logs the time of each part of a step"),
    "first_sample": Ignored("samples are those of the sample block"),
    "sqlite_db_path": _QUIET,
    "embedding": Refused("training an embedding"),
    "adapter": Refused("training a control or image adapter"),
    "decorator": Refused("training a decorator"),
    "slider": Refused("training a slider"),
    "guidance": Refused("a guidance loss"),
}

LOGGING: Table = {
    "log_every": _QUIET,
    "verbose": _QUIET,
    "use_ui_logger": _QUIET,
    "use_wandb": Ignored("metrics are in the run directory"),
    "project_name": _QUIET,
    "run_name": _QUIET,
}

NETWORK: Table = {
    "transformer_only": Refused("adapting layers outside the main blocks", off=(True,)),
    "all_layers": Refused("adapting every layer"),
    "old_lokr_format": Refused("the old LoKr file format"),
    "split_multistage_loras": Ignored("there is one adapter", quiet=(True,)),
    "layer_offloading": _MEMORY,
}

NETWORK_KWARGS: Table = {
    "full_if_contains": Refused("training some layers whole"),
    "target_lin_modules": Refused("choosing layers by class", instead="name layers in only_if_contains"),
    "target_conv_modules": Refused("choosing layers by class", instead="name layers in only_if_contains"),
}

DATASET: Table = {
    "buckets": Refused("training without aspect-ratio buckets", off=(True,)),
    "bucket_tolerance": Ignored("the model family decides, as it does there"),
    "square_crop": _AUGMENT,
    "random_crop": _AUGMENT,
    "random_scale": _AUGMENT,
    "scale": Refused("scaling pictures", off=(1,)),
    "flip_x": _AUGMENT,
    "flip_y": _AUGMENT,
    "augments": _AUGMENT,
    "augmentations": _AUGMENT,
    "shuffle_augmentations": _AUGMENT,
    "token_dropout_rate": _TOKENS,
    "shuffle_tokens": _TOKENS,
    "keep_tokens": Ignored("tokens are not shuffled", quiet=(0,)),
    "replacements": _TOKENS,
    "random_triggers": _TOKENS,
    "random_triggers_max": _QUIET,
    "use_short_captions": Refused("short captions"),
    "cache_text_embeddings": Ignored("captions are always encoded once", quiet=(True,)),
    "cache_tensors_to_disk": _LOADER,
    "cache_clip_vision_to_disk": _LOADER,
    "cache_latents_num_workers": _LOADER,
    "load_image_when_caching_latents": _LOADER,
    "num_workers": _LOADER,
    "prefetch_factor": _LOADER,
    "prior_reg": Refused("prior regularisation"),
    "network_weight": Refused("a weight for each dataset", off=(1,)),
    "loss_multiplier": Refused("a weight for each dataset", off=(1,), instead="use num_repeats"),
    "control_path": Refused("control pictures"),
    "control_path_1": Refused("control pictures"),
    "control_path_2": Refused("control pictures"),
    "control_path_3": Refused("control pictures"),
    "controls": Refused("control pictures"),
    "inpaint_path": Refused("inpainting"),
    "unconditional_path": Refused("unconditional pictures"),
    "clip_image_path": Refused("image prompts"),
    "num_frames": Refused("training on clips", off=(1,)),
    "shrink_video_to_frames": _QUIET,
    "fps": _QUIET,
    "auto_frame_count": _VIDEO,
    "trim_auto_frame_count_tail": _QUIET,
    "do_i2v": Ignored("there are no clips", quiet=(True,)),
    "do_audio": Refused("sound"),
    "batch_size": Refused("a batch size for each dataset", off=(), instead="set train.batch_size"),
}

TRAIN: Table = {
    "noise_scheduler": Ignored("the model family decides", quiet=("flowmatch", "ddpm")),
    "refiner_lr": _QUIET,
    "embedding_lr": _QUIET,
    "adapter_lr": _QUIET,
    "num_train_timesteps": Refused("another number of noise levels", off=(1000,)),
    "skip_first_sample": _QUIET,
    "force_first_sample": Ignored("samples are drawn every sample_every steps and at the end"),
    "start_step": Refused("a first step of one's own", instead="a run goes on from its newest checkpoint by itself"),
    "prompt_dropout_prob": Refused("dropping prompts", instead="set caption_dropout of the datasets"),
    "snr_gamma": Refused("a loss weight of gamma / SNR without a limit", instead="use min_snr_gamma"),
    "cache_text_embeddings": Ignored("captions are always encoded once", quiet=(True,)),
    "unload_text_encoder": Refused(
        "training every picture on the trigger word alone",
        instead="set it to false: captions are encoded once, and the text encoder is unloaded before training anyway",
    ),
    "diff_output_preservation": Refused("output preservation"),
    "diff_output_preservation_class": _QUIET,
    "diff_output_preservation_multiplier": _QUIET,
    "blank_prompt_preservation": Refused("output preservation"),
    "blank_prompt_preservation_multiplier": _QUIET,
    "inverted_mask_prior": Refused("output preservation outside of masks"),
    "inverted_mask_prior_multiplier": _QUIET,
    "do_guidance_loss": Refused("a guidance loss"),
    "guidance_loss_target": _QUIET,
    "do_differential_guidance": Refused("differential guidance"),
    "differential_guidance_scale": _QUIET,
    "validation_config": Ignored("no validation loss is measured"),
    "disable_sampling": _QUIET,
    "switch_boundary_every": _QUIET,
    "bypass_guidance_embedding": _QUIET,
}

OPTIMIZER_PARAMS: dict[str, Table] = {
    "adafactor": {
        "relative_step": Refused("Adafactor's own rate", instead="set it to false, and set lr"),
        "warmup_init": Refused("Adafactor's own warm-up", instead="set it to false, and set warmup_steps"),
    },
    "prodigy": {
        "decouple": Refused("coupled weight decay", off=(True,), instead="set it to true"),
        "growth_rate": Refused("a limit on the growth of Prodigy's rate"),
        "beta3": Refused("Prodigy's third decay", instead="remove it: the root of the second beta is taken"),
    },
}

EMA: Table = {
    "use_feedback": Refused("feeding the average back into what is trained"),
    "param_multiplier": Refused("scaling averaged weights", off=(1,)),
}

SAVE: Table = {
    "save_format": _QUIET,
    "push_to_hub": Ignored("the adapter stays in the run directory"),
    "hf_repo_id": _QUIET,
    "hf_private": _QUIET,
}

MODEL: Table = {
    "low_vram": Ignored("layer_offloading or quantize save memory here, see docs/memory.md"),
    "assistant_lora_path": Refused(
        "a training adapter for distilled models",
        instead="train on the undistilled model, or remove the key to train on the distilled one as it is",
    ),
    "inference_lora_path": Ignored("samples are drawn with the adapter alone"),
    "unconditional_lora_path": Refused("an unconditional adapter"),
    "lora_path": Refused("a base model with an adapter merged into it", instead="merge it and save the model first"),
    "vae_path": Refused("another VAE than the model folder's", instead="put it into the model folder"),
    "te_name_or_path": Ignored("the folder of name_or_path has to hold the text encoder too"),
    "model_paths": Refused("single files in place of a model folder"),
}

SAMPLE: Table = {
    "sampler": Ignored("the model family decides", quiet=("flowmatch", "ddpm")),
    "sample_start_step": Ignored("samples are drawn from the first multiple of sample_every on", quiet=(0,)),
    "neg": Ignored("the negative prompt is empty"),
    "network_multiplier": Ignored("samples are drawn with the whole adapter", quiet=(1,)),
    "format": Ignored("samples are PNG files", quiet=("png",)),
    "num_frames": Refused("drawing clips", off=(1,)),
    "fps": _QUIET,
}

SAMPLE_ITEM: Table = {
    "ctrl_img": Refused("control pictures"),
    "ctrl_img_1": Refused("control pictures"),
    "ctrl_img_2": Refused("control pictures"),
    "ctrl_img_3": Refused("control pictures"),
}
