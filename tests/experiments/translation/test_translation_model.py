from __future__ import annotations

from itertools import product

import pytest
import torch
from experiments.translation.decoding import beam_search, greedy
from experiments.translation.model import (
    Size,
    Stability,
    clip_logits,
    forward,
    num_tokens,
    smoothed_loss,
    translation_model,
)
from experiments.translation.parity import different
from experiments.translation.vocabulary import END, PAD, START
from torch import Tensor

import stageline as sl

SIZE = Size(layers=3, hidden=24, heads=2)


def model(stability: Stability = Stability(), vocabulary: int = 20) -> sl.LayerSequence:  # noqa: B008
    torch.manual_seed(0)
    layers = translation_model(SIZE, vocabulary=vocabulary, width=8, stability=stability)
    layers.train(mode=False)
    return layers


def batch(rows: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    source, target = torch.randint(3, 20, (rows, 6)), torch.randint(3, 20, (rows, 5))
    source[::2, 4:], target[::3, 3:] = PAD, PAD
    prefix = torch.cat([torch.full((rows, 1), START), target[:, :-1]], dim=1)
    return {"source": source, "prefix": prefix}, target


def test_logits_are_clipped_and_pass_no_gradient_beyond_the_limit() -> None:
    logits = torch.tensor([-12.0, -10.0, 0.5, 11.0], requires_grad=True)
    clipped = clip_logits(logits, 10.0)
    assert clipped.tolist() == [-10.0, -10.0, 0.5, 10.0]
    (gradient,) = torch.autograd.grad(clipped.sum(), logits)
    assert gradient.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert clip_logits(logits, None) is logits


def test_the_model_clips_its_logits() -> None:
    inputs, _ = batch()
    free = forward(model(Stability(clip=None)), **inputs)
    clipped = forward(model(Stability(clip=0.5)), **inputs)
    assert free.abs().max() > 0.5
    assert torch.equal(clipped, free.clamp(-0.5, 0.5))


def test_initial_feed_forward_weights_are_divided_by_the_number_of_layers() -> None:
    scaled, plain = model().state_dict(), model(Stability(scale_init=False)).state_dict()
    fed = [name for name in plain if "feed_forward" in name and "norm" not in name]
    assert len(fed) == 2 * SIZE.layers * 4  # encoder and decoder; two weights and two biases
    for name, weight in plain.items():
        expected = weight / SIZE.layers if name in fed else weight
        assert torch.equal(scaled[name], expected), name


def test_the_loss_is_smoothed_and_leaves_out_padding() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 5), torch.tensor([[1, 4, PAD], [2, PAD, PAD]])
    minus_logs = -logits.log_softmax(dim=-1)
    expected = sum(
        0.9 * minus_logs[row, place, target[row, place]] + 0.1 * minus_logs[row, place].mean()
        for row, place in ((0, 0), (0, 1), (1, 0))
    )
    assert float(smoothed_loss(0.1, logits, target)) == pytest.approx(float(expected), rel=1e-6)
    assert int(num_tokens(target)) == 3


@torch.no_grad()
def test_padding_does_not_change_the_loss() -> None:
    inputs, target = batch()
    padded = {name: torch.nn.functional.pad(each, (0, 4)) for name, each in inputs.items()}
    loss = smoothed_loss(0.1, forward(model(), **inputs), target)
    with_padding = smoothed_loss(
        0.1, forward(model(), **padded), torch.nn.functional.pad(target, (0, 4))
    )
    assert float(with_padding) == pytest.approx(float(loss), rel=1e-5)


def test_a_position_does_not_see_later_ones() -> None:
    inputs, _ = batch()
    before = forward(model(), **inputs)
    inputs["prefix"][:, 3:] = 5
    after = forward(model(), **inputs)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


def test_the_embedding_is_one_weight_with_three_uses() -> None:
    layers = {layer.name: layer.module for layer in model()}
    weights = [layers[name].weight for name in ("embed_source", "embed_target", "head")]
    assert weights[0] is weights[1] is weights[2]


def test_four_partitions_train_to_the_bits_of_one() -> None:
    """Decoder layers on three ranks read the encoder's output, and the embedding is on three."""

    def trained(num_ranks: int, balance: list[int] | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = translation_model(SIZE, vocabulary=20, width=8, dropout=0.2)
        with sl.Pipeline(
            layers,
            lambda logits, target: smoothed_loss(0.1, logits, target),
            num_ranks=num_ranks,
            num_microbatches=4,
            balance=balance,
            options=sl.Options(count_fn=num_tokens),
        ) as pipe:
            optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
            for _ in range(3):
                pipe.step(*batch())
                optimizer.step()
                pipe.zero_grad()
            return dict(pipe.named_parameters())

    one, four = trained(1, None), trained(4, [4, 3, 1, 2])
    assert one.keys() == four.keys()
    assert [name for name in one if not torch.equal(one[name], four[name])] == []


def log_probability(layers: sl.LayerSequence, source: Tensor, tokens: tuple[int, ...]) -> float:
    prefix = torch.tensor([[START, *tokens[:-1]]])
    logits = forward(layers, source=source[None], prefix=prefix)[0]
    logits[:, [PAD, START]] = -torch.inf
    return float(logits.log_softmax(dim=-1)[torch.arange(len(tokens)), list(tokens)].sum())


def test_a_wide_beam_finds_the_most_probable_of_all_translations() -> None:
    layers, num_letters, longest = model(vocabulary=6), 3, 3
    sources = torch.tensor([[3, 4, END], [5, 5, END], [4, END, PAD], [3, 3, END]])
    letters = range(3, 3 + num_letters)
    with torch.no_grad():
        found = beam_search(layers, sources, beam=200, max_length=longest, length_penalty=0.0)
        for source, tokens in zip(sources, found, strict=True):
            ended = [(*word, END) for n in range(longest) for word in product(letters, repeat=n)]
            scores = {word: log_probability(layers, source, word) for word in ended}
            assert (*tokens, END) == max(scores, key=lambda word: scores[word])


def test_greedy_search_takes_the_most_probable_token_each_time() -> None:
    layers, (inputs, _) = model(), batch()
    found = greedy(layers, inputs["source"], max_length=7)
    with torch.no_grad():
        for source, tokens in zip(inputs["source"], found, strict=True):
            expected: list[int] = []
            while len(expected) < 7:
                prefix = torch.tensor([[START, *expected]])
                logits = forward(layers, source=source[None], prefix=prefix)[0, -1]
                logits[[PAD, START]] = -torch.inf
                if int(logits.argmax()) == END:
                    break
                expected.append(int(logits.argmax()))
            assert tokens == expected


def test_a_parameter_that_differs_in_one_bit_is_named() -> None:
    one = {"a": torch.ones(2), "b": torch.ones(2)}
    last_bit = torch.nextafter(torch.ones(2), torch.full((2,), 2.0))
    assert different(one, one | {"b": last_bit}) == ["b"]
    assert different(one, {"a": torch.ones(2)}) == ["b"]
