from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor

from stageline.model.layers import LayerSequence
from stageline.pipeline import Pipeline
from stageline.zoo.gpt import generate, gpt, loss


@pytest.fixture
def layers() -> LayerSequence:
    torch.manual_seed(0)
    return gpt(vocabulary=11, width=16, heads=2, blocks=3, context=8, dropout=0.1)


def logits(layers: LayerSequence, tokens: Tensor) -> Tensor:
    layers.modules.eval()
    x = tokens
    for layer in layers:
        x = layer.module(x)
    return x


def test_parameter_names(layers: LayerSequence) -> None:
    names = list(layers.state_dict())
    assert names[0] == "embedding.tokens.weight"
    assert "blocks.2.attention.inward.weight" in names
    assert "blocks.2.mlp.outward.bias" in names
    assert names[-1] == "head.norm.bias"


def test_the_head_shares_the_weight_of_the_embedding(layers: LayerSequence) -> None:
    state = layers.state_dict()
    assert state["head.weight"].data_ptr() == state["embedding.tokens.weight"].data_ptr()
    assert len(list(layers.modules.parameters())) == len(state) - 1


def test_no_position_sees_those_after_it(layers: LayerSequence) -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = torch.tensor([[1, 2, 3, 4, 9, 0]])
    before, after = logits(layers, tokens), logits(layers, changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_logits_depend_on_the_order_of_earlier_tokens(layers: LayerSequence) -> None:
    one, other = logits(layers, torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(one[-1], other[-1])


def test_the_initial_loss_is_that_of_guessing(layers: LayerSequence) -> None:
    tokens = torch.randint(11, (64, 8))
    chance = torch.tensor(11.0).log().item()
    assert loss(logits(layers, tokens), tokens.roll(1)).item() == pytest.approx(chance, abs=0.3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_on_four_ranks_it_is_bit_identical_to_a_plain_loop(
    layers: LayerSequence, schedule: str
) -> None:
    pipe = Pipeline(layers, loss, num_ranks=4, num_microbatches=4, schedule=schedule)
    tokens = torch.randint(11, (8, 8))
    pipe.verify(tokens, tokens.roll(1))
    pipe.close()


def test_generated_tokens_depend_on_the_seed(layers: LayerSequence) -> None:
    layers.modules.eval()
    prompt = torch.tensor([3])

    def drawn(seed: int) -> list[int]:
        tokens = generate(layers, prompt, context=8, temperature=1.0, seed=seed)
        return list(islice(tokens, 20))

    assert drawn(0) == drawn(0) != drawn(1)
    assert all(0 <= token < 11 for token in drawn(0))


def test_at_a_low_temperature_the_likeliest_token_is_generated(layers: LayerSequence) -> None:
    prompt = torch.tensor([3, 1, 4])
    likeliest = int(logits(layers, prompt[None])[0, -1].argmax())
    assert next(generate(layers, prompt, context=8, temperature=1e-3)) == likeliest
