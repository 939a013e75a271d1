"""`hf://org/repo@revision`: models of the Hugging Face hub, from the local cache or downloaded into it.

With HF_HUB_OFFLINE=1 nothing is downloaded. The token is that of the mounted Secret (its key `hfToken`), or what the
library itself finds: HF_TOKEN, or the file of a login.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lora_api.store import StoreCredentialsError
from lora_trainer.errors import ConfigurationError, TransientError

SCHEME = "hf://"
TOKEN_FILE = "hfToken"  # noqa: S105 - the name of a file
_PATTERN = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?(/(?P<path>.+))?")

_PIPELINE_FILES = ("*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja", "*/*.safetensors")
"""Of a repository, what a diffusers pipeline consists of: weights at its root are copies in another layout."""


@dataclass(frozen=True)
class HubLocation:
    """Where something lies on the hub; without a revision it is the default branch."""

    repo: str
    revision: str | None
    path: str | None

    def __str__(self) -> str:
        return f"{self.repo} at revision {self.revision or 'main'}"


def parse_location(location: str, field: str) -> HubLocation:
    """`hf://org/repo@revision/file`; revision and file may be left out, slashes in a revision are written %2F.

    Raises:
        ConfigurationError: It is written otherwise.
    """
    found = _PATTERN.fullmatch(location)
    if found is None:
        raise ConfigurationError(
            f"{field}: found {location!r}, expected hf://org/repo, hf://org/repo@revision or a file in it"
        )
    revision = unquote(found["revision"]) if found["revision"] else None
    return HubLocation(found["repo"], revision, found["path"])


def hub_folder(location: str, field: str, **access: Any) -> Path:
    """The folder of a whole model; arguments and errors as in `hub_file`."""
    from huggingface_hub import snapshot_download

    where = parse_location(location, field)
    if where.path is not None:
        raise ConfigurationError(f"{field}: found the file {where.path!r} in {where.repo}, expected a whole model")
    return _fetch(
        lambda **more: snapshot_download(where.repo, allow_patterns=list(_PIPELINE_FILES), **more),
        where,
        field,
        **access,
    )


def hub_file(location: str, field: str, **access: Any) -> Path:
    """One file of a repository.

    Args:
        location: `hf://org/repo@revision/file`.
        field: Path of the configuration field, for messages.
        access: As `_fetch` takes them: cache, secrets, download.

    Raises:
        ConfigurationError: It does not exist; or it is not in the cache and nothing may be downloaded.
        StoreCredentialsError: It may be read with a token only.
        TransientError: The hub can't be reached.
    """
    from huggingface_hub import hf_hub_download

    where = parse_location(location, field)
    if where.path is None:
        raise ConfigurationError(f"{field}: found {location!r}, expected a file in {where.repo}")
    return _fetch(lambda **more: hf_hub_download(where.repo, where.path, **more), where, field, **access)


def _fetch(
    fetch: Callable[..., str],
    where: HubLocation,
    field: str,
    *,
    cache: Path,
    secrets: Path | None,
    download: bool = True,
) -> Path:
    """Calls the library and puts its errors into words.

    Args:
        fetch: What is called.
        where: What is asked for.
        field: Path of the configuration field, for messages.
        cache: Folder for downloads, where the library has none of its own.
        secrets: Folder of the mounted Secret.
        download: False when another process of this node has just done so.
    """
    from huggingface_hub import constants, errors

    folder = cache_folder(cache)
    offline = constants.is_offline_mode() or not download
    try:
        return Path(fetch(revision=where.revision, cache_dir=folder, local_files_only=offline, token=_token(secrets)))
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise _in_words(error, f"{field}: {SCHEME}{where}", folder, offline=offline) from error


def _in_words(error: Exception, what: str, folder: Path, *, offline: bool) -> Exception:
    """What the library raised, as an error of ours that says what was asked for and where it was looked for."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and offline:
        return ConfigurationError(
            f"{what} is not in the cache {folder}, and HF_HUB_OFFLINE=1 forbids downloads; put it there, or allow "
            "downloads with HF_HUB_OFFLINE=0 in spec.trainer.env of the profile"
        )
    if isinstance(error, errors.GatedRepoError):
        return StoreCredentialsError(
            f"{what} is open to accepted accounts only; give its token in HF_TOKEN, or as {TOKEN_FILE} in the Secret"
        )
    if isinstance(
        error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    ):
        return ConfigurationError(
            f"{what} does not exist, or not for this token (looked in the cache {folder}, too): {_line(error)}"
        )
    if isinstance(error, errors.HFValidationError):
        return ConfigurationError(f"{what}: {_line(error)}")
    return TransientError(f"{what} could not be downloaded: {_line(error)}; nor is it in the cache {folder}")


def cache_folder(own: Path) -> Path:
    """The library's cache where the environment names one or it exists already; else a folder in our own."""
    from huggingface_hub import constants

    library = Path(constants.HF_HUB_CACHE)
    named = any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE"))
    return library if named or library.is_dir() else own / "hub"


def _token(secrets: Path | None) -> str | None:
    file = secrets / TOKEN_FILE if secrets is not None else None
    return file.read_text().strip() or None if file is not None and file.is_file() else None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
