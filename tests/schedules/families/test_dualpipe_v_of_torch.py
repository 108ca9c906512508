"""DualPipeV as torch.distributed.pipelining orders it, action by action."""

import pytest

from stageline.schedules.families.dualpipe_v import dualpipe_v

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_row(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """Torch's generator needs no stages and no process group, only these two numbers."""
    schedule = object.__new__(schedules.ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = num_ranks, num_microbatches
    actions = schedule._calculate_single_rank_operations(rank)
    return [str(part) for action in actions for part in action.sub_actions or (action,)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("beyond", [0, 1, 5])
def test_the_order_is_that_of_torch(num_ranks: int, beyond: int) -> None:
    num_microbatches = 2 * num_ranks + beyond
    for rank, row in enumerate(dualpipe_v(num_ranks, num_microbatches).actions):
        assert [str(action) for action in row] == torch_row(rank, num_ranks, num_microbatches)
