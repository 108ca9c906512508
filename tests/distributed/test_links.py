"""Links between real processes, from Python and from the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.distributed.launch import launch
from tests.distributed.test_run_command import stageline

import stageline as sl
from stageline.planning.cluster.measure_links import LARGE


@pytest.mark.parametrize("devices", [(), ("simulated",)], ids=["hosts", "devices"])
def test_a_slow_network_is_told_from_fast_machines_by_every_rank(devices: tuple[str, ...]) -> None:
    """Between machines a small message is 5 ms late and a large one 50 ms."""
    ends = launch("links", 4, "a,a,b,b", "5", *devices)
    assert [ended.code for ended in ends] == [0] * 4, ends
    assert len({ended.output for ended in ends}) == 1
    levels = {
        name: (int(size), float(latency), float(bandwidth))
        for name, size, latency, bandwidth in re.findall(
            r"level (\w+) (\d+) (\S+) (\S+)", ends[0].output
        )
    }
    machine, network = levels["machine"], levels["network"]
    assert (machine[0], network[0]) == (2, 2)
    assert network[1] > 0.005 > machine[1]
    assert network[2] < LARGE / 0.045 < machine[2]
    assert f"link of 1 and 2: Link(latency={network[1]!r}" in ends[0].output
    assert f"Device(memory={3 * 2**30}.0" in ends[0].output


def test_a_device_that_is_not_there_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(sl.PlanError, match=r"device is .cuda:1., but .*: omit it to measure"):
        sl.measure_links(device="cuda:1")


@pytest.mark.slow
def test_a_rank_that_ends_meanwhile_is_told_by_the_others() -> None:
    ends = launch("links", 3, "a,leaves,c", "0")
    assert [ended.code for ended in ends] == [1, 3, 1]
    for rank in (0, 2):
        assert (
            f"StageError: rank {rank} lost the connection to another rank while"
            in ends[rank].output
        )


@pytest.mark.slow
def test_machines_with_unequal_numbers_of_ranks_are_refused_on_every_rank() -> None:
    for ended in launch("links", 3, "a,a,b", "0"):
        assert ended.code == 1
        assert "PlanError: there are 2 on a, 1 on b ranks" in ended.output


def told_and_saved(ended: subprocess.CompletedProcess[str], path: Path) -> bool:
    assert ended.returncode == 0, ended.stderr
    cluster = sl.Cluster.load(path)
    assert cluster.num_devices == 2
    assert [level.name for level in cluster.levels] == ["machine"]
    assert str(cluster) in ended.stdout
    return f"wrote {path}" in ended.stderr


def test_the_command_starts_processes_and_writes_a_cluster_that_plans_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    ended = stageline("links", "--num-processes", "2", "--save", str(path))
    assert told_and_saved(ended, path)


@pytest.mark.slow
def test_the_command_takes_part_in_a_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "stageline", "links"]
    command += ["--memory", "2GiB", "--save", str(path)]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert told_and_saved(ended, path)
    assert sl.Cluster.load(path).memory == 2 * 2**30


@pytest.mark.parametrize("memory", ["lots", pytest.param("0", marks=pytest.mark.slow)])
def test_a_memory_that_is_none_is_told_once(memory: str, tmp_path: Path) -> None:
    path = str(tmp_path / "mine.json")
    ended = stageline("links", "--num-processes", "2", "--memory", memory, "--save", path)
    assert ended.returncode == 2
    assert ended.stderr.count("error: ") == 1
    assert "memory is" in ended.stderr
