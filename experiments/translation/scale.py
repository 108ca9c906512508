"""How large the experiments are: the full size, and one of a few seconds for a first look."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.translation.model import BOTH, Size, Stability
from experiments.translation.training import Recipe

REMEDIES = {
    "neither": Stability(scale_init=False, clip=None),
    "scaled initialisation": Stability(scale_init=True, clip=None),
    "clipped logits": Stability(scale_init=False),
    "both": BOTH,
}


@dataclass(frozen=True)
class Scale:
    """Sizes, steps, seeds and languages of all experiments."""

    vocabulary: int
    width: int
    sizes: tuple[Size, ...]  # the smallest; deep and wide of the same size; the largest
    steps: int
    warmup: int
    seeds: tuple[int, ...]  # of everything but `both_ways`, which has the first only
    bilingual_size: Size
    bilingual_steps: tuple[int, ...]  # the one with the best BLEU on validation strings is taken
    bilingual_tokens: int
    num_bilingual: int  # languages, spread evenly over the order by data
    batch_tokens: tuple[int, ...]  # of table 5
    batch_steps: int
    deep: Size  # of the stability experiment
    deep_steps: int
    deep_rates: tuple[float, ...]

    @property
    def both_ways(self) -> Recipe:
        """The model that `train` trains and `translate` uses: into English and from it."""
        return replace(self.multilingual(self.sizes[-1], self.seeds[0]), share=0.5)

    def multilingual(self, size: Size, seed: int) -> Recipe:
        """Return the recipe of a model from all languages into English, as the paper's."""
        return Recipe(size, self.steps, self.width, warmup=self.warmup, seed=seed)

    def bilingual(self, language: str, steps: int, seed: int) -> Recipe:
        """Return the recipe of a baseline from one language into English."""
        return Recipe(
            self.bilingual_size,
            steps,
            self.width,
            language,
            self.bilingual_tokens,
            seed=seed,
            warmup=min(self.warmup, steps // 4),
        )

    def batch_size(self, num_tokens: int, seed: int) -> Recipe:
        return Recipe(
            self.sizes[0],
            self.batch_steps,
            self.width,
            batch_tokens=num_tokens,
            seed=seed,
            warmup=self.warmup,
        )

    def stability(self, remedy: str, rate: float, seed: int) -> Recipe:
        """Return a recipe without warm-up and without clipping of gradients."""
        return Recipe(
            self.deep,
            self.deep_steps,
            self.width,
            batch_tokens=512,
            seed=seed,
            rate=rate,
            warmup=0,
            max_norm=None,
            stability=REMEDIES[remedy],
        )


FULL = Scale(
    vocabulary=3000,
    width=64,
    sizes=(Size(1, 128, 4), Size(4, 128, 4), Size(2, 448, 8), Size(4, 448, 8)),
    steps=3000,
    warmup=40,
    seeds=(0, 1, 2),
    bilingual_size=Size(1, 128, 4),
    bilingual_steps=(150, 600),
    bilingual_tokens=512,
    num_bilingual=10,
    batch_tokens=(128, 512, 2048),
    batch_steps=800,
    deep=Size(12, 128, 4),
    deep_steps=80,
    deep_rates=(1e-3, 4e-3, 1.6e-2, 6.4e-2, 0.256),
)
QUICK = Scale(
    vocabulary=600,
    width=16,
    sizes=(Size(1, 16, 2), Size(2, 16, 2), Size(1, 48, 2), Size(2, 48, 2)),
    steps=4,
    warmup=2,
    seeds=(0, 1),
    bilingual_size=Size(1, 16, 2),
    bilingual_steps=(2, 4),
    bilingual_tokens=128,
    num_bilingual=2,
    batch_tokens=(32, 128, 512),
    batch_steps=4,
    deep=Size(3, 16, 2),
    deep_steps=4,
    deep_rates=(1e-3, 1e-2),
)
