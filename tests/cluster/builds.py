"""Building images from the repository's Dockerfiles with buildah, in a storage of our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import settings
from tests.cluster.oci import Image, image_from_config, sha256
from tests.cluster.report import step
from tests.cluster.settings import ClusterError, Places

BASE_VARIABLE = "LORA_CLUSTER_BASE_IMAGE"
DEBIAN_SUITE = "bookworm"
DEBIAN_PACKAGES = ("python3", "python3-venv", "ca-certificates")
DEBIAN_REMOVED = (
    "var/cache/apt/*",
    "var/lib/apt/lists/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "var/log/*",
)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Recipe:
    """One image that is built from the repository.

    Attributes:
        name: its name without registry and tag.
        dockerfile: relative to the repository.
        inputs: the files and folders, relative to the repository, that decide its content.
    """

    name: str
    dockerfile: str
    inputs: tuple[str, ...]


SHARED_INPUTS = (".dockerignore", "pyproject.toml", "requirements/bootstrap.txt")
OPERATOR = Recipe("lora-operator", "Dockerfile", ("requirements/operator.txt", "operator", *SHARED_INPUTS))
TRAINER = Recipe(
    "lora-trainer",
    "trainer_image/Dockerfile",
    ("requirements/trainer.txt", "operator/lora_api", "trainer_image", *SHARED_INPUTS),
)


def inputs_key(repository: Path, recipe: Recipe, base: str) -> str:
    """Changes exactly when the content that goes into an image changes; time stamps do not count."""
    parts: list[bytes | str] = [recipe.name, base]
    for relative in (recipe.dockerfile, *recipe.inputs):
        root = repository / relative
        files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        for path in files:
            if "__pycache__" in path.parts or path.suffix in {".pyc", ".md"}:
                continue
            if not path.exists():
                raise ClusterError(f"{path} is missing; the image {recipe.name} is built from it")
            parts += [str(path.relative_to(repository)), path.read_bytes()]
    return settings.digest_of(*parts)


@dataclass(frozen=True)
class Layer:
    """One layer as the build storage keeps it: a folder with the layer's own files, overlay's way."""

    diff_id: str
    folder: Path


@dataclass(frozen=True)
class Built:
    """An image in the build storage."""

    image: Image
    layers: tuple[Layer, ...]


class Builder:
    """buildah with a storage below the cache folder, so that a person's own images are never touched."""

    def __init__(self, places: Places, repository: Path = settings.REPOSITORY) -> None:
        self.places = places
        self.repository = repository
        self.storage = places.images / "storage"
        self.temporary = places.images / "tmp"

    def base_reference(self) -> str:
        """The image that Dockerfiles start from: our own, or the one `LORA_CLUSTER_BASE_IMAGE` names."""
        key = settings.digest_of(DEBIAN_SUITE, *DEBIAN_PACKAGES, *DEBIAN_REMOVED)
        return os.environ.get(BASE_VARIABLE) or f"localhost/lora-base:{key}"

    def ensure_base(self) -> None:
        """Makes our own base image by debootstrap, once; another one buildah has or pulls by itself."""
        reference = self.base_reference()
        if os.environ.get(BASE_VARIABLE) or self._id_of(reference):
            return
        with step(f"base image of Debian {DEBIAN_SUITE} with Python (once, about a minute)"):
            self._make_base(reference)

    def _make_base(self, reference: str) -> None:
        container = self._buildah("from", "scratch").strip()
        root = Path(self._buildah("mount", container).strip())
        program = shutil.which("debootstrap")
        if program is None:
            raise ClusterError("debootstrap not found (Debian package: debootstrap)")
        include = f"--include={','.join(DEBIAN_PACKAGES)}"
        done = subprocess.run(
            [program, "--variant=minbase", include, DEBIAN_SUITE, str(root)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(f"debootstrap failed:\n{done.stdout[-1500:]}{done.stderr[-500:]}")
        for pattern in DEBIAN_REMOVED:
            for path in root.glob(pattern):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._buildah("umount", container)
        self._buildah("commit", "--quiet", "--rm", container, reference)

    def build(self, recipe: Recipe, base: str) -> str:
        """Builds an image, re-using every layer whose inputs did not change, and returns its id."""
        self._share_package_cache()
        options = ["--isolation", "chroot", "--network", "host", "--layers", "--format", "oci", "--quiet"]
        if CERTIFICATES.exists():
            # a machine behind an inspecting proxy trusts certificates that a base image does not know
            options += ["--secret", f"id=ca-certificates,src={CERTIFICATES}"]
        output = self._buildah(
            *("bud", *options, "--build-arg", f"BASE_IMAGE={base}", "--tag", f"localhost/{recipe.name}:latest"),
            *("--file", str(self.repository / recipe.dockerfile), str(self.repository)),
        )
        return output.split()[-1]

    def _share_package_cache(self) -> None:
        """Lets `RUN --mount=type=cache` see the packages that uv has on this machine already.

        buildah keeps such a cache in its temporary folder, under the path it is mounted at.
        """
        inside = self.temporary / "buildah-cache" / "root" / ".cache" / "uv"
        outside = Path(os.environ.get("UV_CACHE_DIR") or self.places.cache.parent / "uv")
        if outside.is_dir() and not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.unlink(missing_ok=True)
            inside.symlink_to(outside)

    def find(self, reference: str) -> Built | None:
        """A built image with its layers' folders; None when the storage does not have it any more.

        Args:
            reference: its name here, whose tag is the beginning of its id.
        """
        image_id = self._id_of(reference.rpartition(":")[2])
        if not image_id:
            return None
        described = json.loads(self._buildah("inspect", "--type", "image", image_id))
        config = described["Config"].encode()
        if sha256(config) != f"sha256:{image_id}":
            raise ClusterError(f"buildah gave another configuration than that of image {image_id}")
        sizes = [int(layer["size"]) for layer in json.loads(described["Manifest"])["layers"]]
        image = image_from_config(config, sizes)
        folders = self._layer_folders(image_id)
        return Built(image, tuple(Layer(*pair) for pair in zip(image.diff_ids, folders, strict=True)))

    def _layer_folders(self, image_id: str) -> list[Path]:
        images = json.loads((self.storage / "overlay-images" / "images.json").read_text())
        layers = json.loads((self.storage / "overlay-layers" / "layers.json").read_text())
        identifiers = layer_chain(image_id, images, layers)
        return [self.storage / "overlay" / identifier / "diff" for identifier in identifiers]

    def tidy(self) -> None:
        """Removes what failed or earlier builds left: working containers and images without a name."""
        self._buildah("rm", "--all", check=False)
        self._buildah("rmi", "--prune", check=False)

    def _id_of(self, reference: str) -> str:
        """The full id of an image by its name or the beginning of its id; empty when there is none."""
        listed = self._buildah("images", "--quiet", "--no-trunc", reference, check=False).split()
        return listed[0].removeprefix("sha256:") if listed else ""

    def _buildah(self, *arguments: str, check: bool = True) -> str:
        program = shutil.which("buildah")
        if program is None:
            raise ClusterError("buildah not found (Debian package: buildah)")
        self.temporary.mkdir(parents=True, exist_ok=True)
        command = [
            *(program, "--root", str(self.storage), "--runroot", str(self.places.build_run)),
            *("--storage-driver", "overlay", "--storage-opt", "overlay.skip_mount_home=true"),
        ]
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True, text=True, check=False,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise ClusterError(f"buildah {arguments[0]} failed:\n{shortened(done.stdout + done.stderr)}")
        return done.stdout


def shortened(output: str, lines: int = 25) -> str:
    """The end of a build's output; buildah repeats a whole RUN instruction in its last line, which hides the cause."""
    kept = [line for line in output.splitlines() if not line.startswith(("Error: building at STEP", "STEP "))]
    return "\n".join(line[:300] for line in kept[-lines:])


def layer_chain(image_id: str, images: list[dict[str, Any]], layers: list[dict[str, Any]]) -> list[str]:
    """The ids of an image's layers in the build storage, lowest first.

    Args:
        image_id: the image.
        images: content of the storage's images.json.
        layers: content of the storage's layers.json.
    """
    by_id = {layer["id"]: layer for layer in layers}
    current: str | None = next(image["layer"] for image in images if image["id"] == image_id)
    chain: list[str] = []
    while current:
        chain.append(current)
        current = by_id[current].get("parent")
    return chain[::-1]
