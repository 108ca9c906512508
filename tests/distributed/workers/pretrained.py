"""Loads sharded files into a model on the meta device; each process reads its own tensors only."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.checkpoint.pretrained_models import (
    EMBEDDING,
    TIED,
    assert_state,
    batch,
    build,
    tensors,
    uninitialized,
    write_shards,
)
from torch import Tensor

import stageline as sl
from stageline.checkpoint import read_tensors
from stageline.checkpoint.pretrained import weight_files
from stageline.checkpoint.read_tensors import StoredPiece

NUM_FILES = 14  # as many as there are tensors
ONE = "model.layers.0.weight"


def weights() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors(build(seed=5)).items() if name != TIED}


class Reads:
    """What a process reads of files. State: the bytes of tensors, and the files with a header."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.headers: list[str] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        read, read_header = read_tensors._read, weight_files.read_header

        def counting_read(piece: StoredPiece) -> Tensor:
            self.num_bytes += piece.type.num_bytes
            return read(piece)

        def counting_header(path: Path) -> dict[str, read_tensors.StoredTensor]:
            self.headers.append(path.name)
            return read_header(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(read_tensors, "_read", counting_read)
            patch.setattr(weight_files, "read_header", counting_header)
            yield


def load_own(folder: Path, state: dict[str, Tensor]) -> None:
    """Load twice, as one would in one process, and count what is read."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pipe = build(num_ranks, on_meta=True, init_fn=lambda _: None, backend=None)
    own = {EMBEDDING if name == TIED else name for name in pipe.state_dict()}
    for _ in range(2):
        reads = Reads()
        with reads.counted():
            assert sl.load_pretrained(pipe, folder) == ((), ())
        assert reads.num_bytes == sum(state[name].nbytes for name in own)
        assert len(reads.headers) == len(own) < NUM_FILES
    whole = state | {TIED: state[EMBEDDING]}
    assert_state(pipe, {name: whole[name] for name in pipe.state_dict()})
    alone = uninitialized(1)
    sl.load_pretrained(alone, folder)
    assert float(pipe.step(*batch()).loss) == float(alone.step(*batch()).loss)
    print(f"rank {rank} read {reads.num_bytes} bytes and {len(reads.headers)} headers")
    pipe.close()


def refuse(folder: Path) -> None:
    """A file that only one rank reads is damaged: all refuse, and nothing has changed."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pipe = build(num_ranks, seed=1, backend=None)
    before = tensors(pipe)
    harmed = folder.with_name("harmed")
    if rank == 0:
        shutil.copytree(folder, harmed)
        path = harmed / f"model-00002-of-{NUM_FILES:05d}.safetensors"
        assert list(load_file(path)) == [ONE]
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    start = "^'" if ONE in pipe.state_dict() else r"^rank \d: '"
    with pytest.raises(sl.CheckpointError, match=start + ".* its tensors end at byte"):
        sl.load_pretrained(pipe, harmed)
    path = folder if rank else folder / "nowhere"
    with pytest.raises(sl.CheckpointError, match=r"rank 0: .* not exist" if rank else "not exist"):
        sl.load_pretrained(pipe, path)
    path = folder / "model-00001-of-00014.safetensors" if rank else folder
    with pytest.raises(sl.CheckpointError, match="is not the same on all ranks"):
        sl.load_pretrained(pipe, path)
    assert_state(pipe, before)
    pipe.close()


def export(folder: Path) -> None:
    """Export sharded and whole; the files have each tensor once."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pipe = build(num_ranks, seed=3, backend=None)
    for name, size in (("sharded", "300B"), ("single", "5GB"), ("single", "600B")):
        sl.export(folder / name, pipe, max_shard_size=size)
        if rank == 0:
            files = sorted((folder / name).glob("*.safetensors"))
            assert (len(files) > 1) == (size != "5GB")
            found = {n: t for path in files for n, t in load_file(path).items()}
            wanted = tensors(build(1, seed=3))
            assert found.keys() == wanted.keys() - {TIED}
            assert all(torch.equal(found[n], wanted[n]) for n in found)
        alone = uninitialized(1)
        sl.load_pretrained(alone, folder / name)
        assert_state(alone, tensors(build(1, seed=3)))
        dist.barrier()
    pipe.close()


def main(place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, state = Path(place) / "files", weights()
    if dist.get_rank() == 0:
        write_shards(folder, state, NUM_FILES)
    dist.barrier()
    load_own(folder, state)
    refuse(folder)
    export(Path(place))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
