"""Programs of the machine that the cluster needs, installed from Debian's packages when missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.cluster.report import say, step
from tests.cluster.settings import ClusterError

PACKAGE_OF_PROGRAM = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "mount": "mount",
    "openssl": "openssl",
    "busybox": "busybox",
}
BUILD_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap", "crun": "crun"}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PACKAGE = "containernetworking-plugins"


def require_linux_root(purpose: str) -> None:
    """Stops with a plain sentence where the cluster can't work.

    Raises:
        ClusterError: on another system than Linux, or without root.
    """
    if platform.system() != "Linux":
        raise ClusterError(f"{purpose} needs Linux; this is {platform.system()}. Use a Linux machine or a virtual one.")
    if os.geteuid() != 0:
        raise ClusterError(
            f"{purpose} needs root (network namespace, mounts, containerd); this is user id {os.geteuid()}. "
            "Run it with sudo."
        )


def cni_plugins() -> Path | None:
    """The folder with the `bridge` and `host-local` plugins, or None."""
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists() and (folder / "host-local").exists():
            return folder
    return None


def missing_packages(
    programs: dict[str, str], which: Callable[[str], str | None] = shutil.which, cni: Path | None = None
) -> list[str]:
    """The packages whose programs are not there, each once, in a stable order."""
    wanted = [package for program, package in programs.items() if which(program) is None]
    if cni is None:
        wanted.append(CNI_PACKAGE)
    return list(dict.fromkeys(wanted))


def ensure_installed(for_building: bool = False) -> None:
    """Installs what is missing with apt-get.

    Args:
        for_building: also what image builds need.

    Raises:
        ClusterError: where there is no apt-get, naming what has to be installed by hand.
    """
    programs = {**PACKAGE_OF_PROGRAM, **(BUILD_PROGRAMS if for_building else {})}
    missing = missing_packages(programs, _which, cni_plugins())
    if not missing:
        return
    apt = shutil.which("apt-get")
    if apt is None:
        raise ClusterError(
            f"not found on this machine: {', '.join(missing)} (Debian package names). There is no apt-get here to "
            "install them with: install them with this system's own package manager."
        )
    with step(f"apt-get install {' '.join(missing)}"):
        _install(apt, missing)


def _which(program: str) -> str | None:
    """Also looks where root's programs are: a plain user's PATH often lacks sbin."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")


def _install(apt: str, packages: Iterable[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [apt, "install", "-y", "-qq", "--no-install-recommends", *packages]
    done = subprocess.run(install, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        say("the package lists may be old: apt-get update, then once more")
        subprocess.run([apt, "update", "-qq"], capture_output=True, env=environment, check=False)
        done = subprocess.run(install, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise ClusterError(f"apt-get install failed:\n{(done.stderr or done.stdout).strip()[-1500:]}")
