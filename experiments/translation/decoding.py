"""Translate batches of token sequences: greedily for a quick look, or by beam search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import stageline as sl
from experiments.translation.batches import MAX_TARGET, pad
from experiments.translation.model import forward
from experiments.translation.vocabulary import END, PAD, START

LENGTH_PENALTY = 0.6  # log-probabilities are divided by length to this power


@torch.no_grad()
def beam_search(
    layers: sl.LayerSequence,
    source: Tensor,
    *,
    beam: int = 4,
    max_length: int = MAX_TARGET,
    length_penalty: float = LENGTH_PENALTY,
) -> list[list[int]]:
    """Return a translation for every row of `source`, without END.

    At every length the `beam` most probable hypotheses are kept. The search for a row stops when
    the most probable of them has ended; of those that have ended, the best for its length is taken.
    """
    results: list[list[int]] = [[] for _ in source]
    rows = torch.arange(len(source))  # that are still searched for
    memory = forward(layers, source=source)
    prefix = torch.full((len(source), 1, 1), START)
    scores = torch.zeros(len(source), 1)
    for length in range(1, max_length + 1):
        following = next_log_probabilities(layers, prefix, memory[rows], source[rows])
        scores, prefix = extended(prefix, scores, following, beam)
        ended = (prefix == END).any(dim=-1)
        is_done = ended[:, 0] | (length == max_length)
        for row, hypotheses, value in zip(
            rows[is_done].tolist(), prefix[is_done], scores[is_done], strict=True
        ):
            results[row] = best(hypotheses[:, 1:], value, length_penalty)
        rows, prefix, scores = rows[~is_done], prefix[~is_done], scores[~is_done]
        if not len(rows):
            break
    return results


greedy = partial(beam_search, beam=1)


def extended(prefix: Tensor, scores: Tensor, following: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """Return the scores and tokens of the best continuations of each row, the best first."""
    totals = (scores[:, :, None] + following).flatten(1)
    kept, chosen = totals.topk(min(beam, totals.shape[1]))
    parents = (chosen // following.shape[-1])[:, :, None].expand(-1, -1, prefix.shape[-1])
    tokens = (chosen % following.shape[-1])[:, :, None]
    return kept, torch.cat([prefix.gather(1, parents), tokens], dim=-1)


def best(hypotheses: Tensor, scores: Tensor, length_penalty: float) -> list[int]:
    """Return the ended hypothesis with the highest score for its length, up to END.

    If none has ended, it is the most probable.
    """
    ended = (hypotheses == END).any(dim=-1)
    lengths = (hypotheses != PAD).sum(dim=-1)
    values = torch.where(ended, scores / lengths**length_penalty, -torch.inf)
    chosen = hypotheses[int(values.argmax()) if ended.any() else 0].tolist()
    return chosen[: chosen.index(END)] if END in chosen else chosen


def next_log_probabilities(
    layers: sl.LayerSequence, prefix: Tensor, memory: Tensor, source: Tensor
) -> Tensor:
    """Return log-probabilities of the next token of each hypothesis; after END comes only PAD."""
    *body, head = layers.layers
    rows, beam, length = prefix.shape
    x = forward(
        body,
        source=source.repeat_interleave(beam, dim=0),
        memory=memory.repeat_interleave(beam, dim=0),
        prefix=prefix.view(rows * beam, length),
    )
    # Logits of the whole prefix would take as long as the layers.
    logits: Tensor = head.module(x[:, -1]).view(rows, beam, -1)
    logits[..., [PAD, START]] = -torch.inf
    result = logits.log_softmax(dim=-1)
    ended = (prefix == END).any(dim=-1)
    result[ended] = -torch.inf
    result[..., PAD][ended] = 0.0
    return result


Search = Callable[[sl.LayerSequence, Tensor], list[list[int]]]


def translate_all(
    layers: sl.LayerSequence, sources: Sequence[list[int]], search: Search, *, rows: int = 128
) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each source and its translation, shorter ones first."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), rows):
        numbers = order[start : start + rows]
        yield from zip(numbers, search(layers, pad([sources[i] for i in numbers])), strict=True)
