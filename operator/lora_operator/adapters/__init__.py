"""One outside thing each: Kubernetes, local processes, stores, the clock."""
