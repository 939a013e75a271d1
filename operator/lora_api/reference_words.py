"""What the reference page says beyond the schemas. Tests hold each table against the code it speaks of."""

from __future__ import annotations

from lora_api.exit_codes import ExitCode
from lora_api.job import ConditionType, Phase

INTRODUCTION = """\
<!-- Generated from operator/lora_api by `make generate`; do not edit. -->

# Reference

Two kinds: a [LoRATrainingJob](#loratrainingjob) says what to train, a [LoRATrainingProfile](#loratrainingprofile) says
what the platform provides. The same manifests run in a cluster and, with `lora-operator run`, on one machine.

- Unknown fields are errors. The operator and the command line suggest the right name; `kubectl apply` refuses them too.
- A field without a default may be left out; its meaning says what then happens.
- *Mutable* fields may change while the job exists. Everything else is fixed once the job is created, because it defines the
  run: the API server refuses the change and names the field."""

JOB = """\
`apiVersion: {api_version}`, `kind: {kind}`. Namespaced; short name `ltj`, category `training`.

Keys below `spec.config` are the trainer's own, in snake_case, as they stand in a training configuration file; all others
are camelCase. Changes of `spec.config.save`, `spec.config.sample`, `spec.config.train.steps` and `spec.config.train.lr` reach
a running trainer at its next step, without a restart."""

STATUS = """\
Written by the operator only; under 8 kB always. Programs read the conditions, people the phase. Times are RFC 3339 in UTC;
steps count optimizer updates."""

PROFILE = """\
`apiVersion: {api_version}`, `kind: {kind}`. Cluster-scoped; short name `ltp`, category `training`. A change takes effect with
the next attempt of each job. Endpoints and credentials come only from here, never from a job."""

PHASES_INTRODUCTION = "For people only: the phase says in one word what the conditions say exactly."

CONDITIONS: dict[ConditionType, str] = {
    ConditionType.READY: "The job has succeeded; kstatus takes it for current.",
    ConditionType.RECONCILING: "The operator works towards the end of the job.",
    ConditionType.STALLED: "Invalid or failed: nothing happens until a person does something.",
    ConditionType.ACCEPTED: "Manifest, profile, store and Secret fit together. False names each field that is wrong; Unknown: "
    "the store could not be asked.",
    ConditionType.QUEUED: "The attempt waits for admission, or for its pods to start.",
    ConditionType.RUNNING: "The trainer runs; `stage` says what it does.",
    ConditionType.SUSPENDED: "Stopped on request (`runPolicy.suspend`) or by its queue; the devices are free.",
    ConditionType.INTERRUPTED: "The last attempt ended early and another one follows; the reason says why.",
    ConditionType.SUCCEEDED: "The final adapter is committed in the run directory. For good.",
    ConditionType.FAILED: "The job has ended without its adapter; reason and message say why. For good.",
    ConditionType.CHECKPOINT_GC: "Checkpoints beyond `save.max_step_saves` are removed. False: the store can't be reached.",
}

PHASES: dict[Phase, str] = {
    Phase.PENDING: "Seen, or about to be; nothing runs yet.",
    Phase.QUEUED: "Waits for admission or for devices.",
    Phase.RUNNING: "Training, or preparing to.",
    Phase.INTERRUPTED: "Between two attempts.",
    Phase.SUSPENDED: "Stopped on request or by its queue.",
    Phase.SUCCEEDED: "Done; the adapter is in `status.output`.",
    Phase.FAILED: "Ended without the adapter.",
    Phase.INVALID: "The manifest, or what it refers to, has to be corrected.",
    Phase.DELETING: "Being deleted, and its run directory with it.",
}

EXIT_CODES_INTRODUCTION = """\
The trainer ends with one of these codes and leaves one line of JSON in the termination log that says the same in words. Any
other code is a plain failure, retried up to `runPolicy.backoffLimit`."""

EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.DONE: "Finished; the final manifest is committed.",
    ExitCode.CONFIGURATION: "The configuration can't be trained; the message names the field.",
    ExitCode.DATA: "The data can't be trained on; the message names the file.",
    ExitCode.CHECKPOINT_INTEGRITY: "There are checkpoints, and none passes its checksums.",
    ExitCode.TRANSIENT: "Store, rendezvous or collective out of reach for a while.",
    ExitCode.CREDENTIALS: "The store refused the credentials.",
    ExitCode.PREEMPTED: "Told to stop: a checkpoint was committed first.",
    ExitCode.OUT_OF_MEMORY: "The device's memory ran out.",
    ExitCode.NOT_FINITE: "The loss was not finite for `train.max_nonfinite_steps` steps in a row.",
}

