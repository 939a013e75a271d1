"""Where a base model comes from: the hub's cache, and single files with the rest from a folder."""

from __future__ import annotations

import os
import shutil
from functools import reduce

import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import load_file, save_file

from lora_api.config import ModelConfig
from lora_api.exit_codes import ExitCode
from lora_api.store import StoreCredentialsError
from lora_trainer.data import hub, models
from lora_trainer.data.hub import HubLocation, parse_location
from lora_trainer.data.models import Sources, assemble
from lora_trainer.errors import ConfigurationError, DataError, TransientError
from lora_trainer.families import ModelError, family_for
from tests.trainer.jobs import Job, make_pictures

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CPU = torch.device("cpu")


def put_into_cache(cache, folder, repo="team/z-image", revision="main"):
    """A repository as the library keeps it after a download."""
    repository = cache / f"models--{repo.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    reference = repository / "refs" / revision
    reference.parent.mkdir(parents=True)
    reference.write_text(COMMIT)
    return repository / "snapshots" / COMMIT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The library's cache, empty."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def sources(tmp_path):
    def make(**options):
        said = options.pop("report", lambda text: None)
        return Sources(None, tmp_path / "own", None, options.pop("secrets", None), said, **options)

    return make


# ---------------------------------------------------------------------- the hub
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://team/z-image", HubLocation("team/z-image", None, None)),
        ("hf://team/z-image@v1.2", HubLocation("team/z-image", "v1.2", None)),
        (
            "hf://team/z.image@refs%2Fpr%2F3/a/b.safetensors",
            HubLocation("team/z.image", "refs/pr/3", "a/b.safetensors"),
        ),
        ("hf://team/z-image/model.safetensors", HubLocation("team/z-image", None, "model.safetensors")),
    ],
)
def test_locations_on_the_hub_have_repository_revision_and_file(text, expected):
    assert parse_location(text, "f") == expected


@pytest.mark.parametrize("text", ["hf://team", "hf://", "hf://team/model@", "hf://team/model@a@b", "hf://a b/c"])
def test_a_location_that_is_written_otherwise_is_refused_with_the_form(text):
    with pytest.raises(
        ConfigurationError, match=r"f: found '.*', expected hf://org/repo, hf://org/repo@revision or a file"
    ):
        parse_location(text, "f")


@pytest.mark.parametrize(("location", "revision"), [("hf://team/z-image", "main"), ("hf://team/z-image@v2", "v2")])
def test_a_model_in_the_cache_is_trained_offline(location, revision, cache, tiny_model_folder, tmp_path):
    put_into_cache(cache, tiny_model_folder("zimage"), revision=revision)
    data = make_pictures(tmp_path / "data", [(64, 64)] * 2)
    job = Job(tmp_path / "job", location, data, tmp_path / "own", train={"steps": 1})
    assert job.run() == ExitCode.DONE
    assert b'"name_or_path": "' + location.encode() in job.store.get("final/config.json")


def test_a_revision_that_is_not_in_the_cache_is_named_with_repository_and_cache(cache, tiny_model_folder, sources):
    put_into_cache(cache, tiny_model_folder("zimage"))
    with pytest.raises(ConfigurationError) as caught:
        sources().folder("hf://team/z-image@v9", "config.model.name_or_path")
    assert str(caught.value) == (
        f"config.model.name_or_path: hf://team/z-image at revision v9 is not in the cache {cache}, and HF_HUB_OFFLINE=1 "
        "forbids downloads; put it there, or allow downloads with HF_HUB_OFFLINE=0 in spec.trainer.env of the profile"
    )


