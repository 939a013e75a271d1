"""Images: when they are built again, how they are named, how they get into a node."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.cluster import oci
from tests.cluster.builds import OPERATOR, TRAINER, inputs_key, layer_chain
from tests.cluster.containerd import writable_folder
from tests.cluster.images import Memory, link_tree, reference_of
from tests.cluster.nodes import linked_libraries
from tests.cluster.settings import ClusterError


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A stand-in with every input of both images."""
    files = [
        "Dockerfile",
        ".dockerignore",
        "pyproject.toml",
        "requirements/bootstrap.txt",
        "requirements/operator.txt",
        "requirements/trainer.txt",
        "operator/lora_api/__init__.py",
        "operator/lora_operator/__init__.py",
        "trainer_image/Dockerfile",
        "trainer_image/lora_trainer/__init__.py",
    ]
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def keys(repository: Path, base: str = "base") -> tuple[str, str]:
    return inputs_key(repository, OPERATOR, base), inputs_key(repository, TRAINER, base)


@pytest.mark.parametrize(
    ("changed", "operator_changes", "trainer_changes"),
    [
        ("operator/lora_operator/__init__.py", True, False),
        ("operator/lora_api/__init__.py", True, True),
        ("trainer_image/lora_trainer/__init__.py", False, True),
        ("trainer_image/Dockerfile", False, True),
        ("requirements/operator.txt", True, False),
        ("requirements/trainer.txt", False, True),
        ("requirements/bootstrap.txt", True, True),
        ("pyproject.toml", True, True),
        (".dockerignore", True, True),
    ],
)
def test_an_image_is_built_again_only_when_its_own_inputs_change(
    repository, changed, operator_changes, trainer_changes
):
    before = keys(repository)
    (repository / changed).write_text("other")
    after = keys(repository)
    assert (before[0] != after[0], before[1] != after[1]) == (operator_changes, trainer_changes)


def test_a_new_file_and_a_new_name_are_changes(repository):
    before = keys(repository)[0]
    (repository / "operator/lora_operator/new.py").write_text("x")
    added = keys(repository)[0]
    (repository / "operator/lora_operator/new.py").rename(repository / "operator/lora_operator/newer.py")
    assert len({before, added, keys(repository)[0]}) == 3


def test_time_stamps_bytecode_and_prose_are_no_changes(repository):
    before = keys(repository)
    os.utime(repository / "operator/lora_api/__init__.py", (1, 1))
    cache = repository / "operator/lora_api/__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").write_bytes(b"x")
    (repository / "operator/notes.md").write_text("x")
    assert keys(repository) == before


def test_another_base_is_a_change(repository):
    assert keys(repository, "base")[0] != keys(repository, "other")[0]


def test_a_missing_input_is_named(repository):
    (repository / "requirements/trainer.txt").unlink()
    with pytest.raises(ClusterError, match=r"requirements/trainer.txt is missing"):
        keys(repository)


def test_memory_recalls_only_the_same_inputs(tmp_path):
    memory = Memory(tmp_path / "images" / "built.json")
    assert memory.recall(OPERATOR, "a") is None
    memory.store(OPERATOR, "a", "id-of-a")
    memory.store(TRAINER, "t", "id-of-t")
    assert memory.recall(OPERATOR, "a") == "id-of-a"
    assert memory.recall(OPERATOR, "b") is None
    assert memory.recall(TRAINER, "t") == "id-of-t"


def test_a_damaged_memory_forgets_instead_of_failing(tmp_path):
    path = tmp_path / "built.json"
    path.write_text("{")
    assert Memory(path).recall(OPERATOR, "a") is None


def test_a_changed_image_is_another_reference():
    assert reference_of(OPERATOR, "a" * 64) == "localhost/lora-operator:" + "a" * 16
    assert reference_of(OPERATOR, "a" * 64) != reference_of(OPERATOR, "b" * 64)


def test_chain_ids_are_those_of_the_specification():
    """ChainID(L0) = DiffID(L0); ChainID(L0|...|Ln) = digest of "ChainID(L0|...|Ln-1) DiffID(Ln)"."""
    first, second = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    chains = oci.chain_ids([first, second])
    assert chains == [first, oci.sha256(f"{first} {second}".encode())]
    assert oci.chain_ids([]) == []


def test_an_archive_may_leave_layers_out(tmp_path):
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:" + "1" * 64]}}).encode()
    image = oci.image_from_config(config, [123])
    path = tmp_path / "image.tar"
    oci.write_archive(path, "localhost/x:1", image)
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
        index = json.load(archive.extractfile("index.json"))
    assert len([name for name in names if name.startswith("blobs/")]) == 2
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/x:1"
    assert "blobs/" + index["manifests"][0]["digest"].replace(":", "/") in names


def test_the_tool_box_sleeps_by_default_as_a_numeric_user_that_is_not_root():
    image, layer = oci.busybox_image({"/bin/busybox": b"x", "/lib/libc.so.6": b"y"}, ["sh", "busybox"], "amd64")
    config = json.loads(image.config)
    assert config["config"]["Cmd"][0] == "sleep"
    assert config["config"]["User"] == "65532:65532"
    assert config["rootfs"]["diff_ids"] == [oci.sha256(layer)]


def test_the_tool_box_is_the_same_bytes_every_time():
    arguments = ({"/bin/busybox": b"x"}, ["sh", "ls"], "amd64")
    assert oci.busybox_image(*arguments) == oci.busybox_image(*arguments)


def test_a_layers_folders_are_found_from_the_lowest_up():
    images = [{"id": "other", "layer": "x"}, {"id": "mine", "layer": "top"}]
    layers = [{"id": "top", "parent": "middle"}, {"id": "low"}, {"id": "middle", "parent": "low"}, {"id": "x"}]
    assert layer_chain("mine", images, layers) == ["low", "middle", "top"]


def test_a_snapshots_own_folder_is_found_for_both_kinds_of_mount():
    overlay = "mount -t overlay overlay /nowhere -o index=off,workdir=/s/7/work,upperdir=/s/7/fs,lowerdir=/s/1/fs\n"
    assert writable_folder(overlay) == Path("/s/7/fs")
    assert writable_folder("mount -t bind /s/1/fs /nowhere -o rw,rbind\n") == Path("/s/1/fs")
    with pytest.raises(ClusterError, match="neither overlays nor bind mounts"):
        writable_folder("mount -t btrfs /dev/sda /nowhere -o subvol=1\n")


def test_linking_a_layer_shares_files_and_keeps_modes_and_links(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "folder").mkdir(parents=True)
    (source / "folder" / "file").write_text("content")
    (source / "folder" / "link").symlink_to("file")
    (source / "folder").chmod(0o750)
    source.chmod(0o555)
    target.mkdir()
    link_tree(source, target)
    assert (target / "folder" / "file").stat().st_ino == (source / "folder" / "file").stat().st_ino
    assert (target / "folder").stat().st_mode & 0o777 == 0o750
    assert (target / "folder" / "link").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o555
    source.chmod(0o755)
    target.chmod(0o755)


def test_the_libraries_of_a_program_are_read_from_ldd():
    listing = (
        "\tlinux-vdso.so.1 (0x00007f4524ed1000)\n"
        "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f4524c0f000)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f4524ed3000)\n"
    )
    assert linked_libraries(listing) == ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]
    assert linked_libraries("\tnot a dynamic executable\n") == []
