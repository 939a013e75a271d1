"""From a manifest and the command's options to everything that a local run needs. Reads files, starts nothing."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lora_api.aitoolkit import is_ai_toolkit
from lora_api.job import KIND, LoRATrainingJob
from lora_api.layout import RUN_FILE
from lora_api.problems import InvalidDocument, Problem, parse
from lora_api.profile import PROFILE_KIND, LoRATrainingProfile, StoreSpec
from lora_api.store import Store, StoreError
from lora_api.stores import Credentials, open_store
from lora_api.yamlfile import Document, read_documents
from lora_operator.adapters.local_pods import Machine
from lora_operator.adapters.local_state import LocalState
from lora_operator.core.validate import problems_of_job
from lora_operator.core.views import JobKey, Manifest
from lora_operator.local import machine as this_machine
from lora_operator.local.admission import run_uid
from lora_operator.local.convert import convert
from lora_operator.local.validate import kind_problem, problems_in

DEFAULT_STORE = "runs"
STATE_FOLDER = ".lora-operator"  # inside a directory store: state and store are moved and removed together
SECRET = "lora-local-credentials"  # noqa: S105 - a name
_S3 = "s3://"


class UserError(Exception):
    """Something the user can put right; printed as it stands."""


@dataclass(frozen=True)
class Options:
    """Where to run what."""

    file: str
    store: str = DEFAULT_STORE
    endpoint: str | None = None
    profile: str | None = None


@dataclass
class Prepared:
    """All that a local run needs."""

    manifest: Manifest  # as it will be run: absolute paths, sized to this machine
    profile: Manifest
    key: JobKey
    uid: str
    store: Store  # of the run directory's parent: keys begin with the output path
    output_path: str
    state: LocalState
    machine: Machine
    credentials: Credentials | None
    notes: list[str] = field(default_factory=list)

    @property
    def run_store(self) -> Store:
        """The run directory."""
        return self.store.sub(self.output_path)

    def is_begun(self) -> bool:
        """Whether the run directory belongs to somebody already. Raises StoreError."""
        return self.run_store.get(RUN_FILE) is not None


def prepare(options: Options, variables: Mapping[str, str]) -> Prepared:
    """Reads and checks the manifest, decides store, profile and state folder.

    Raises:
        UserError: For everything that is wrong with files, options or paths.
    """
    document, conversions = read_job(options.file, variables)
    raw = with_absolute_paths(document.value, document.folder)
    gpus = this_machine.find_gpus(variables)
    credentials = this_machine.credentials_from(variables)
    profile, store = _profile_and_store(options, raw, has_gpu=bool(gpus))
    manifest, notes = fit_to_machine(raw, profile, gpus)
    job = parse(LoRATrainingJob, manifest)
    notes = [*conversions, *notes]
    _refuse(document.place, [*problems_of_job(job, profile), *missing_paths(job), *_suspended(job)])
    key = JobKey(job.metadata.namespace, job.metadata.name)
    manifest["metadata"]["namespace"] = key.namespace
    try:
        opened = open_store(store, credentials)
    except StoreError as error:
        raise UserError(f"{error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
    secrets = {SECRET: this_machine.secret_data(credentials)} if credentials else {}
    return Prepared(
        manifest=manifest,
        profile=profile.model_dump(mode="json", by_alias=True, exclude_none=True),
        key=key,
        uid=run_uid(_identity(store), job.output_path, key.namespace, key.name),
        store=opened,
        output_path=job.output_path,
        state=LocalState(state_folder(store, key, variables)),
        machine=Machine(cache=this_machine.cache_folder(variables), secrets=secrets, gpus=gpus),
        credentials=credentials,
        notes=notes,
    )


def locate(options: Options, variables: Mapping[str, str]) -> tuple[JobKey, LocalState]:
    """Where a job's local state is; what else the manifest says plays no part. Raises UserError."""
    document, _ = read_job(options.file, variables)
    job = parse(LoRATrainingJob, document.value)
    _, store = _profile_and_store(options, document.value, has_gpu=False)
    key = JobKey(job.metadata.namespace, job.metadata.name)
    return key, LocalState(state_folder(store, key, variables))


