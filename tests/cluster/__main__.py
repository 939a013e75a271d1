"""The command line: `python -m tests.cluster up|down|images|install|status|binaries|clean`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tests.cluster import install as product
from tests.cluster import teardown
from tests.cluster.binaries import ensure_binaries
from tests.cluster.cluster import Cluster
from tests.cluster.report import console, say, step
from tests.cluster.settings import ClusterError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A real Kubernetes cluster on this machine, without Docker."
)


@app.command()
def binaries() -> None:
    """Find or make the cluster's programs, and say where they came from."""
    for origin in ensure_binaries().origins:
        say(f"{', '.join(origin.part.programs)}: {origin.source}")
        typer.echo(origin.folder)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=8, help="How many nodes, at least.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="nvidia.com/gpu that every node pretends to have.")] = 0,
) -> None:
    """Bring the cluster up; say so when it already is."""
    cluster = Cluster()
    started = cluster.up(nodes=nodes, gpus=gpus)
    say("the cluster is up" if started else "the cluster was up already")
    say(f"S3 server for pods and this machine: {cluster.s3_endpoint}")
    say(f"  keys: {cluster.places.data / 's3' / 'identities.json'}")
    say(f"kubectl and helm: {cluster.binaries.program('kubectl')} {cluster.binaries.program('helm')}")
    typer.echo(f"export KUBECONFIG={cluster.kubeconfig}")


@app.command()
def down() -> None:
    """Remove the cluster, whatever there is of it; programs and images stay in the cache."""
    found = Cluster().down()
    say(f"removed {len(found)} things" if found else "there was nothing to remove")


@app.command()
def images() -> None:
    """Build the operator's and the trainer's image as far as they changed, and give them to all nodes."""
    built = Cluster().load_images()
    typer.echo(built.operator)
    typer.echo(built.trainer)


@app.command()
def install(
    namespace: Annotated[str, typer.Option(help="Namespace for jobs, made with the store's Secret in it.")] = "team-a",
    data: Annotated[Path | None, typer.Option(help="Folder with `model` and `photos`, put into S3.")] = None,
) -> None:
    """Install the product on the cluster through its chart, ready for a first job."""
    cluster = Cluster()
    with step("the chart, its profile and its Secrets"):
        product.install_chart(cluster, cluster.load_images())
        product.ensure_namespace(cluster, namespace)
    if data is not None:
        with step("a tiny model and photographs in S3"):
            client = product.connection(cluster)
            product.upload(client, "models", "tiny-zimage", data / "model")
            product.upload(client, "datasets", "photos", data / "photos")
    say(f"a first job: kubectl apply -n {namespace} -f examples/cluster-quickstart.yaml")


@app.command()
def status() -> None:
    """Show whether the cluster is up, what runs, and what is in the cache."""
    cluster = Cluster()
    table = Table("process", "id", "state")
    alive = cluster.processes.alive()
    for entry in cluster.processes.recorded():
        table.add_row(entry.name, str(entry.pid), "running" if entry.name in alive else "[red]has ended[/red]")
    found = teardown.leftovers(cluster.places, cluster.processes)
    if cluster.is_up():
        say(f"up: nodes {', '.join(cluster.node_names())}; KUBECONFIG={cluster.kubeconfig}; S3 {cluster.s3_endpoint}")
    else:
        say(f"not up, but {len(found)} things are left of a cluster: `down` removes them" if found else "down")
    if table.row_count:
        console.print(table)


@app.command()
def clean() -> None:
    """Remove the cluster and everything in the cache: programs, image stores, build storage."""
    for folder in Cluster().clean():
        say(f"removed {folder}")


def main() -> None:
    """Runs the command line; what a person can act on is one message and exit code 1, never a traceback."""
    try:
        app()
    except ClusterError as error:
        console.print(f"[red]error:[/red] {error}", markup=True, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
