"""Names of child objects: deterministic, and legal for every legal job name."""

from __future__ import annotations

import hashlib
import re

MANAGED_BY = "lora-operator"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = "lora-operator.io/job"  # a label value of at most 63 characters, see label_value()
LABEL_JOB_UID = "lora-operator.io/job-uid"
LABEL_ATTEMPT = "lora-operator.io/attempt"
TRAINER_CONTAINER = "trainer"

_MAX_BASE = 40  # leaves room for -ATTEMPT and, in pod host names, for -INDEX within 63 characters
_DNS_LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


def base_name(job_name: str) -> str:
    """A DNS label of at most 40 characters that starts with a letter; the job's name itself where that fits."""
    if len(job_name) <= _MAX_BASE and _DNS_LABEL.match(job_name):
        return job_name
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9-]", "-", job_name.lower()).strip("-")
    if not words[:1].isalpha():
        words = "j-" + words
    return words[: _MAX_BASE - 9].rstrip("-") + "-" + digest


def child_name(job_name: str, attempt: int) -> str:
    """Name of an attempt's Job, Service and ConfigMap; `attempt` counts from 1."""
    return f"{base_name(job_name)}-{attempt}"


def label_value(job_name: str) -> str:
    """The job's name as a label value: itself up to 63 characters, else its base name."""
    return job_name if len(job_name) <= 63 else base_name(job_name)
