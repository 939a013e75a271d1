"""Building the cluster's programs from Go modules, whose content go.sum pins."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import settings
from tests.cluster.report import say, step
from tests.cluster.settings import ClusterError

KUBE_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")


@dataclass(frozen=True)
class Part:
    """Programs that come from one source and are cached together."""

    name: str
    programs: tuple[str, ...]
    package: str
    version_flags: tuple[str, ...] = ()
    expectation: str = ""

    @property
    def folder(self) -> Path:
        """The Go module with its pinned dependencies."""
        return settings.HERE / self.name

    def sources(self) -> list[Path]:
        """The files that decide what is built."""
        return sorted(path for path in self.folder.iterdir() if path.suffix in {".go", ".mod", ".sum"})

    def key(self) -> str:
        """Changes with the Go sources, the pinned modules, the versions and the build flags."""
        contents = [piece for path in self.sources() for piece in (path.name, path.read_bytes())]
        return settings.digest_of(self.name, *self.version_flags, *sorted(settings.versions().values()), *contents)


def kubernetes_version_flags(version: str) -> tuple[str, ...]:
    """Linker settings without which components call themselves "v0.0.0" and refuse one another."""
    major, minor, _ = version.removeprefix("v").split(".")
    return (
        f"k8s.io/component-base/version.gitVersion={version}",
        f"k8s.io/component-base/version.gitMajor={major}",
        f"k8s.io/component-base/version.gitMinor={minor}",
        f"k8s.io/client-go/pkg/version.gitVersion={version}",
    )


def helm_version_flags(version: str, kubernetes: str) -> tuple[str, ...]:
    """Helm's own version, and the Kubernetes version that `helm template` and `helm lint` assume."""
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    packages = ("helm.sh/helm/v3/pkg/chartutil", "helm.sh/helm/v3/pkg/lint/rules")
    assumed = [
        f"{package}.{name}={value}"
        for package in packages
        for name, value in (("k8sVersionMajor", major), ("k8sVersionMinor", minor))
    ]
    return (f"helm.sh/helm/v3/internal/version.version={version}", *assumed)


CONTROL_PLANE = Part(
    name="controlplane",
    programs=("etcd", *KUBE_PROGRAMS),
    package=".",
    version_flags=kubernetes_version_flags(settings.KUBERNETES_VERSION),
    expectation="about 7 minutes on 2 cores the first time",
)
COREDNS = Part(name="coredns", programs=("coredns",), package=".", expectation="about 2 minutes the first time")
HELM = Part(
    name="helm",
    programs=("helm",),
    package="helm.sh/helm/v3/cmd/helm",
    version_flags=helm_version_flags(settings.HELM_VERSION, settings.KUBERNETES_VERSION),
    expectation="about 2 minutes the first time",
)
PARTS = (CONTROL_PLANE, COREDNS, HELM)


def find_go() -> str | None:
    """The go program, also where its own installer puts it."""
    return shutil.which("go", path=os.environ.get("PATH", "") + ":/usr/local/go/bin:/usr/lib/go/bin")


def build_command(go: str, part: Part, output: Path) -> list[str]:
    """The command line that builds a part."""
    flags = " ".join(["-s", "-w", *(f"-X {flag}" for flag in part.version_flags)])
    return [
        go,
        "build",
        "-mod=readonly",
        "-buildvcs=false",
        "-trimpath",
        "-ldflags",
        flags,
        "-o",
        str(output),
        part.package,
    ]


def build(part: Part, destination: Path) -> None:
    """Builds a part and lays out one file or link per program.

    Raises:
        ClusterError: when there is no Go, or with the end of its output when it failed.
    """
    go = find_go()
    if go is None:
        raise ClusterError("Go was not found on this machine (program: go), so nothing could be built from source")
    say(f"building {', '.join(part.programs)} with Go ({part.expectation})")
    output = destination / part.name
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    command = build_command(go, part, output)
    nice = shutil.which("nice")
    with step(f"go build of {part.name}"):
        done = subprocess.run(
            [nice, *command] if nice else command,
            cwd=part.folder, capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(f"go build of {part.name} failed:\n{done.stderr.strip()[-2000:]}")
    for program in part.programs:
        if program != part.name:
            (destination / program).symlink_to(part.name)