def test_the_library_s_cache_is_used_where_there_is_one_and_else_a_folder_of_our_own(cache, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert hub.cache_folder(tmp_path / "own") == cache
    cache.rmdir()
    assert hub.cache_folder(tmp_path / "own") == tmp_path / "own" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hub.cache_folder(tmp_path / "own") == cache


def online(monkeypatch, answer):
    """A library that may download, and what it does then."""
    calls = []

    def download(repo, **options):
        calls.append((repo, options))
        return answer(**options)

    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return calls


def test_online_one_process_of_a_node_downloads_what_a_pipeline_needs_with_the_secret_s_token(
    cache, sources, tmp_path, monkeypatch
):
    secrets = tmp_path / "secret"
    secrets.mkdir()
    (secrets / "hfToken").write_text("hf_abc\n")
    calls = online(monkeypatch, lambda **options: str(tmp_path))
    assert sources(secrets=secrets).folder("hf://team/z-image@v2", "f") == tmp_path
    assert sources(download=False).folder("hf://team/z-image@v2", "f") == tmp_path
    (repo, first), (_, second) = calls
    assert (repo, first["revision"], first["cache_dir"], first["token"]) == ("team/z-image", "v2", cache, "hf_abc")
    assert (first["local_files_only"], second["local_files_only"], second["token"]) == (False, True, None)
    from fnmatch import fnmatch

    def wanted(name):
        return any(fnmatch(name, pattern) for pattern in first["allow_patterns"])

    assert all(map(wanted, ("model_index.json", "transformer/model-00001.safetensors", "tokenizer/merges.txt")))
    assert not any(map(wanted, ("z-image.safetensors", "README.md", "transformer/model.bin", "assets/a.png")))


class Response:
    """As much of an answer as the library's errors look at."""

    headers: dict[str, str] = {}
    request = None
    status_code = 404
    text = ""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (errors.GatedRepoError("gated", response=Response()), StoreCredentialsError, "give its token in HF_TOKEN"),
        (
            errors.RepositoryNotFoundError("no repo", response=Response()),
            ConfigurationError,
            "does not exist, or not for",
        ),
        (errors.RevisionNotFoundError("no rev", response=Response()), ConfigurationError, "does not exist, or not for"),
        (errors.LocalEntryNotFoundError("no connection"), TransientError, "could not be downloaded: no connection"),
        (OSError("disk full"), TransientError, "could not be downloaded: disk full"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_the_hub_says_is_put_into_words_and_a_kind(error, kind, message, sources, monkeypatch):
    def fail(**options):
        raise error

    online(monkeypatch, fail)
    with pytest.raises(kind, match=rf"f: hf://team/z-image at revision main .*{message}"):
        sources().folder("hf://team/z-image", "f")


def test_a_file_on_the_hub_and_a_whole_model_are_told_apart(cache, sources, tiny_model_folder):
    put_into_cache(cache, tiny_model_folder("zimage"))
    config = sources().file("hf://team/z-image/vae/config.json", "f")
    assert config.read_bytes() == (tiny_model_folder("zimage") / "vae" / "config.json").read_bytes()
    with pytest.raises(
        ConfigurationError, match=r"found the file 'vae/config\.json' in team/z-image, expected a whole"
    ):
        sources().folder("hf://team/z-image/vae/config.json", "f")
    with pytest.raises(ConfigurationError, match=r"found 'hf://team/z-image', expected a file in team/z-image"):
        sources().file("hf://team/z-image", "f")


# ---------------------------------------------------------------------- single files
ORIGINAL_NAMES = {
    "attention.to_out.0": "attention.out",
    "attention.norm_q": "attention.q_norm",
    "attention.norm_k": "attention.k_norm",
    "all_x_embedder.2-1.": "x_embedder.",
    "all_final_layer.2-1.": "final_layer.",
}


def original_layout(folder, target):
    """The denoiser of a tiny Z-Image as the model's own code names its weights: fused qkv, other names."""
    tensors = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    result = {}
    for key, value in tensors.items():
        if ".attention.to_q." in key:
            parts = [tensors[key.replace("to_q", name)] for name in ("to_q", "to_k", "to_v")]
            result[key.replace("to_q", "qkv")] = torch.cat(parts)
        elif ".attention.to_k." in key or ".attention.to_v." in key:
            continue
        else:
            result[reduce(lambda name, pair: name.replace(*pair), ORIGINAL_NAMES.items(), key)] = value
    save_file({f"model.diffusion_model.{key}": value.contiguous() for key, value in result.items()}, target)
    return target


def without_denoiser(folder, target):
    """All of a model folder but the denoiser's weights."""
    shutil.copytree(folder, target)
    (target / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    return target


@pytest.mark.parametrize("layout", ["diffusers", "original"])
def test_a_single_file_and_the_folder_it_came_from_are_the_same_model(layout, tiny_model_folder, load_tiny, tmp_path):
    folder = tiny_model_folder("zimage")
    file = tmp_path / "z-image.safetensors"
    if layout == "original":
        original_layout(folder, file)
    else:
        shutil.copy(folder / "transformer" / "diffusion_pytorch_model.safetensors", file)
    made = assemble(file, without_denoiser(folder, tmp_path / "extras"), tmp_path / "assembled")
    for dtype in (torch.float32, torch.bfloat16):
        model = family_for("zimage").load(made, dtype=dtype, device=CPU)
        expected = load_tiny("zimage", dtype).denoiser.state_dict()
        found = model.denoiser.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert model.latents_identity == load_tiny("zimage", dtype).latents_identity
    assert sum(path.stat().st_size for path in made.rglob("*") if not path.is_symlink()) < 10_000, "nothing was copied"
    assert assemble(file, tmp_path / "extras", tmp_path / "assembled") == made
    os.utime(file, (1, 1))
    assert assemble(file, tmp_path / "extras", tmp_path / "assembled") != made, "another file of the same name"


def test_a_job_names_a_file_and_a_folder_for_the_rest(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("wan21")
    file = tmp_path / "wan.safetensors"
    shutil.copy(folder / "transformer" / "diffusion_pytorch_model.safetensors", file)
    data = make_pictures(tmp_path / "data", [(64, 64)] * 2)
    job = Job(tmp_path / "job", file, data, tmp_path / "cache", "wan21", train={"steps": 1})
    job.change(model={"extras_name_or_path": str(without_denoiser(folder, tmp_path / "extras"))})
    assert job.run() == ExitCode.DONE


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: {"nothing": torch.zeros(1)}, "lacks .*weights of ZImageTransformer2DModel|not readable as"),
        (lambda tensors: dict(list(tensors.items())[5:]), "lacks .*weights of ZImageTransformer2DModel"),
    ],
)
def test_a_file_that_is_no_whole_denoiser_is_named(damage, message, tiny_model_folder, tmp_path):
    folder = tiny_model_folder("zimage")
    tensors = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    file = tmp_path / "part.safetensors"
    save_file(damage(tensors), file)
    made = assemble(file, folder, tmp_path / "assembled")
    with pytest.raises(ModelError, match=rf"part\.safetensors: ({message})"):
        family_for("zimage").load(made, dtype=torch.float32, device=CPU)


def test_extras_that_describe_no_denoiser_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigurationError, match=r"config\.model\.extras_name_or_path: .* is no diffusers pipeline"):
        assemble(tmp_path / "model.safetensors", tmp_path, tmp_path / "assembled")


def test_a_file_that_is_not_there_is_named(sources, tmp_path):
    model = ModelConfig(arch="zimage", name_or_path=f"{tmp_path}/no.safetensors", extras_name_or_path=str(tmp_path))
    with pytest.raises(DataError, match=r"config\.model\.name_or_path: .*/no\.safetensors is not a file"):
        sources().model(model)
    assert models.FIELD == "config.model"