def read_job(name: str, variables: Mapping[str, str]) -> tuple[Document, tuple[str, ...]]:
    """The one job in a file, and notes where it was written for ai-toolkit: relative folders in it are then relative to the
    current folder, as there. Raises UserError.
    """
    try:
        documents = read_documents(name)
    except ValueError as error:
        raise UserError(str(error)) from error
    if len(documents) != 1 or not is_ai_toolkit(documents[0].value):
        return one_of(documents, name, KIND), ()
    try:
        converted = convert(documents[0].value, variables)
    except InvalidDocument as error:
        _refuse(documents[0].place, error.problems)
        raise
    return Document(documents[0].place, converted.manifest, Path.cwd()), converted.notes


def read_one(name: str, kind: str) -> Document:
    """The one valid document of that kind in a file. Raises UserError."""
    try:
        documents = read_documents(name)
    except ValueError as error:
        raise UserError(str(error)) from error
    return one_of(documents, name, kind)


def one_of(documents: list[Document], name: str, kind: str) -> Document:
    """The same among documents that were read already."""
    mine = [d for d in documents if isinstance(d.value, dict) and d.value.get("kind") == kind]
    if len(mine) == 1:
        _refuse(mine[0].place, problems_in(mine[0].value))
        return mine[0]
    if len(mine) > 1:
        raise UserError(f"{name}: holds {len(mine)} documents of kind {kind}, expected one")
    others = [d for d in documents if kind_problem(d.value) is not None]
    detail = f": {others[0].place}: {kind_problem(others[0].value)}" if others else ""
    raise UserError(f"{name}: holds no {kind}{detail}")


def with_absolute_paths(raw: Manifest, folder: Path) -> Manifest:
    """The manifest with local folders made absolute: a relative one is relative to the manifest's own folder."""
    manifest = copy.deepcopy(raw)
    config = manifest["spec"]["config"]
    places = [(config["model"], "name_or_path")]
    places += [(d, name) for d in config["datasets"] for name in ("folder_path", "mask_path") if d.get(name)]
    for owner, name in places:
        if not owner[name].startswith(_S3):
            owner[name] = str((folder / Path(owner[name]).expanduser()).resolve())
    return manifest


