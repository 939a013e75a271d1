"""The cluster's network, configuration, certificates and removal, without a cluster."""

import csv
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster import commands, configs, packages, s3, settings
from tests.cluster.cluster import Cluster, is_ready
from tests.cluster.controlplane import address_in, all_identities, dns_query
from tests.cluster.network import Network, overlapping_routes
from tests.cluster.nodes import container_processes
from tests.cluster.pki import ADMIN, Pki, node_identity
from tests.cluster.report import wait_until
from tests.cluster.settings import ClusterError, Places
from tests.cluster.teardown import container_ids, known_nodes, mounts_below, remove_cache


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(cache=tmp_path / "cache", run=tmp_path / "run")


def test_the_cache_follows_the_xdg_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Places.default().cache == tmp_path / "lora-operator"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Places.default().cache == Path.home() / ".cache" / "lora-operator"


def test_routes_that_clash_with_the_clusters_networks_are_named():
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "192.0.2.0/24", "dev": "eth0"},
        {"dst": "10.85.3.0/24", "dev": "docker0"},
        {"dst": "10.96.0.0/16", "dev": "cni0"},
        {"dst": "10.0.0.0/8", "dev": "eth1"},
        {"dst": "10.85.0.0/16", "dev": settings.HOST_LINK},
    ]
    assert overlapping_routes(routes) == ["10.85.3.0/24", "10.96.0.0/16"]


def test_the_network_namespace_gets_no_default_route(places):
    for command in Network(places).setup_commands():
        assert "default" not in command


def test_everything_but_the_host_link_is_made_inside_the_namespace(places):
    network = Network(places)
    outside = [command for command in network.setup_commands() if command[0] == "ip"]
    assert all(settings.HOST_LINK in command or command[:3] == ["ip", "route", "add"] for command in outside)


def test_missing_programs_become_packages_each_once():
    programs = {"containerd": "containerd", "ctr": "containerd", "runc": "runc"}
    assert packages.missing_packages(programs, lambda name: None, None) == [
        "containerd",
        "runc",
        "containernetworking-plugins",
    ]
    assert packages.missing_packages(programs, lambda name: f"/bin/{name}", Path("/cni")) == []


