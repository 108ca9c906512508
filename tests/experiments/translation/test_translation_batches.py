from __future__ import annotations

from collections import Counter

import pytest
import torch
from experiments.translation.batches import (
    Example,
    TokenBatches,
    collate,
    cut_by_tokens,
    sampling_probabilities,
)
from experiments.translation.vocabulary import END, PAD, START

# The number of tokens of a source says which language it is of.
EXAMPLES = {
    "large": [Example([3] * 4, [4, END])] * 900,
    "small": [Example([3] * 5, [4, END])] * 90,
    "tiny": [Example([3] * 6, [4, END])] * 10,
}


def loader(num_tokens: int = 64, temperature: float = 5.0, share: float = 1.0) -> TokenBatches:
    reverse = {"large": [Example([3] * 7, [4, END])] * 10}
    return TokenBatches((EXAMPLES, reverse), num_tokens, temperature, share)


@pytest.mark.parametrize("temperature", [1.0, 5.0, 100.0])
def test_probabilities_are_shares_to_the_power_of_one_over_t(temperature: float) -> None:
    found = sampling_probabilities([900, 90, 10], temperature)
    powers = [0.9 ** (1 / temperature), 0.09 ** (1 / temperature), 0.01 ** (1 / temperature)]
    assert found.tolist() == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_languages_are_drawn_with_these_probabilities(temperature: float) -> None:
    torch.manual_seed(0)
    count = 20_000
    drawn = Counter(len(each.source) for each in loader(temperature=temperature).draw(count))
    expected = sampling_probabilities([900, 90, 10], temperature).tolist()
    for length, probability in zip((4, 5, 6), expected, strict=True):
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(drawn[length] / count - probability) < 4 * deviation


def test_a_share_of_the_examples_is_into_english() -> None:
    torch.manual_seed(0)
    drawn = loader(share=0.75).draw(20_000)
    assert sum(len(each.source) < 7 for each in drawn) / len(drawn) == pytest.approx(0.75, abs=0.01)


def test_padded_batches_have_at_most_the_number_of_tokens() -> None:
    pool = [Example([3] * length, [4, END]) for length in (9, 2, 30, 2, 5, 8, 3)]
    cut = list(cut_by_tokens(pool, 20))
    assert sorted(len(each.source) for batch in cut for each in batch) == [2, 2, 3, 5, 8, 9, 30]
    sizes = [len(batch) * max(each.length for each in batch) for batch in cut]
    assert all(size <= 20 for size, batch in zip(sizes, cut, strict=True) if len(batch) > 1)


def test_an_epoch_is_the_same_again_after_the_same_seed() -> None:
    def epoch() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [inputs["source"] for inputs, _ in loader()]

    assert all(map(torch.equal, epoch(), epoch()))


def test_the_model_reads_the_target_shifted_by_one() -> None:
    inputs, target = collate([Example([5, 6, END], [7, 8, END]), Example([5, END], [9, END])])
    assert inputs["source"].tolist() == [[5, 6, END], [5, END, PAD]]
    assert inputs["prefix"].tolist() == [[START, 7, 8], [START, 9, PAD]]
    assert target.tolist() == [[7, 8, END], [9, END, PAD]]
