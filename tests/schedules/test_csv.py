"""Schedules as files: a round trip changes nothing, and invalid files are rejected."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.schedules import csv
from stageline.schedules.action import Action, Kind
from stageline.schedules.build import build_schedule, schedule_names
from stageline.schedules.check import check
from stageline.schedules.edges import chain
from stageline.schedules.program.lower import lower
from stageline.schedules.schedule import Schedule

every_name = pytest.mark.parametrize("name", schedule_names())

LETTERS = st.sampled_from([*Kind, "UNSHARD", "RESHARD", "X", "f", "", "OVERLAP_F_B", "SEND", "F_"])
NUMBERS = st.integers(-1, 4).map(str) | st.sampled_from(["", "007", "9999999", "٣", "1.5", "1e3"])
PEERS = st.sampled_from(["", "", "", ">2", ">", ">x"])
VERSIONS = st.sampled_from(["", "", "", "@0", "@1", "@999999", "@", "@-1", "@x"])
ACTIONS = st.builds("{}{}{}{}{}".format, NUMBERS, LETTERS, NUMBERS, PEERS, VERSIONS)
PAIRS = st.builds("({};{})OVERLAP_F_B".format, ACTIONS, ACTIONS)
ODDITIES = st.sampled_from(["", " ", '"', "'", "()OVERLAP_F_B", "((", "\ufeff", "\0", "\r"])
SOUND = st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FFIWB"), st.integers(0, 2))
STEPS = st.builds("{}STEP@{}".format, st.integers(0, 2), st.integers(0, 3))
STREAMED = st.builds("{}@{}".format, SOUND, st.integers(0, 2)) | STEPS
CELLS = st.one_of(SOUND, SOUND, SOUND, STREAMED, ACTIONS, PAIRS, ODDITIES)
TEXTS = st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=4).map("\n".join)
STREAM_TEXTS = st.lists(st.lists(STREAMED, max_size=8).map(",".join), max_size=3).map("\n".join)
SOUND_TEXTS = st.lists(st.lists(SOUND, max_size=6).map(",".join), max_size=4).map("\n".join)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:
        yield Path(path)


def assert_read_or_refused(path: Path) -> None:
    """Reading or checking may raise ScheduleError; any other exception is a defect."""
    with suppress(ScheduleError):
        schedule = Schedule.from_csv(path)
        assert set(schedule.placement) <= set(range(schedule.num_ranks))
        check(schedule)


@settings(max_examples=200, deadline=None)
@given(text=st.text() | TEXTS | SOUND_TEXTS | STREAM_TEXTS)
def test_any_text_is_read_or_refused(folder: Path, text: str) -> None:
    path = folder / "any.csv"
    path.write_text(text, encoding="utf-8", newline="")
    assert_read_or_refused(path)


@settings(max_examples=100, deadline=None)
@given(content=st.binary())
def test_any_bytes_are_read_or_refused(folder: Path, content: bytes) -> None:
    path = folder / "any.csv"
    path.write_bytes(content)
    assert_read_or_refused(path)


@settings(max_examples=100, deadline=None)
@given(p=st.integers(1, 5), beyond=st.integers(0, 5), name=st.sampled_from(schedule_names()))
def test_a_schedule_that_is_written_and_read_is_the_same(
    folder: Path, name: str, p: int, beyond: int
) -> None:
    schedule = build_schedule(name, num_ranks=p, num_microbatches=2 * p + beyond)
    schedule.to_csv(folder / "written.csv")
    read = Schedule.from_csv(folder / "written.csv")
    assert read == schedule
    assert read.name == "written"


@every_name
def test_a_program_is_read_as_its_schedule(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6)
    lower(schedule).to_csv(tmp_path / "program.csv")
    assert Schedule.from_csv(str(tmp_path / "program.csv")) == schedule


@every_name
def test_a_program_with_skip_edges_keeps_its_peers(name: str) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8)
    program = lower(schedule, [*chain(schedule.num_stages), (0, 3), (1, 3)])
    assert ">" in csv.render(program.actions)
    assert tuple(map(tuple, csv.parse(csv.render(program.actions)))) == program.actions


def read(tmp_path: Path, text: str) -> Schedule:
    (tmp_path / "some.csv").write_text(text, encoding="utf-8")
    return Schedule.from_csv(tmp_path / "some.csv")


def test_a_row_is_a_rank_and_a_cell_is_an_action(tmp_path: Path) -> None:
    build_schedule("1f1b", num_ranks=2, num_microbatches=2).to_csv(tmp_path / "1f1b.csv")
    text = (tmp_path / "1f1b.csv").read_text(encoding="utf-8")
    assert text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_pauses_blanks_and_fsdp_actions_mean_nothing(tmp_path: Path) -> None:
    text = "0UNSHARD,0F0,, 0F1 ,,0B0,0B1,0RESHARD\r\n,,1F0,1B0,1F1,1B1,,\r\n"
    assert read(tmp_path, text) == Schedule.from_text("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_an_overlapped_pair_is_its_two_actions_in_order(tmp_path: Path) -> None:
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert read(tmp_path, text) == Schedule.from_text("0F0 0F1 0B0 0B1")


def test_a_stage_lives_where_its_first_forward_runs(tmp_path: Path) -> None:
    assert read(tmp_path, "0F0,3F0\n1F0,2F0\n").placement == (0, 1, 1, 0)


def test_a_peer_that_is_no_neighbour_is_named_and_read() -> None:
    text = "0SEND_F3,0SEND_F3>2\n2RECV_F3>0,1SEND_B0\n"
    rows = csv.parse(text)
    assert rows == [
        [Action(0, Kind.SEND_F, 3, 1), Action(0, Kind.SEND_F, 3, 2)],
        [Action(2, Kind.RECV_F, 3, 0), Action(1, Kind.SEND_B, 0, 0)],
    ]
    assert csv.render(rows) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no row has a forward, but every stage of a schedule needs one: is this a schedule?"),
        ("0B0", "no row has a forward, but every stage of a schedule needs one"),
        ("0F0\n2F0,4F0", "stage 1, 3 has no forward, but a later stage has one: add it"),
        ("0F0\n1F0,frog", "row 1, column 1 is 'frog', but an action looks like 2F0: a stage, then"),
        ("0F0,0f1", "row 0, column 1 is '0f1', but an action looks like 2F0"),
        ("0F0,0UNKNOWN", "row 0, column 1 is '0UNKNOWN', but an action looks like 2F0"),
        ("0F0,0F", "row 0, column 1 is '0F', but F takes a micro-batch"),
        ("0F0,0STEP1", "row 0, column 1 is '0STEP1', but STEP takes no micro-batch"),
        ("٣F0", "row 0, column 0 is '٣F0', but an action looks like 2F0"),
        ("0F0>1", "row 0, column 0 is '0F0>1', but only sends and receives have a peer"),
        ("0F0,1234567F0", "row 0, column 1 is '1234567F0', but an action looks like 2F0"),
        (
            f"0F0,{'x' * 200_000}",
            "the text is not valid CSV: field larger than field limit",
        ),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_not_text_is_refused_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "picture.csv").write_bytes(b"0F0,\xff\xfe")
    with pytest.raises(ScheduleError, match=r"^byte 4 of .*picture\.csv. is not text, but it has"):
        Schedule.from_csv(tmp_path / "picture.csv")


def test_a_file_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """Spreadsheets begin a file with a byte order mark."""
    path = tmp_path / "excel.csv"
    path.write_text("\ufeff0F0,0B0\n", encoding="utf-8")
    assert Schedule.from_csv(path) == Schedule.from_text("0F0 0B0")
