"""Built-in examples: GPTs of two sizes with a cluster each, computed from formulas.

A GPT block of width h does 24·h² + 4·h·s FLOPs per token of a sequence of length s in its forward,
and as many for each half of its backward. With fused attention it keeps 34·h bytes per token in
16-bit numbers, as Korthikanti et al. (arXiv:2205.05198) count them. It has 12·h² parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageline.planning.cluster.cluster import Cluster, Level
from stageline.planning.profiling.profile_result import (
    LayerCost,
    Measurement,
    Profile,
    ValueCost,
)

FLOPS, BANDWIDTH = 120e12, 1.2e12  # per second: what an A100 reaches in practice
BYTES = 2  # of a 16-bit number
SIZES = (1, 2, 4)  # samples of the micro-batches
VOCABULARY = 50_304


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT."""

    num_blocks: int
    width: int
    sequence: int

    def profile(self) -> Profile:
        """Return what its layers cost."""
        names = ("embedding", *(f"block {n}" for n in range(self.num_blocks)), "head and loss")
        return Profile(names, tuple(map(self._measurement, SIZES)), device="an A100, by formulas")

    def _measurement(self, samples: int) -> Measurement:
        tokens = samples * self.sequence
        message = float(BYTES * tokens * self.width)
        layers = (
            self._embedding(tokens),
            *(self._block(tokens),) * self.num_blocks,
            self._head(tokens),
        )
        values = tuple(ValueCost(n, (n + 1,), message) for n in range(self.num_blocks + 1))
        return Measurement(samples, layers, values)

    def _embedding(self, tokens: int) -> LayerCost:
        output, weights = BYTES * tokens * self.width, BYTES * VOCABULARY * self.width
        seconds = 2 * output / BANDWIDTH  # read and written
        return LayerCost(seconds, 0.0, seconds, output, 0.0, weights, 0.0)

    def _block(self, tokens: int) -> LayerCost:
        width = self.width
        seconds = tokens * (24 * width**2 + 4 * width * self.sequence) / FLOPS
        kept = 34 * tokens * width
        retained = 20 * tokens * width  # the inputs of its matrix products
        weights = BYTES * 12 * width**2
        return LayerCost(seconds, seconds, seconds, kept, retained, weights, 0.0)

    def _head(self, tokens: int) -> LayerCost:
        seconds = 2 * tokens * self.width * VOCABULARY / FLOPS
        scores, weights = BYTES * tokens * VOCABULARY, BYTES * VOCABULARY * self.width
        return LayerCost(seconds, seconds, seconds, 2 * scores, scores, weights, 0.0)


@dataclass(frozen=True)
class PlanExample:
    """A model and a cluster to start from."""

    title: str
    shape: GPTShape
    cluster: Cluster
    batch_size: int


_MACHINE = Level("machine", 8, bandwidth=300e9, latency=2e-6)
EXAMPLES = {
    "gpt-1.3b": PlanExample(
        "GPT 1.3B, 4 devices of 16GiB",
        GPTShape(num_blocks=24, width=2048, sequence=1024),
        Cluster(4, "16GiB", levels=(Level("machine", 4, bandwidth=25e9, latency=5e-6),)),
        batch_size=64,
    ),
    "gpt-13b": PlanExample(
        "GPT 13B, 32 devices of 40GiB in 4 machines",
        GPTShape(num_blocks=40, width=5120, sequence=2048),
        Cluster(32, "40GiB", levels=(_MACHINE, Level("site", 4, bandwidth=25e9, latency=1e-5))),
        batch_size=256,
    ),
}
