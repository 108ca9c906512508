from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from experiments.translation import __main__ as command
from experiments.translation.scale import QUICK
from experiments.translation.scores import Texts, score, write_translations
from experiments.translation.summary import gains
from experiments.translation.tables import depth_sheet, write_readme
from typer.testing import CliRunner, Result

ROOT = Path(command.__file__).parents[2]
SMALL = ("--quick", "--language", "de", "--language", "lb")
HYPOTHESES = ["the page was not found", "enter a date", "no", "the file ¤ is too large to open ."]
REFERENCES = ["the page is not found", "enter a valid date", "yes", "the file ¤ is too large."]


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command.app, ["--folder", str(folder), *SMALL, *arguments])


def results(folder: Path) -> dict[str, Any]:
    """Return the results without what depends on the machine."""
    runs = json.loads((folder / "runs/quick.json").read_text())
    machine = ("seconds", "environment")
    return {
        name: {key: value for key, value in found.items() if key not in machine}
        for name, found in runs.items()
    }


def kill_after_a_checkpoint(name: str, folder: Path) -> None:
    """Start a command in a process of its own, and kill it once it has saved a checkpoint."""
    arguments = [sys.executable, "-m", "experiments.translation", *SMALL]
    with subprocess.Popen(
        [*arguments, "--folder", str(folder), name],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        | {"OMP_NUM_THREADS": str(torch.get_num_threads())},  # the bits depend on it
        stdout=subprocess.DEVNULL,
    ) as process:
        while not list(folder.glob("runs/*/step-????????")):
            assert process.poll() is None, "it ended before it had saved anything"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("batch-size", marks=pytest.mark.slow),
        pytest.param("train", marks=pytest.mark.slow),
        pytest.param("figure3", marks=pytest.mark.slow),
        pytest.param("stability", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_was_killed_goes_on_to_the_same_results(name: str, tmp_path: Path) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    kill_after_a_checkpoint(name, killed)
    for folder in (killed, undisturbed):
        assert run(folder, name).exit_code == 0
    assert results(killed) == results(undisturbed)


def test_scores_are_those_of_the_sacrebleu_command(tmp_path: Path) -> None:
    write_translations(tmp_path, {"de": Texts(HYPOTHESES, REFERENCES)})
    arguments = [str(tmp_path / "de.references"), "-i", str(tmp_path / "de.hypotheses")]
    printed = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *arguments, "-b", "-w", "4"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert float(printed) == score(HYPOTHESES, REFERENCES).corpus
    assert 0 < float(printed) < 100


def test_the_sentence_score_is_the_mean_over_sentences() -> None:
    pairs = zip(HYPOTHESES, REFERENCES, strict=True)
    each = [sacrebleu.sentence_bleu(ours, [theirs]).score for ours, theirs in pairs]
    assert score(HYPOTHESES, REFERENCES).sentence == pytest.approx(sum(each) / 4, abs=1e-4)


def test_a_trained_model_translates_a_sentence_with_its_checkpoint(tmp_path: Path) -> None:
    arguments = (tmp_path, "translate", "--to", "de", "Hello %s")
    before = run(*arguments)
    assert before.exit_code == 1
    assert "has no checkpoint" in str(before.exception)
    trained = run(tmp_path, "train")
    assert "corpus BLEU" in trained.output
    after = run(*arguments)
    assert after.exit_code == 0
    assert run(*arguments).output == after.output
    unknown = run(tmp_path, "translate", "Hello", "--to", "xx")
    assert "'xx', but the model has only de, en, lb" in str(unknown.exception)


def test_four_partitions_have_the_bits_of_one(tmp_path: Path) -> None:
    found = run(tmp_path, "parity", "--steps", "2")
    assert found.exit_code == 0, found.output
    assert "none" in found.output


def test_the_corpus_is_counted(tmp_path: Path) -> None:
    printed = run(tmp_path, "corpus").output
    assert "2 languages" in printed
    assert "with others" in printed  # lb has few test strings


def test_a_report_without_results_says_what_to_run(tmp_path: Path) -> None:
    found = run(tmp_path, "report")
    assert found.exit_code == 2
    assert "run `all` first" in " ".join(found.output.replace("│", " ").split())


def test_results_of_another_recipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs/quick.json"
    path.parent.mkdir()
    other = {"key": "0", "recipe": "an older one", "seed": 0}
    path.write_text(json.dumps({"both ways": other}))
    found = run(tmp_path, "train")
    assert "'both ways' of another recipe (an older one)" in str(found.exception)


def scores(validation_bleu: float = 0.0, **bleu: float) -> dict[str, Any]:
    return {"bleu": bleu, "validation_bleu": validation_bleu}


def test_gains_are_over_the_baseline_that_validation_strings_choose() -> None:
    scale = QUICK
    short, long = scale.bilingual_steps
    size = scale.sizes[1]
    runs = {
        "corpus": {"groups": {"de": ["de"], "cs": ["cs"]}, "training": {"de": 2, "cs": 1}},
        f"multilingual {size} seed 0": scores(de=20.0, cs=9.0),
        f"multilingual {size} seed 1": scores(de=24.0, cs=9.0),
        f"bilingual de {short} steps seed 0": scores(de=7.0, validation_bleu=3.0),
        f"bilingual de {short} steps seed 1": scores(de=8.0, validation_bleu=8.0),
        f"bilingual de {long} steps seed 0": scores(de=11.0, validation_bleu=6.0),
        f"bilingual de {long} steps seed 1": scores(de=5.0, validation_bleu=6.0),
    }
    assert gains(runs, scale, size) == {"de": 22.0 - 8.0}


def test_deep_and_wide_are_compared_seed_by_seed() -> None:
    scale = QUICK
    _, deep, wide, _ = scale.sizes
    counts = {"a": 9, "c": 1, "b": 5}
    runs: dict[str, Any] = {
        "corpus": {"groups": {name: [name] for name in counts}, "training": counts}
    }
    for seed, lead in ((0, 1.0), (1, -2.0)):
        runs[f"multilingual {deep} seed {seed}"] = scores(a=5.0, b=5.0, c=5.0 + lead)
        runs[f"multilingual {wide} seed {seed}"] = scores(a=5.0, b=5.0, c=5.0)
    least = depth_sheet(runs, scale).rows[2]
    assert least == ("least data", "4.5 ± 2.1", "5.0 ± 0.0", "+1.0, -2.0")


def test_tables_are_put_between_their_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- facts -->\nold\n<!-- end of facts -->\nb\n")
    write_readme(readme, {}, "new")
    assert readme.read_text() == "a\n<!-- facts -->\nnew\n<!-- end of facts -->\nb\n"
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="has no markers <!-- facts -->"):
        write_readme(readme, {}, "new")
