"""Real processes: the bits of one process, and failures that speak.

Messages go through shared memory, and where it says so over gloo, as between machines.
"""

from __future__ import annotations

import signal

import pytest
from tests.distributed.launch import launch

# of failures that both kinds of messages see alike, `make test` has those over shared memory
OVER_GLOO = pytest.param("gloo", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("messages", "num_ranks"),
    [
        *(("memory", 3), ("gloo", 2)),
        *(
            pytest.param(messages, num_ranks, marks=pytest.mark.slow)
            for messages, num_ranks in (("memory", 2), ("gloo", 3), ("memory", 4), ("gloo", 4))
        ),
    ],
)
def test_every_schedule_trains_to_the_bits_of_one_process(messages: str, num_ranks: int) -> None:
    for ended in launch("schedules", num_ranks, messages):
        assert ended.code == 0, ended.output
        assert "14 schedules equal" in ended.output


def test_large_embeddings_train_to_the_bits_of_one_process() -> None:
    """Three steps of two schedules; all but a step's first micro-batch add rows, on rank 0."""
    for rank, ended in enumerate(launch("embeddings", 2)):
        assert ended.code == 0, ended.output
        assert f"rows were added {0 if rank else 18} times" in ended.output


def test_what_one_rank_cannot_do_right_is_refused_by_all() -> None:
    for ended in launch("refused", 2):
        assert ended.code == 0, ended.output
        assert "'1.table' was on the meta device and is not initialized" in ended.output
        assert "the buffer '1.mean' was changed by a forward" in ended.output
        assert "the output has None in micro-batch 0 and a tensor of shape (2, 4)" in ended.output
        assert "inputs have mask, but layers read only x" in ended.output


def test_outputs_in_any_container_come_to_all_ranks_and_take_gradients_back() -> None:
    for ended in launch("containers", 2):
        assert ended.code == 0, ended.output
        assert "6 containers equal" in ended.output


@pytest.mark.parametrize("names", ["dp,pp", "pp,tp"])
def test_replicas_and_tensor_parallelism_train_to_the_same_numbers(names: str) -> None:
    """To rounding: sums over replicas, and over parts of a product, have an order of their own."""
    for ended in launch("mesh", 4, names):
        assert ended.code == 0, ended.output
        assert "equal but for rounding" in ended.output


@pytest.mark.parametrize("messages", ["memory", "gloo"])
def test_a_layer_that_raises_ends_every_rank_with_one_error(messages: str) -> None:
    ends = launch("failing", 3, "raise", messages)
    for ended in ends:
        assert ended.code == 1
        assert "rank 1 failed in layer 'trouble' at 1F2 (forward, micro-batch 2)" in ended.output
        assert "ValueError: a layer of the user's own" in ended.output
        assert "never reached" not in ended.output
    assert "in forward" in ends[1].output  # the traceback of the layer, where it happened


@pytest.mark.parametrize("messages", ["memory", OVER_GLOO])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raise", "rank 0 of replica 1 failed in layer 'trouble' at 0F2"),
        ("SIGKILL", "rank 0 of replica 1 is gone: its connection broke"),
        ("SIGSTOP", "rank 0 of replica 1"),
    ],
)
def test_replicas_that_wait_for_gradients_name_the_one_that_failed(
    what: str, expected: str, messages: str
) -> None:
    stopped = [1] if what == "SIGSTOP" else []
    ends = launch("failing", 3, what, "replicas", messages, timeout=25.0, stopped=stopped)
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        assert expected in ended.output
        assert "never reached" not in ended.output


@pytest.mark.parametrize("messages", ["memory", OVER_GLOO])
def test_a_rank_that_is_killed_is_named_by_the_others(messages: str) -> None:
    ends = launch("failing", 3, "SIGKILL", messages)
    assert ends[1].code == -signal.SIGKILL
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        assert "rank 1 is gone: its connection broke" in ended.output
        assert "rank 1 at " in ended.output


