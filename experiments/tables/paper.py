"""What the GPipe paper reports, arXiv 1811.06965: tables 2 and 3, and the parts of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[2] / "tests" / "figures" / "gpipe_tables.json"
RANKS = (2, 4, 8)
MICROBATCHES = (1, 4, 32)
NAMES = {  # of workloads in this experiment, and in the file
    "AmoebaNet-D (18, 256)": "amoebanet_d",
    "Transformer-48": "transformer_48",
    "AmoebaNet-D (18, 128)": "amoebanet_d_18_128",
    "Transformer-24": "transformer_24",
}
# Of a step on two partitions; the rest of 100 is the update of the weights.
BREAKDOWN = {
    "compute": 0.656,
    "recompute": 0.225,
    "bubble": 0.041,
    "imbalance": 0.032,
    "set-up": 0.029,
    "update": 1 - 0.656 - 0.225 - 0.041 - 0.032 - 0.029,
}
# Samples a second of AmoebaNet-D (18, 256) in torchgpipe, arXiv 2004.09910, on P40 GPUs.
TORCHGPIPE = {1: (26.7, 26.8, 24.9), 4: (41.1, 44.5, 70.1), 32: (47.4, 72.4, 132.4)}


def throughput(workload: str) -> dict[tuple[int, int], float]:
    """Return normalised throughput by (ranks, micro-batches); {} if the paper has none.

    >>> throughput("Transformer-48")[8, 32]
    6.3
    """
    tables: Mapping[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    name = NAMES.get(workload)
    slow = tables["table3_throughput_gpu_without_nvlink_M32"]
    if name in slow:
        return {(ranks, 32): value for ranks, value in zip(RANKS, slow[name], strict=True)}
    rows = tables["table2_throughput_tpu"].get(name, {})
    return {
        (ranks, num_microbatches): rows[f"M={num_microbatches}"][column]
        for num_microbatches in MICROBATCHES
        for column, ranks in enumerate(RANKS)
        if rows
    }
