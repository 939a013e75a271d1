"""The operator's and the trainer's image: built when their inputs changed, given to nodes that lack them.

Nothing is packed or copied on the way. A layer's folder in the build storage and a snapshot in containerd have the
same form, so a node's snapshot is filled with hard links: a few seconds for 5 GB, and no disk space. Only the image's
description, a few kilobytes, is imported as an archive.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import oci
from tests.cluster.builds import OPERATOR, TRAINER, Builder, Built, Recipe, inputs_key
from tests.cluster.containerd import Containerd
from tests.cluster.report import step
from tests.cluster.settings import ClusterError, Places


@dataclass(frozen=True)
class Images:
    """References to use in pods, with `imagePullPolicy: IfNotPresent` or `Never`.

    The tag is made of the content, so a changed image is another reference and nothing stale can run.
    """

    operator: str
    trainer: str


def build_images(places: Places) -> Images:
    """Builds what changed; near to nothing to do when nothing did."""
    builder = Builder(places)
    return Images(*(_current(builder, recipe) for recipe in (OPERATOR, TRAINER)))


def load_images(places: Places, images: Images, nodes: Sequence[str]) -> None:
    """Gives images to the nodes that lack them."""
    builder = Builder(places)
    for node in nodes:
        containerd = Containerd(places.containerd_socket(node))
        present = containerd.image_references()
        for recipe, reference in ((OPERATOR, images.operator), (TRAINER, images.trainer)):
            if reference not in present:
                with step(f"{reference} given to {node}"):
                    _give(builder, recipe, reference, containerd)


class Memory:
    """Which image was built from which inputs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _all(self) -> dict[str, dict[str, str]]:
        try:
            content: dict[str, dict[str, str]] = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content

    def image_id(self, recipe: Recipe) -> str:
        return self._all().get(recipe.name, {}).get("id", "")

    def recall(self, recipe: Recipe, inputs: str) -> str | None:
        """The id of the image that was built from these inputs, if it was the last one built."""
        entry = self._all().get(recipe.name, {})
        return entry.get("id") if entry.get("inputs") == inputs else None

    def store(self, recipe: Recipe, inputs: str, image_id: str) -> None:
        content = {**self._all(), recipe.name: {"inputs": inputs, "id": image_id}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1))


def reference_of(recipe: Recipe, image_id: str) -> str:
    """The name of an image; its tag is the beginning of its id."""
    return f"localhost/{recipe.name}:{image_id[:16]}"


def _current(builder: Builder, recipe: Recipe) -> str:
    """The reference of the image that belongs to the repository's present content."""
    memory = Memory(builder.places.images / "built.json")
    base = builder.base_reference()
    inputs = inputs_key(builder.repository, recipe, base)
    image_id = memory.recall(recipe, inputs)
    if image_id is None:
        builder.ensure_base()
        with step(f"image {recipe.name} built"):
            try:
                image_id = builder.build(recipe, base)
            finally:
                builder.tidy()
        memory.store(recipe, inputs, image_id)
    return reference_of(recipe, image_id)


def _give(builder: Builder, recipe: Recipe, reference: str, containerd: Containerd) -> None:
    built = builder.find(reference)
    if built is None:
        raise ClusterError(f"{reference} is gone from the build storage; run `clean` and build again")
    committed = _link_layers(built, containerd)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "image.tar"
        oci.write_archive(archive, reference, built.image)
        containerd.run("images", "import", archive)
    for chain in committed:
        containerd.release_snapshot(chain)
    _remove_superseded(containerd, f"localhost/{recipe.name}:", reference)


def _link_layers(built: Built, containerd: Containerd) -> list[str]:
    """Makes the snapshots that a node lacks and returns their names."""
    committed: list[str] = []
    parent: str | None = None
    for layer, chain in zip(built.layers, oci.chain_ids(built.image.diff_ids), strict=True):
        if not containerd.has_snapshot(chain):
            folder = containerd.prepare_snapshot(f"linking-{chain}", parent)
            link_tree(layer.folder, folder)
            containerd.commit_snapshot(chain, f"linking-{chain}")
            committed.append(chain)
        parent = chain
    return committed


def link_tree(source: Path, target: Path) -> None:
    """Fills a folder with hard links to another's files, with all modes, owners and overlay's own marks.

    Sharing inodes is safe: neither side ever writes to a finished layer, an overlay copies a file before a change.
    """
    done = subprocess.run(
        ["cp", "--archive", "--link", f"{source}/.", f"{target}/"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ClusterError(f"linking {source} failed: {done.stderr.strip()[-500:]}")


def _remove_superseded(containerd: Containerd, prefix: str, current: str) -> None:
    """Removes earlier images of the same name that no container uses.

    containerd's Kubernetes part keeps a second name per image, its full id, of which our tag is the beginning.
    """
    present = containerd.image_references()
    old = {name for name in present if name.startswith(prefix)} - {current} - containerd.used_images()
    for name in sorted(old):
        ids = [other for other in present if other.startswith(f"sha256:{name.removeprefix(prefix)}")]
        containerd.run("images", "remove", name, *ids, check=False)
