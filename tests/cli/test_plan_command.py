"""`stageline profile` and `stageline plan`: plans from a profile and a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stageline as sl
from stageline.cli.app import app
from stageline.planning.cluster.cluster import Level

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, nn.functional.mse_loss, torch.randn(8, 4), torch.randn(8, 4)
"""


@pytest.fixture(autouse=True)
def folder(user_module: Callable[[str, str], Path]) -> Path:
    return user_module("planned_model", MODEL)


def test_plan_reads_a_profile_and_a_cluster_from_files() -> None:
    profiled = CliRunner().invoke(app, ["profile", "planned_model:build"])
    assert profiled.exit_code == 0
    assert str(sl.Profile.load("profile.json")) in profiled.output
    wire = Level("machine", 2, bandwidth=1e9, latency=1e-4)
    sl.Cluster(2, "1GiB", levels=(wire,)).save("cluster.json")
    call = ["plan", "profile.json", "--cluster", "cluster.json", "--batch-size", "8"]
    planned = CliRunner().invoke(app, call)
    assert planned.exit_code == 0
    assert str(sl.Plan.load("plan.json")) in planned.output


def test_asynchronous_schedules_are_considered_if_they_are_named() -> None:
    assert CliRunner().invoke(app, ["profile", "planned_model:build"]).exit_code == 0
    call = ["plan", "profile.json", "--num-devices", "2", "--memory", "700", "--batch-size", "8"]
    plain = CliRunner().invoke(app, call)
    assert plain.exit_code == 0, plain.output
    assert not sl.Plan.load("plan.json").chosen.is_asynchronous
    named = CliRunner().invoke(app, [*call, "--schedule", "pipedream", "--schedule", "1f1b"])
    assert named.exit_code == 0, named.output
    plan = sl.Plan.load("plan.json")
    assert {plan.chosen.schedule, *(o.schedule for o in plan.others)} <= {"pipedream", "1f1b"}
    assert str(plan) in named.output
