"""Where the cluster's programs come from, and in which order."""

import functools
import hashlib
import http.server
import io
import shutil
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import binaries, download, gobuild, settings
from tests.cluster.binaries import ensure_binaries
from tests.cluster.download import expected_checksum, rebased, releases
from tests.cluster.gobuild import CONTROL_PLANE, COREDNS, HELM, PARTS
from tests.cluster.settings import ClusterError, digest_of


@pytest.fixture(autouse=True)
def no_sources(monkeypatch):
    monkeypatch.delenv(binaries.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(download.BASE_VARIABLE, "off")
    monkeypatch.setattr(gobuild, "find_go", lambda: None)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A mirror of CoreDNS's release on loopback; yields the folder its files lie in."""
    root = tmp_path / "mirror"
    release = releases("coredns", download.architecture())[0]
    path = root / release.url.removeprefix("https://")
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("coredns")
        entry.size = 7
        archive.addfile(entry, io.BytesIO(b"program"))
    path.with_name(path.name + ".sha256").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    handler = functools.partial(Quiet, directory=str(root))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(download.BASE_VARIABLE, f"http://127.0.0.1:{server.server_port}")
    yield path
    server.shutdown()
    server.server_close()


def make_programs(folder: Path, part) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in part.programs:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


def test_an_explicit_folder_comes_before_everything(tmp_path, monkeypatch):
    make_programs(tmp_path / "own", COREDNS)
    monkeypatch.setenv(binaries.FOLDER_VARIABLE, str(tmp_path / "own"))
    found = ensure_binaries([COREDNS], tmp_path / "cache")
    assert found.program("coredns") == tmp_path / "own" / "coredns"
    assert not (tmp_path / "cache").exists()


def test_an_explicit_folder_that_lacks_a_program_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv(binaries.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ClusterError, match="no executable helm"):
        ensure_binaries([HELM], tmp_path / "cache")


def test_an_official_release_is_checked_unpacked_and_cached(tmp_path, mirror, monkeypatch):
    cache = tmp_path / "cache"
    first = ensure_binaries([COREDNS], cache)
    assert first.origins[0].source == "official release"
    assert first.program("coredns").read_bytes() == b"program"
    assert first.program("coredns").stat().st_mode & 0o111
    monkeypatch.setenv(download.BASE_VARIABLE, "off")
    again = ensure_binaries([COREDNS], cache)
    assert again.origins[0].source == "cache (official release)"


def test_a_release_that_is_not_what_its_checksum_says_is_not_used(tmp_path, mirror):
    mirror.write_bytes(mirror.read_bytes() + b"tampered")
    with pytest.raises(ClusterError, match=r"SHA-256 is .* published is"):
        ensure_binaries([COREDNS], tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "bin").iterdir()] == ["coredns.lock"]


def test_an_unreachable_mirror_falls_through_to_the_go_build(tmp_path, monkeypatch):
    monkeypatch.setenv(download.BASE_VARIABLE, "http://127.0.0.1:9")

    def build(part, destination):
        (destination / "coredns").write_text("built")

    monkeypatch.setattr(gobuild, "build", build)
    found = ensure_binaries([COREDNS], tmp_path / "cache")
    assert found.origins[0].source == "Go build"


def test_without_any_source_every_one_is_named_with_its_reason(tmp_path):
    with pytest.raises(ClusterError) as error:
        ensure_binaries([COREDNS], tmp_path / "cache")
    for reason in ("LORA_CLUSTER_BIN is not set", "not in the cache", "switched off", "Go was not found"):
        assert reason in str(error.value)


def test_an_interrupted_build_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    def build(part, destination):
        (destination / "coredns").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gobuild, "build", build)
    with pytest.raises(KeyboardInterrupt):
        ensure_binaries([COREDNS], tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "bin").iterdir()] == ["coredns.lock"]


def test_the_cache_key_changes_with_the_sources_and_the_versions(tmp_path, monkeypatch):
    for name in ("main.go", "go.mod", "go.sum"):
        shutil.copy(COREDNS.folder / name, tmp_path)
    moved = tmp_path / COREDNS.name
    moved.mkdir()
    for name in ("main.go", "go.mod", "go.sum"):
        shutil.move(tmp_path / name, moved / name)
    monkeypatch.setattr(settings, "HERE", tmp_path)
    key = COREDNS.key()
    (moved / "main.go").write_text((moved / "main.go").read_text() + "\n// changed\n")
    changed = COREDNS.key()
    assert key != changed
    monkeypatch.setattr(settings, "HELM_VERSION", "v0.0.1")
    assert COREDNS.key() != changed
    assert replace(COREDNS, version_flags=("x=y",)).key() != COREDNS.key()


def test_every_part_has_its_dependencies_pinned():
    for part in PARTS:
        names = {path.name for path in part.sources()}
        assert {"go.mod", "go.sum"} <= names


def test_the_pinned_modules_are_the_versions_that_are_announced():
    assert f"k8s.io/kubernetes {settings.KUBERNETES_VERSION}\n" in (CONTROL_PLANE.folder / "go.mod").read_text()
    assert f"go.etcd.io/etcd/server/v3 {settings.ETCD_VERSION}\n" in (CONTROL_PLANE.folder / "go.mod").read_text()
    assert f"github.com/coredns/coredns {settings.COREDNS_VERSION}\n" in (COREDNS.folder / "go.mod").read_text()
    assert f"helm.sh/helm/v3 {settings.HELM_VERSION}" in (HELM.folder / "go.mod").read_text()


def test_the_linker_is_told_the_kubernetes_version():
    command = gobuild.build_command("go", CONTROL_PLANE, Path("/out"))
    flags = command[command.index("-ldflags") + 1]
    assert f"-X k8s.io/component-base/version.gitVersion={settings.KUBERNETES_VERSION}" in flags
    assert "-X k8s.io/component-base/version.gitMinor=36" in flags


@pytest.mark.parametrize(
    "text",
    [
        "a" * 64,
        f"{'A' * 64}\n",
        f"{'b' * 64}  other.tgz\n{'a' * 64}  file.tgz\n",
        f"# SHA256SUMS\n{'a' * 64} *dist/file.tgz\n",
    ],
)
def test_a_checksum_is_found_in_every_usual_form(text):
    assert expected_checksum(text, "file.tgz") == "a" * 64


@pytest.mark.parametrize("text", ["", "<html>not found</html>", f"{'b' * 64}  other.tgz"])
def test_a_text_without_the_files_checksum_is_an_error(text):
    with pytest.raises(ClusterError, match="no SHA-256"):
        expected_checksum(text, "file.tgz")


def test_a_mirror_keeps_the_original_host_as_its_first_folder():
    assert rebased("https://a.example/x/y", None) == "https://a.example/x/y"
    assert rebased("https://a.example/x/y", "http://127.0.0.1:1/") == "http://127.0.0.1:1/a.example/x/y"


def test_every_program_of_every_part_has_an_official_release():
    for part in PARTS:
        assert {release.program for release in releases(part.name, "amd64")} == set(part.programs)


def test_a_digest_tells_its_parts_apart():
    assert digest_of("ab", "c") != digest_of("a", "bc")
