"""The changes that `benchmarks/mutants.py` makes, and how it chooses some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.mutations import Mutation, choose, mutations


def found_in(folder: Path, *texts: str) -> list[Mutation]:
    for number, text in enumerate(texts):
        (folder / f"module{number}.py").write_text(text)
    return mutations(folder, folder.glob("*.py"))


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("return a < b", {"a <= b"}),
        ("return a is not b", {"a is b"}),
        ("return monotonic() < b", {"monotonic() >= b"}),
        ("return a and b", {"((a) or (b))"}),
        ("return é * (a - b)", {"é + (a - b)", "a + b"}),
        ("return [a] + b", set()),
        ("if a: b = c", {"not (a)"}),
        ("a.b = c", {"pass"}),
        ("a = b", set()),
        ("return 3", {"4"}),
        ("return True", {"False"}),
        ("return 'text'", set()),
        ("return f(a, b, c=d)", {"f(b, a, c=d)"}),
        ("return range(a)", {"(a) - 1"}),
        ("return len(a)", {"(len(a) - 1)"}),
        ("raise ValueError(f'{a + 1}')", set()),
        ("a: Literal[3] = b", set()),
        ("'''A docstring of 3 < 4.'''", set()),
        ("return a.cuda(3)", set()),
    ],
)
def test_what_becomes_of_a_line(line: str, changed: set[str], tmp_path: Path) -> None:
    found = found_in(tmp_path, f"def f():\n    {line}\n")
    assert {each.new for each in found} == changed
    assert {each.line for each in found} <= {2}


def test_a_mutation_changes_its_own_place_and_no_other(tmp_path: Path) -> None:
    text = "LIMIT = 1\n\n\ndef f(a):\n    return a + 1, a + 1\n"
    found = [each.apply(text) for each in found_in(tmp_path, text) if each.old == "1"]
    assert found == [
        "LIMIT = 1\n\n\ndef f(a):\n    return a + 2, a + 1\n",
        "LIMIT = 1\n\n\ndef f(a):\n    return a + 1, a + 2\n",
    ]


def test_a_file_that_has_changed_is_not_broken_elsewhere(tmp_path: Path) -> None:
    (mutation,) = found_in(tmp_path, "def f():\n    return 1\n")
    with pytest.raises(AssertionError, match=r"module0.py has changed since"):
        mutation.apply("def f(a):\n    return 1\n")


def test_the_choice_spreads_over_files_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    body = "def f(a, b):\n" + "".join(f"    a({n}, b)\n" for n in range(9))
    candidates = found_in(tmp_path, body, body, body)
    chosen = choose(candidates, 7, seed=3)
    assert chosen == choose(candidates, 7, seed=3) != choose(candidates, 7, seed=4)
    assert chosen[:4] == choose(candidates, 4, seed=3)
    assert len({(each.path, each.line) for each in chosen}) == 7
    assert sorted(sum(each.path == f"module{n}.py" for each in chosen) for n in range(3)) == [
        *(2, 2, 3)
    ]
    assert len(choose(candidates, 99, seed=0)) == 27  # lines