def fit_to_machine(raw: Manifest, profile: LoRATrainingProfile, gpus: tuple[str, ...]) -> tuple[Manifest, list[str]]:
    """The manifest sized to this machine, and a note for each thing that is not as asked."""
    manifest = copy.deepcopy(raw)
    notes: list[str] = []
    resources = manifest["spec"].setdefault("resources", {})
    config = manifest["spec"]["config"]
    sizing = profile.spec.sizing
    per_node = resources.get("gpusPerNode", sizing.gpus_per_node)
    nodes = resources.get("nodes", sizing.nodes)
    if config.get("device", "auto") == "cpu":
        resources["gpusPerNode"] = 0
        return manifest, notes
    if not gpus:
        if config.get("device") == "cuda" or per_node:
            notes.append("no GPU was found on this machine: training on the CPU")
        resources["gpusPerNode"] = 0
        if config.get("device") == "cuda":
            config["device"] = "cpu"
        return manifest, notes
    resources["gpusPerNode"] = min(per_node, len(gpus))
    resources["nodes"] = max(1, min(nodes, len(gpus) // max(1, resources["gpusPerNode"])))
    if (resources["nodes"], resources["gpusPerNode"]) != (nodes, per_node) and per_node:
        taken = f"{resources['nodes']} x {resources['gpusPerNode']}"
        notes.append(f"this machine has {len(gpus)} GPUs: training on {taken} instead of {nodes} x {per_node}")
    return manifest, notes


def missing_paths(job: LoRATrainingJob) -> list[Problem]:
    """Local folders that are not there: better said now than after the trainer has started."""
    config = job.spec.config
    named = [("spec.config.model.name_or_path", config.model.name_or_path)]
    named += [(f"spec.config.datasets[{n}].folder_path", d.folder_path) for n, d in enumerate(config.datasets)]
    named += [
        (f"spec.config.datasets[{n}].mask_path", d.mask_path) for n, d in enumerate(config.datasets) if d.mask_path
    ]
    return [
        Problem(field, f"the folder {path} does not exist; relative paths are relative to the manifest's folder")
        for field, path in named
        if not path.startswith(_S3) and not Path(path).is_dir()
    ]


def state_folder(store: StoreSpec, key: JobKey, variables: Mapping[str, str]) -> Path:
    """Inside a directory store; for an S3 store below `$XDG_STATE_HOME`, apart from other stores' jobs of that name."""
    if store.type == "directory":
        return Path(store.directory or "") / STATE_FOLDER / key.namespace / key.name
    digest = hashlib.sha256(_identity(store).encode()).hexdigest()[:12]
    return this_machine.state_root(variables) / f"{store.bucket}-{digest}" / key.namespace / key.name


def _profile_and_store(options: Options, raw: Manifest, *, has_gpu: bool) -> tuple[LoRATrainingProfile, StoreSpec]:
    """The profile to run with, and its store that the job names."""
    name = raw["spec"].get("output", {}).get("store", "default")
    wanted = raw["spec"].get("profile", "default")
    if options.profile is None:
        store = store_from_option(options.store, options.endpoint, name)
        return _made_up_profile(wanted, store, has_gpu=has_gpu), store
    document = read_one(options.profile, PROFILE_KIND)
    given = parse(LoRATrainingProfile, document.value)
    found = given.spec.store(name)
    if options.store != DEFAULT_STORE or found is None:
        found = store_from_option(options.store, options.endpoint, name)
    found = _with_secret(found)
    others = tuple(_with_secret(store) for store in given.spec.stores if store.name != name)
    spec = given.spec.model_copy(update={"stores": (found, *others)})
    metadata = given.metadata.model_copy(update={"name": wanted})
    return given.model_copy(update={"spec": spec, "metadata": metadata}), found


def store_from_option(text: str, endpoint: str | None, name: str) -> StoreSpec:
    """The store that `--store` and `--endpoint` describe. Raises UserError."""
    if not text.startswith(_S3):
        return StoreSpec(name=name, type="directory", directory=str(Path(text).expanduser().resolve()))
    url = urlsplit(text)
    if endpoint is None:
        raise UserError(f"--store {text}: an S3 store needs its server too, such as --endpoint http://localhost:9000")
    raw = {
        "name": name,
        "type": "s3",
        "endpoint": endpoint.rstrip("/"),
        "bucket": url.netloc,
        "prefix": url.path.strip("/"),
    }
    try:
        return _with_secret(parse(StoreSpec, raw))
    except InvalidDocument as error:
        raise UserError(f"--store {text} --endpoint {endpoint}: {error.problems[0]}") from error


def _with_secret(store: StoreSpec) -> StoreSpec:
    """The Secret that holds the credentials of the environment; no other can be reached without a cluster."""
    if store.type == "directory":
        return store
    credentials = store.credentials.model_copy(update={"operator_secret_name": SECRET, "job_secret_name": SECRET})
    return store.model_copy(update={"credentials": credentials})


def _made_up_profile(name: str, store: StoreSpec, *, has_gpu: bool) -> LoRATrainingProfile:
    raw = {
        "apiVersion": "lora-operator.io/v1alpha1",
        "kind": PROFILE_KIND,
        "metadata": {"name": name},
        "spec": {
            "stores": [store.model_dump(mode="json", by_alias=True, exclude_none=True)],
            "trainer": {"image": "local", "env": {"LORA_HEARTBEAT_SECONDS": "0.5"}},
            "sizing": {"nodes": 1, "gpusPerNode": 1 if has_gpu else 0},
            "backoff": {"initialSeconds": 2, "maxSeconds": 60},
        },
    }
    return parse(LoRATrainingProfile, raw)


def _identity(store: StoreSpec) -> str:
    """What tells one store from another."""
    if store.type == "directory":
        return f"{store.directory}/{store.prefix}"
    return f"{store.endpoint}/{store.bucket}/{store.prefix}"


def _suspended(job: LoRATrainingJob) -> list[Problem]:
    if not job.spec.run_policy.suspend:
        return []
    return [Problem("spec.runPolicy.suspend", "true asks for nothing to be run; set it to false")]


def _refuse(place: str, problems: list[Problem]) -> None:
    if problems:
        raise UserError("\n".join(f"{place}: {problem}" for problem in problems))