@pytest.mark.parametrize("messages", ["memory", OVER_GLOO])
def test_a_rank_that_stops_answering_is_named_with_where_everyone_stands(messages: str) -> None:
    ends = launch("failing", 3, "SIGSTOP", messages, timeout=25.0, stopped=[1])
    for ended in (ends[0], ends[2]):
        assert ended.code == 1
        assert "has waited 4 s for" in ended.output
        assert "rank 1 at " in ended.output
        assert "silent for" in ended.output
    assert ends[1].code == -signal.SIGKILL  # it never woke up


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "model: rank 0 has 3 layers"),
        pytest.param("schedule", "schedule: rank 0 has '1f1b'", marks=pytest.mark.slow),
        (
            "batch",
            "batch: rank 0 has {'x': [(2, 4), (2, 4)]}, but rank 1 has {'x': [(3, 4), (2, 4)]}",
        ),
        ("world", "num_ranks is 3, but there are 2 processes: use as many"),
    ],
)
def test_ranks_that_are_not_about_to_do_the_same_say_so(what: str, message: str) -> None:
    for ended in launch("disagreeing", 2, what, timeout=60.0):
        assert ended.code == 1
        assert message in ended.output


def test_no_thread_outlives_the_interpreter_whatever_ends_it() -> None:
    """One that lets go of a tensor too late would abort the process, in about one of 300 runs."""
    for ended in launch("leaving", 2, timeout=60.0):
        assert ended.code == 1, ended.output
        assert "ValueError: enough" in ended.output
        assert "2 of 8 threads left" in ended.output  # of torch's own group, and our three


def test_a_model_that_no_process_can_hold_is_trained_by_two() -> None:
    assert "can't allocate memory" in launch("large", 1, "1")[0].output
    outputs = []
    for ended in launch("large", 2, "2"):
        assert ended.code == 0, ended.output
        outputs.append(ended.output)
    assert outputs[0] == outputs[1]
    assert "trained" in outputs[0]


@pytest.mark.slow
def test_nothing_grows_from_step_to_step_on_any_rank() -> None:
    """`stageline run -n 3 tests/distributed/workers/endurance.py 100 1000` is the long one."""
    for ended in launch("endurance", 3, "30", "80"):
        assert ended.code == 0, ended.output
        assert "no growth" in ended.output


@pytest.mark.parametrize(
    ("what", "how", "message"),
    [
        pytest.param(
            *(
                "norm",
                "stop",
                "for all ranks to share norms, longer than it should: rank 1 has not",
            ),
            marks=pytest.mark.slow,
        ),
        ("evaluate", "exit", "rank 1 is gone: its connection broke"),
        pytest.param(
            *("first", "stop", "for all ranks to share a plan, longer"),
            marks=pytest.mark.slow,
        ),
        ("connect", "exit", "for all ranks to share connections, longer"),
        ("step", "shapes", "do all ranks have batches of the same shapes and dtypes?"),
    ],
)
def test_a_rank_that_does_not_take_part_is_told_of(what: str, how: str, message: str) -> None:
    first, *_ = launch("absent", 2, what, how, timeout=45.0)
    assert first.code == 1, first.output
    assert "StageError" in first.output
    assert message in first.output
    assert first.seconds < 40


@pytest.mark.parametrize(
    ("num_ranks", "what", "message"),
    [
        (3, "aliased", "shares its memory with another tensor"),
        pytest.param(4, "seen later", "changes 'kept' in place", marks=pytest.mark.slow),
    ],
)
def test_models_that_are_hard_to_cut_have_the_bits_of_a_plain_loop(
    num_ranks: int, what: str, message: str
) -> None:
    for ended in launch("borders", num_ranks, str(num_ranks), what):
        assert ended.code == 0, ended.output
        assert "verified" in ended.output, ended.output
        assert message in ended.output, ended.output


@pytest.mark.parametrize("messages", ["memory", "gloo"])
def test_values_of_many_sorts_pass_between_processes_and_may_change_in_every_step(
    messages: str,
) -> None:
    for ended in launch("values", 2, messages, timeout=60.0):
        assert ended.code == 0, ended.output
        assert "all equal" in ended.output
