"""Where the base model comes from: a folder, the hub, a store, or one file with the rest from a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from lora_api.config import SINGLE_FILE, ModelConfig
from lora_api.run import RunConfig
from lora_api.stores import Credentials, open_bucket
from lora_trainer.data import hub
from lora_trainer.data.locations import SCHEME, Report, fetch_file, local_folder, split_uri, store_of
from lora_trainer.errors import ConfigurationError, DataError
from lora_trainer.families.folder import SINGLE_FILE_NAME
from lora_trainer.retry import RetryingStore

DENOISERS = ("transformer", "unet")
FIELD = "config.model"


@dataclass(frozen=True)
class Sources:
    """Turns locations of the configuration into paths on this machine.

    Attributes:
        run: Where the stores are.
        cache: Folder for copies.
        credentials: Of the S3 stores.
        secrets: Folder of the mounted Secret.
        report: Told what is being done.
        download: False when another process of this node has just done so.
        copies: Filled in: path of each copy -> the location it is a copy of.
    """

    run: RunConfig
    cache: Path
    credentials: Credentials | None
    secrets: Path | None
    report: Report
    download: bool = True
    copies: dict[str, str] = field(default_factory=dict)

    def dataset(self, location: str, name: str) -> Path:
        """The folder of a dataset.

        Raises:
            ConfigurationError: It is to come from the hub, whose datasets are no folders of pictures.
            ConfigurationError, DataError, StoreError: See `local_folder`.
        """
        if location.startswith(hub.SCHEME):
            raise ConfigurationError(f"{name}: found {location!r}, expected a local folder or s3://bucket/prefix")
        return self.folder(location, name)

    def folder(self, location: str, name: str) -> Path:
        """The folder for a location.

        Raises:
            ConfigurationError, DataError, StoreError: See `local_folder` and `hub.hub_file`.
        """
        if location.startswith(hub.SCHEME):
            self.report(f"looking for {location}")
            found = hub.hub_folder(location, name, cache=self.cache, secrets=self.secrets, download=self.download)
        else:
            found = local_folder(
                location,
                name,
                self.run,
                cache=self.cache,
                credentials=self.credentials,
                report=self.report,
                download=self.download,
            )
        self.copies[str(found)] = location
        return found

    def file(self, location: str, name: str) -> Path:
        """The file for a location.

        Raises:
            DataError: It does not exist.
            ConfigurationError, StoreError: See `local_folder` and `hub.hub_file`.
        """
        if location.startswith(hub.SCHEME):
            self.report(f"looking for {location}")
            return hub.hub_file(location, name, cache=self.cache, secrets=self.secrets, download=self.download)
        if not location.startswith(SCHEME):
            path = Path(location).expanduser()
            if not path.is_file():
                raise DataError(f"{name}: {path} is not a file")
            return path
        bucket, prefix = split_uri(location)
        parent, _, file_name = prefix.rstrip("/").rpartition("/")
        spec = store_of(bucket, self.run, name)
        digest = hashlib.sha256(f"{spec.endpoint}|{bucket}|{prefix}".encode()).hexdigest()[:16]
        target = self.cache / "s3" / bucket / digest / file_name
        store = RetryingStore(open_bucket(spec, bucket, f"{parent}/" if parent else "", self.credentials))
        if self.download and not fetch_file(store, file_name, target, self.report):
            raise DataError(f"{name}: nothing lies at {location} at {spec.endpoint}")
        return target

    def model(self, model: ModelConfig) -> Path:
        """The folder of the base model; one made of links, where its denoiser is a single file."""
        if not model.name_or_path.endswith(SINGLE_FILE):
            return self.folder(model.name_or_path, f"{FIELD}.name_or_path")
        assert model.extras_name_or_path is not None, "the types ask for it"
        file = self.file(model.name_or_path, f"{FIELD}.name_or_path")
        extras = self.folder(model.extras_name_or_path, f"{FIELD}.extras_name_or_path")
        return assemble(file, extras, self.cache / "assembled")

    def assistant(self, model: ModelConfig) -> Path | None:
        """The file of the training adapter, where there is one."""
        location = model.assistant_lora_path
        return None if location is None else self.file(location, f"{FIELD}.assistant_lora_path")


def assemble(file: Path, extras: Path, root: Path) -> Path:
    """A model folder with the denoiser of a single file and everything else of another folder; nothing is copied.

    Raises:
        ConfigurationError: The other folder does not describe a denoiser.
    """
    try:
        index = json.loads((extras / "model_index.json").read_text())
        part = next(name for name in DENOISERS if name in index)
        config = (extras / part / "config.json").read_bytes()
    except (OSError, ValueError, StopIteration) as error:
        raise ConfigurationError(
            f"{FIELD}.extras_name_or_path: {extras} is no diffusers pipeline with the denoiser's config.json: {error}"
        ) from error
    stat = file.stat()
    facts = [str(file.absolute()), stat.st_size, stat.st_mtime_ns, str(extras.absolute()), config.hex()]
    folder = root / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".part-") as scratch:
        made = Path(scratch) / "model"
        (made / part).mkdir(parents=True)
        (made / part / "config.json").write_bytes(config)
        (made / part / SINGLE_FILE_NAME).symlink_to(file.absolute())
        shutil.copy(extras / "model_index.json", made)
        for other in extras.iterdir():
            if other.is_dir() and other.name != part:
                (made / other.name).symlink_to(other.absolute())
        if not folder.is_dir():
            made.replace(folder)
    return folder
