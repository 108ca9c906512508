"""sl.load_pretrained and sl.export to a folder in real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.distributed.launch import launch


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_process_reads_its_own_tensors_only(tmp_path: Path, num_ranks: int) -> None:
    for rank, ended in enumerate(launch("pretrained", num_ranks, str(tmp_path))):
        assert ended.code == 0, ended.output
        assert re.search(rf"rank {rank} read \d+ bytes and \d+ headers", ended.output)
