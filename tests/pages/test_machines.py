"""The files for launchers are those that the page shows, can be read, and train."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "cluster").iterdir())
TWO_NODES, SLURM = (ROOT / "examples" / "cluster" / n for n in ("two_nodes.sh", "slurm.sbatch"))
PAGE = (ROOT / "docs" / "machines.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_page_shows_the_whole_file(path: Path) -> None:
    assert f"\n{path.read_text()}```" in PAGE


@pytest.mark.parametrize("path", [TWO_NODES, SLURM], ids=lambda path: path.name)
def test_bash_can_read_it(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=10)


def test_pods_run_the_command_for_machines_under_names_that_the_service_gives() -> None:
    documents = [
        *yaml.safe_load_all((ROOT / "examples" / "cluster" / "kubernetes.yaml").read_text())
    ]
    service, policy, job = documents
    name = service["metadata"]["name"]
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    script, number, address = container["args"][0].removeprefix("exec bash ").split()
    assert (ROOT / script, number) == (TWO_NODES, '"$JOB_COMPLETION_INDEX"')
    assert address == f"{job['metadata']['name']}-0.{name}"
    assert (pods["subdomain"], service["spec"]["clusterIP"]) == (name, "None")
    labels = {"job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    values = {each["name"]: each["value"] for each in container["env"]}
    assert int(values["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {*values} <= {*re.findall(r"[A-Z_]{4,}", TWO_NODES.read_text())}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return settings for two machines that are this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    source = f"{ROOT / 'src'}:{ROOT}"
    own = {"PATH": path, "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo", "PORT": str(port)}
    return os.environ | own | {"FOLDER": str(folder / "run"), "STEPS": "3"} | more


def start(command: list[Any], settings: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=settings, stdout=pipe, stderr=pipe, text=True)


def has_trained(folder: Path) -> bool:
    return (folder / "run" / "step-00000003").is_dir() and (
        folder / "run/model.safetensors"
    ).is_file()


@pytest.mark.slow
def test_two_machines_by_hand_train(tmp_path: Path) -> None:
    settings = environment(tmp_path)
    machines = [start(["bash", TWO_NODES, str(n), "127.0.0.1"], settings) for n in (1, 0)]
    errors = [machine.communicate(timeout=100)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], errors
    assert has_trained(tmp_path)


# `srun` starts its command once for each machine, here always twice.
SRUN = """#!/usr/bin/env bash
shift
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@"
second=$?
wait $first && exit $second
"""
# The second name comes when a reader of the first one, such as `head -n 1`, is gone.
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "requeued $2"; else echo 127.0.0.1; sleep 0.05; echo elsewhere; fi
"""


def slurm(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    settings = environment(folder, PROCESSES="1", SLURM_NNODES="2", SLURM_JOB_NODELIST="a[1-2]")
    settings |= {"SLURM_JOB_ID": settings["PORT"]} | more
    job = start(["bash", SLURM], settings)
    out, error = job.communicate(timeout=100)
    return subprocess.CompletedProcess("slurm", job.returncode, out, error)


@pytest.mark.slow
def test_slurm_job_trains(tmp_path: Path) -> None:
    done = slurm(tmp_path)
    assert done.returncode == 0, done.stderr
    assert has_trained(tmp_path)


@pytest.mark.parametrize(("restarts", "shown"), [("3", "requeued 7"), ("20", "")])
def test_slurm_job_that_fails_is_queued_again_a_few_times(
    tmp_path: Path, restarts: str, shown: str
) -> None:
    (tmp_path / "torchrun").write_text("#!/usr/bin/env bash\nexit 1\n")
    (tmp_path / "torchrun").chmod(0o755)
    done = slurm(tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=restarts)
    assert shown in done.stdout
    assert (done.returncode == 0) == bool(shown)
