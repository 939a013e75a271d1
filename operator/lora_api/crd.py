"""The CustomResourceDefinitions of both kinds, from the pydantic types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lora_api import cel
from lora_api.job import GROUP, KIND, PLURAL, VERSION, LoRATrainingJob
from lora_api.profile import PROFILE_KIND, PROFILE_PLURAL, LoRATrainingProfile
from lora_api.schema import Schema, at, bound, one_line, structural

_ROOT_DESCRIPTIONS = {
    "apiVersion": "Version of this schema.",
    "kind": "Kind of the object.",
    "spec": "What is asked for.",
    "status": "What is seen. Written by the operator only.",
}


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; `wide` ones show with `-o wide`."""

    name: str
    type: str
    path: str
    description: str
    wide: bool = False

    def manifest(self) -> Schema:
        """As the API server reads it."""
        entry = {"name": self.name, "type": self.type, "description": self.description, "jsonPath": self.path}
        return entry | ({"priority": 1} if self.wide else {})


_AGE = Column("Age", "date", ".metadata.creationTimestamp", "Time since the object was created.")

JOB_COLUMNS = (
    Column("Phase", "string", ".status.phase", "For people; programs read the conditions."),
    Column("Model", "string", ".spec.config.model.arch", "Model family."),
    Column("Step", "integer", ".status.progress.step", "Optimizer steps done."),
    Column("Progress", "string", ".status.progress.percent", "Share of the steps that is done."),
    Column("Loss", "string", ".status.progress.loss", "Loss, smoothed."),
    Column("ETA", "string", ".status.progress.eta", "Time to the last step at the present speed."),
    Column("Restarts", "integer", ".status.restartsTotal", "Restarts, whatever the cause."),
    _AGE,
    Column("Stage", "string", ".status.stage", "What the trainer is doing.", wide=True),
    Column("Attempt", "integer", ".status.attempt", "Number of the current child Job.", wide=True),
    Column("Steps", "integer", ".status.progress.steps", "Optimizer steps in all.", wide=True),
    Column("Output", "string", ".status.output.location", "The run directory.", wide=True),
)

PROFILE_COLUMNS = (
    Column("Image", "string", ".spec.trainer.image", "Trainer image."),
    Column("Stores", "string", ".spec.stores[*].name", "Stores that jobs may name."),
    _AGE,
)


def job_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of LoRATrainingJob."""
    schema = _root(
        structural(LoRATrainingJob), "Fine-tunes one diffusion model with one adapter into one run directory."
    )
    spec, status = at(schema, ("spec",)), at(schema, ("status",))
    bound(spec)
    one_line(at(spec, ("config",)))
    at(status, ("conditions",)).update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})
    # the status that every object shows before the operator has seen it: kstatus reads it as "in progress"
    status["default"] = {}
    cel.attach(schema, cel.JOB_RULES)
    cel.attach(schema, cel.immutable(schema))
    return _definition(KIND, PLURAL, short="ltj", scope="Namespaced", schema=schema, columns=JOB_COLUMNS)


def profile_crd() -> dict[str, Any]:
    """The CustomResourceDefinition of LoRATrainingProfile."""
    schema = _root(structural(LoRATrainingProfile), "What the platform team decides for the jobs that name it.")
    stores = at(schema, ("spec", "stores"))
    stores.update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})  # no name is there twice
    bound(at(schema, ("spec",)))
    cel.attach(schema, cel.PROFILE_RULES)
    return _definition(
        PROFILE_KIND, PROFILE_PLURAL, short="ltp", scope="Cluster", schema=schema, columns=PROFILE_COLUMNS
    )


def _root(schema: Schema, description: str) -> Schema:
    """The root of an object: version, kind and metadata are the API server's own to check, and to describe."""
    properties = schema["properties"]
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string"}
    for name, text in _ROOT_DESCRIPTIONS.items():
        if name in properties:
            properties[name] = {"description": text} | {k: v for k, v in properties[name].items() if k != "description"}
    properties["metadata"] = {"type": "object"}
    schema["description"] = description
    schema["required"] = ["spec"]
    return schema


def _definition(
    kind: str, plural: str, *, short: str, scope: str, schema: Schema, columns: tuple[Column, ...]
) -> dict[str, Any]:
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [column.manifest() for column in columns],
        "schema": {"openAPIV3Schema": schema},
    }
    if "status" in schema["properties"]:
        version["subresources"] = {"status": {}}
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": [short],
        "categories": ["training"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": scope, "versions": [version]},
    }