RUN_DIRECTORY_INTRODUCTION = """\
All that one job writes lies below `<store prefix>/<output.path>/`. A file counts only when a manifest names it; a manifest is
written last. The trainer only adds, the operator only deletes, and never a key outside the job's own prefix."""

RUN_DIRECTORY: tuple[tuple[str, str, str], ...] = (
    ("run.json", "trainer", "Whose directory this is: uid and name of the job, configuration hash."),
    (
        "starts/000001.json",
        "trainer",
        "One claim per start; the highest wins, so that a pod that should be dead can't commit.",
    ),
    ("control.json", "operator", "Steps, learning rate, saving and sampling as they are to be from the next step on."),
    ("progress.json", "trainer", "Heartbeat: step, loss, speed, stage; how the start ended."),
    ("metrics/000001.jsonl", "trainer", "One line per logged step; one file per start."),
    (
        "checkpoints/step-000000900/000001/",
        "trainer",
        "Adapter, optimizer, schedule, loader position and random state.",
    ),
    (
        "checkpoints/step-000000900/000001/manifest.json",
        "trainer",
        "The commit: step, start, every file with size and SHA-256.",
    ),
    ("samples/step-000000900/", "trainer", "Pictures drawn after that step."),
    ("final/", "trainer", "The adapter, samples and report."),
    ("final/manifest.json", "trainer", "The job has succeeded."),
)

ENVIRONMENT_INTRODUCTION = """\
The operator sets the `LORA_*` variables in trainer pods; a person needs them only to run the trainer alone. Further variables
for the trainer come from `spec.trainer.env` of the profile."""

ENVIRONMENT: tuple[tuple[str, str, str, str], ...] = (
    ("LORA_RUN_CONFIG", "trainer", "-", "The run configuration's file."),
    (
        "LORA_CREDENTIALS_DIR",
        "trainer",
        "-",
        "Folder of the mounted Secret: `accessKey`, `secretKey`, and `hfToken` for models of the hub that ask for it.",
    ),
    (
        "LORA_CACHE_DIR",
        "trainer",
        "`~/.cache/lora-trainer`",
        "Folder of downloaded models, datasets and encoded pictures.",
    ),
    (
        "HF_HUB_OFFLINE",
        "trainer",
        "1",
        "0 allows `hf://` models to be downloaded; 1 takes them from the cache alone.",
    ),
    (
        "HF_HOME",
        "trainer",
        "`hub` in `LORA_CACHE_DIR`",
        "The Hugging Face cache; the default of that library where it exists.",
    ),
    ("LORA_TERMINATION_LOG", "trainer", "`/dev/termination-log`", "File for the last word of a start."),
    ("LORA_GRACE_SECONDS", "trainer", "30", "Seconds between SIGTERM and SIGKILL."),
    ("LORA_HEARTBEAT_SECONDS", "trainer", "2", "Seconds between two heartbeats."),
    ("LORA_RETENTION", "trainer", "`operator`", "`trainer`: the trainer itself removes old checkpoints."),
    ("LORA_COMMAND", "trainer", "-", "The command line that goes on with the run, told to its user at the end."),
    ("CXX", "trainer", "`g++`, `clang++`", "C++ compiler for `train.compile` on CPUs."),
    ("LORA_METRICS_PORT", "trainer", "0", "Port of `/metrics` for Prometheus; 0 is off."),
    ("KUBECONFIG", "operator", "the pod's service account", "How to reach the API server, outside a cluster."),
    ("POD_NAMESPACE", "operator", "the service account's", "Namespace of the operator's own Secrets."),
    ("POD_NAME", "operator", "`lora-operator`", "Who an event says it comes from."),
    (
        "AWS_ACCESS_KEY_ID",
        "command line",
        "-",
        "Access key of an S3 store; `MINIO_ACCESS_KEY` and `MINIO_ROOT_USER` do as well.",
    ),
    ("AWS_SECRET_ACCESS_KEY", "command line", "-", "Its secret key; or `MINIO_SECRET_KEY`, `MINIO_ROOT_PASSWORD`."),
    ("XDG_CACHE_HOME", "command line", "`~/.cache`", "Where downloads and encoded pictures are kept."),
    ("XDG_STATE_HOME", "command line", "`~/.local/state`", "Where runs into an S3 store are remembered."),
    ("SSL_CERT_FILE", "both", "-", "Certificates of the authorities to trust when talking to an S3 server over https."),
)
