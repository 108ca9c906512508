"""Models that are hard to cut, verified over processes."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tests.runtime.test_in_place import ChangingFirst, Made, Scaled, Twice, skipping
from tests.runtime.test_stage_border import BORDERS, bias_of_all_layers, cross_attention
from torch.nn.functional import mse_loss

from stageline.errors import StagelineError
from stageline.pipeline import Pipeline
from stageline.zoo.cases import grouped

SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b")


def verify_all(num_ranks: int, *, all_pairs: bool) -> None:
    """Verify each border under all schedules, or under one of them each in turn."""
    options = {"num_ranks": num_ranks, "num_microbatches": 2 * num_ranks}
    for turn, schedule in enumerate(SCHEDULES):
        for make in BORDERS if all_pairs else BORDERS[turn :: len(SCHEDULES)]:
            torch.manual_seed(3)
            layers, x, y = make()
            pipe = Pipeline(layers, mse_loss, schedule=schedule, **grouped(options))
            pipe.verify(x, y)
            pipe.close()
        torch.manual_seed(4)
        inputs = {"x": torch.randn(8, 5, 8), "source": torch.randn(8, 6, 8)}
        target = torch.randn(8, 5, 8)
        pipe = Pipeline(cross_attention(), mse_loss, schedule=schedule, **grouped(options))
        pipe.verify(inputs, target)
        pipe.close()
        pipe = Pipeline(bias_of_all_layers(), mse_loss, schedule=schedule, **grouped(options))
        pipe.verify(inputs["x"], target)
        pipe.close()


def refused(layers: Made, num_ranks: int) -> str:
    pipe = Pipeline(layers, mse_loss, num_ranks=num_ranks, num_microbatches=2)
    try:
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    except StagelineError as error:
        return str(error)
    return "not refused"


def main(num_ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    verify_all(num_ranks, all_pairs=num_ranks == 4)
    print("verified")
    if sys.argv[2:] == ["seen later"]:
        print(refused(skipping(Scaled()), num_ranks))
    else:
        layers: Made = [Twice(lambda x: x.view(-1, 4)), ChangingFirst(), torch.nn.Linear(4, 4)]
        print(refused(layers, num_ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
