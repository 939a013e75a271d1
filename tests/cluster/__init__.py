"""A real Kubernetes cluster, an API server alone, and a real S3 server, for tests and for trying things out.

`python -m tests.cluster up` brings the cluster up; docs/cluster.md tells the rest.
"""

from tests.cluster.apiserver import ApiServer
from tests.cluster.cluster import Cluster
from tests.cluster.images import Images
from tests.cluster.settings import ClusterError

__all__ = ["ApiServer", "Cluster", "ClusterError", "Images"]
