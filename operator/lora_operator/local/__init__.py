"""What `lora-operator` does without a cluster: reading manifests, running a job, showing it."""
