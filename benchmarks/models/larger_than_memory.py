"""Train a model on two processes that one process could not hold.

    python -m benchmarks.models.larger_than_memory

A Llama is built on the meta device, recorded, cut, loaded from sharded safetensors and trained, by
two processes whose memory is limited to less than the weights and gradients of the whole model.
Then one process tries the same within the same limit.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
import benchmarks.models  # noqa: F401  without it transformers cannot be imported beside torchvision

MIB = 2**20
SHARE = 1.4  # of the weights' bytes: a whole model needs 2 for weights and gradients
NUM_STEPS = 3


def main() -> None:
    """Write the weights, then run both cases."""
    if "RANK" in os.environ or len(sys.argv) > 1:
        train(Path(sys.argv[1]))
        return
    with TemporaryDirectory() as folder:
        size = write_weights(Path(folder))
        print(
            f"a Llama of {size / MIB:.0f} MiB, limit {SHARE * size / MIB:.0f} MiB for each process"
        )
        two = [sys.executable, "-m", "stageline", "run", "--num-processes", "2", __file__, folder]
        one = [sys.executable, __file__, folder]
        found = {}
        for name, command in (("two processes", two), ("one process", one)):
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=900, check=False
            )
            lines = (ended.stdout + ended.stderr).strip().splitlines()
            reasons = [line.strip() for line in lines if "memory" in line][-1:]
            found[name] = ended.returncode == 0, bool(reasons)
            shown = lines if ended.returncode == 0 else reasons or lines[-1:]
            Console().print(
                f"{name}: exit code {ended.returncode}", *shown, sep="\n  ", soft_wrap=True
            )
    if not found["two processes"][0] or found["one process"] != (False, True):
        sys.exit("two processes should have trained, and one should have run out of memory")


def model_on_meta() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  both cases import it

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        model: torch.nn.Module = LlamaForCausalLM(config)
    return model


def write_weights(folder: Path) -> int:
    """Write random weights, one shard for about a tenth of them; return their bytes."""
    torch.manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in model_on_meta().state_dict().items()}
    names = list(shapes)
    parts = [names[start : start + 15] for start in range(0, len(names), 15)]
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file({name: torch.randn(shapes[name]) * 0.02 for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    total = 4 * sum(int(shape.numel()) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def train(folder: Path) -> None:
    """Train a few steps within the limit; on one rank, or one for each process."""
    import stageline as sl  # noqa: PLC0415

    torch.set_num_threads(1)
    model = model_on_meta()
    total = sum(4 * tensor.numel() for tensor in model.state_dict().values())
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    _limit_memory(int(SHARE * total))
    ids = torch.randint(0, 8000, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    pipe = sl.Pipeline(model, example_inputs=batch, num_ranks=num_ranks, num_microbatches=4)
    sl.load_pretrained(pipe, folder)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(f"{float(pipe.step(batch).loss):.4f}")
        optimizer.step()
        optimizer.zero_grad()
    own = sum(4 * parameter.numel() for parameter in pipe.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}: {own / MIB:.0f} MiB of weights, losses {losses}, peak {peak:.0f} MiB")


def _limit_memory(num_bytes: int) -> None:
    """Let this process allocate no more than this, on top of what it has."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = 1024 * used + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