def test_without_root_it_says_what_was_found_and_what_is_needed(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root .* user id 1000"):
        packages.require_linux_root("a cluster on this machine")


def test_on_another_system_it_says_which_it_found(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(ClusterError, match="needs Linux; this is Darwin"):
        packages.require_linux_root("a cluster on this machine")


def test_more_nodes_than_there_are_tokens_for_are_refused(places):
    with pytest.raises(ClusterError, match="nodes: 9 is not between 1 and 8"):
        Cluster(places).up(nodes=9)


def test_the_kubelet_lets_nobody_in_without_asking_the_api_server(places):
    config = yaml.safe_load(configs.kubelet_config(places, "node-1", 10250))
    assert config["authentication"]["anonymous"] == {"enabled": False}
    assert config["authorization"] == {"mode": "Webhook"}


def test_every_node_has_its_own_sockets_and_store(places):
    one, two = (configs.containerd_config(places, node, Path("/cni")) for node in ("node-1", "node-2"))
    assert "node-2" not in one
    assert "node-1" not in two
    assert 'bin_dir = "/cni"' in one


def test_pods_get_addresses_beside_the_gateway(places):
    plugin = json.loads(configs.cni_config(places))["plugins"][0]
    assert plugin["ipMasq"] is False
    assert plugin["ipam"]["ranges"][0][0] == {"subnet": "10.85.0.0/16", "rangeStart": "10.85.1.1"}


def test_the_dns_server_never_asks_another(places):
    assert "forward" not in configs.corefile(Path("/kubeconfig"))


def test_admission_plugins_stay_those_of_upstream(places):
    command = commands.api_server_command(Path("kube-apiserver"), Path("/pki"), 1, "127.0.0.1", 2)
    assert not [flag for flag in command if "disable-admission" in flag]


def test_a_dns_question_is_what_the_standard_says():
    assert dns_query("a.bc")[12:] == b"\x01a\x02bc\x00\x00\x01\x00\x01"


def test_a_dns_answer_is_read_and_a_refusal_is_none():
    question = dns_query("a.bc")
    record = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x02\x00\x04" + bytes([10, 96, 0, 1])
    good = question[:2] + b"\x85\x80\x00\x01\x00\x01\x00\x00\x00\x00" + question[12:] + record
    missing = question[:2] + b"\x85\x83\x00\x01\x00\x00\x00\x00\x00\x00" + question[12:]
    assert address_in(good) == "10.96.0.1"
    assert address_in(missing) is None
    assert address_in(b"") is None


def test_every_identity_has_its_own_token_and_files_are_private(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.create(["127.0.0.1"], all_identities())
    rows = list(csv.reader(pki.tokens_file.read_text().splitlines()))
    assert len({row[0] for row in rows}) == len(rows) == len(all_identities())
    assert next(row for row in rows if row[1] == "system:node:node-8")[3] == "system:nodes"
    assert pki.token(ADMIN) != pki.token(node_identity("node-1"))
    assert {path.stat().st_mode & 0o777 for path in pki.folder.iterdir()} == {0o600}


def test_the_api_servers_certificate_is_valid_for_its_addresses(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.create(["127.0.0.1", "10.96.0.1"], [ADMIN])
    verified = subprocess.run(
        ["openssl", "verify", "-CAfile", pki.path("ca.crt"), "-verify_ip", "10.96.0.1", pki.path("apiserver.crt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verified.returncode == 0, verified.stderr


def test_the_kubeconfig_is_private_and_self_contained(tmp_path):
    pki = Pki(tmp_path / "pki")
    pki.create(["127.0.0.1"], [ADMIN])
    path = pki.write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", ADMIN)
    assert path.stat().st_mode & 0o777 == 0o600
    assert str(tmp_path) not in path.read_text()


def test_mounts_are_undone_from_the_deepest_up_and_strangers_are_left_alone():
    mountinfo = "\n".join(
        f"{number} 1 0:1 / {point} rw - tmpfs tmpfs rw"
        for number, point in enumerate(["/", "/run/lora", "/run/lora/a", "/run/lora-other", "/run/lora/with\\040space"])
    )
    assert mounts_below(mountinfo, [Path("/run/lora")]) == ["/run/lora/with space", "/run/lora/a", "/run/lora"]


def test_nodes_of_a_killed_cluster_are_known_by_their_folders(places):
    for name in ("node-2", "node-1", "processes"):
        (places.run / name).mkdir(parents=True)
    assert known_nodes(places) == ["node-1", "node-2"]


def test_containers_are_known_from_all_of_containerds_folders(places):
    pods, tasks = "io.containerd.grpc.v1.cri/sandboxes", "io.containerd.runtime.v2.task/k8s.io"
    (places.run / "node-1" / "state" / pods / "aaa").mkdir(parents=True)
    (places.run / "node-2" / "state" / tasks / "bbb").mkdir(parents=True)
    (places.cache / "nodes" / "node-1" / pods / "ccc").mkdir(parents=True)
    assert container_ids(places) == {"aaa", "bbb", "ccc"}


def test_a_process_that_is_not_in_the_containers_group_is_not_taken_for_it(tmp_path):
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        folder = tmp_path / "io.containerd.runtime.v2.task" / "k8s.io" / "0123456789abcdef"
        folder.mkdir(parents=True)
        (folder / "init.pid").write_text(str(stranger.pid))
        assert container_processes(tmp_path) == []
    finally:
        stranger.kill()
        stranger.wait()


def test_a_cluster_with_a_dead_process_is_not_up(places):
    cluster = Cluster(places)
    assert not cluster.is_up()
    cluster.processes.start("etcd", ["sleep", "100"], places.logs / "etcd.log")
    try:
        assert not cluster.is_up(), "no marker yet"
        places.ready_marker.write_text(json.dumps({"nodes": [], "cache": str(places.cache)}))
        assert cluster.is_up()
        cluster.processes.stop(["nothing"], 0)
        pid = cluster.processes.start("coredns", ["true"], places.logs / "coredns.log")
        wait_until("it to end", lambda: "coredns" not in cluster.processes.alive(), 10, 0.01)
        assert pid
        assert not cluster.is_up()
    finally:
        cluster.processes.sweep()


def test_a_running_cluster_is_found_whichever_cache_it_was_started_with(places, tmp_path):
    places.run.mkdir(parents=True)
    places.ready_marker.write_text(json.dumps({"nodes": ["node-1"], "cache": str(tmp_path / "other")}))
    assert Cluster(places).kubeconfig == tmp_path / "other" / "cluster" / "kubeconfig"


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_only_the_condition_ready_makes_a_node_ready(status):
    pressure = {"type": "DiskPressure", "status": "True"}
    assert not is_ready({"status": {"conditions": [pressure, {"type": "Ready", "status": status}]}})
    assert is_ready({"status": {"conditions": [pressure, {"type": "Ready", "status": "True"}]}})
    assert not is_ready(None)


def test_waiting_stops_at_once_when_there_is_a_reason_to_give_up():
    with pytest.raises(ClusterError, match="waiting for x: etcd has exited"):
        wait_until("x", lambda: False, 60, 0.01, lambda: "etcd has exited")
    with pytest.raises(ClusterError, match="not so after 0 s"):
        wait_until("x", lambda: False, 0.01, 0.01)


def test_the_s3_server_keeps_to_its_address_and_tells_nobody():
    command = s3.weed_command("weed", Path("/d"), "127.0.0.1", 8333, [1, 2, 3, 4, 5, 6, 7])
    assert "-ip.bind=127.0.0.1" in command
    assert "-master.telemetry=false" in command


def test_free_ports_differ():
    ports = s3.free_ports(20)
    assert len(set(ports)) == 20


def test_the_s3_keys_are_readable_by_their_owner_only(tmp_path):
    s3.prepare_folder(tmp_path, "key", "secret")
    path = tmp_path / "identities.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["identities"][0]["credentials"] == [{"accessKey": "key", "secretKey": "secret"}]


def test_cleaning_removes_what_outlives_clusters_and_nothing_else(places):
    for folder in (
        places.cache / "bin",
        places.cache / "nodes",
        places.images,
        places.build_run,
        places.cache / "other",
    ):
        folder.mkdir(parents=True)
    assert set(remove_cache(places)) == {places.cache / "bin", places.cache / "nodes", places.images, places.build_run}
    assert [path.name for path in places.cache.iterdir()] == ["other"]
