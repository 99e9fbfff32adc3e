"""One contender of ``peers.py`` that is not hetero_mpi: one plain process, DistributedDataParallel, or a schedule of
torch.distributed.pipelining, the latter two over gloo.

    python benchmarks/peers_worker.py JOB.toml plain STEPS
    torchrun --nproc-per-node 2 benchmarks/peers_worker.py JOB.toml DistributedDataParallel STEPS
    torchrun --nproc-per-node 2 benchmarks/peers_worker.py JOB.toml ScheduleZBVZeroBubble STEPS

Same model, start weights, data, optimizer and learning rate as the job; prints one JSON line: seconds and loss of every step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hetero_mpi.job.load import load_job  # noqa: E402
from hetero_mpi.job.schema import JobConfig  # noqa: E402
from hetero_mpi.model.optimizer import learning_rate  # noqa: E402
from hetero_mpi.training.setup.data_setup import Material, prepare  # noqa: E402

SINGLE = {"Schedule1F1B": pipelining.Schedule1F1B, "ScheduleGPipe": pipelining.ScheduleGPipe}
LOOPED = {
    "ScheduleInterleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "ScheduleInterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ScheduleLoopedBFS": pipelining.ScheduleLoopedBFS,
}
V_SHAPED = {"ScheduleZBVZeroBubble": ScheduleZBVZeroBubble, "ScheduleDualPipeV": ScheduleDualPipeV}
KINDS: dict[str, Any] = {**SINGLE, **LOOPED, **V_SHAPED}
Gradients = Callable[[torch.Tensor, torch.Tensor], float]
"""Tokens and targets of a step -> this rank's share of the loss; the gradients are then in the parameters."""


class Part(nn.Module):
    """Consecutive layers of a Llama, with the embedding on the first part and norm + head on the last."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        base, blocks = model.model, len(model.model.layers)
        self.embedding = base.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(base.layers[first:last])
        self.norm, self.head = (base.norm, model.lm_head) if last == blocks else (None, None)
        self.rotary = base.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        return self.head(self.norm(x)) if self.head is not None else x


def main() -> int:
    path, contender, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    loaded = load_job(path)
    job, material = loaded.job, prepare(loaded)
    model = AutoModelForCausalLM.from_pretrained(loaded.resolve(str(job.model.path)), dtype=torch.float32)
    model.train()
    if contender != "plain":
        dist.init_process_group("gloo")
    if contender in KINDS:
        named, gradients = pipelined(model, job, contender)
    else:
        named, gradients = replicated(model, job)
    result = stepped(material, job, steps, named, gradients)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def stepped(
    material: Material, job: JobConfig, steps: int, named: list[tuple[str, nn.Parameter]], gradients: Gradients
) -> dict[str, list[float]]:
    """Seconds and loss of every step, each from a barrier to a barrier where there are several ranks."""
    optimizer = optimizer_of(named, job)
    seconds, losses = [], []
    for step in range(steps):
        together()
        start = time.perf_counter()
        batch = material.dataset.batch(step, job.train.global_batch)
        optimizer.zero_grad()
        own = gradients(torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.targets).long())
        update(optimizer, learning_rate(job.train, step))
        together()
        seconds.append(time.perf_counter() - start)
        total = torch.tensor([own], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(float(total))
    return {"seconds": seconds, "losses": losses}


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def optimizer_of(parameters: list[tuple[str, nn.Parameter]], job: JobConfig) -> torch.optim.AdamW:
    """The job's AdamW, fused as ours is. Of a Llama, matrices decay and norms do not."""
    train = job.train
    groups = [
        {"params": [p for _, p in parameters if (p.ndim > 1) is decay], "weight_decay": train.weight_decay * decay}
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.epsilon, fused=True
    )


def replicated(model: Any, job: JobConfig) -> tuple[list[tuple[str, nn.Parameter]], Gradients]:
    """The whole model, with gradient accumulation over the micro-batches: in one process, or on ranks with equal shares of the
    batch, whose gradients DistributedDataParallel sums beside the last backward."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    named = list(model.named_parameters())
    parallel = DistributedDataParallel(model) if dist.is_initialized() else None
    rows, share = int(job.train.micro_batch), job.train.global_batch // size
    # DistributedDataParallel takes the mean over the ranks; the loss is a sum over all rows.
    scale = size / (job.train.global_batch * job.data.sequence_length)

    def gradients(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        total = 0.0
        for first in range(rank * share, (rank + 1) * share, rows):
            last = first + rows == (rank + 1) * share
            with parallel.no_sync() if parallel is not None and not last else nullcontext():
                logits = (parallel or model)(input_ids=tokens[first : first + rows], use_cache=False).logits
                loss = summed_loss(logits, targets[first : first + rows]) * scale
                loss.backward()
            total += loss.item() / size
        return total

    return named, gradients


def pipelined(model: Any, job: JobConfig, contender: str) -> tuple[list[tuple[str, nn.Parameter]], Gradients]:
    """This rank's part of a schedule of torch's; the rank with the head has the losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size if contender in SINGLE else 2 * size
    blocks = len(model.model.layers)
    edges = [i * blocks // count for i in range(count + 1)]
    mine = [i for i in range(count) if i % size == rank]
    if contender in V_SHAPED:
        mine = [rank, count - 1 - rank]
    parts = {i: Part(model, edges[i], edges[i + 1]) for i in mine}
    stages = [pipelining.PipelineStage(parts[i], i, count, torch.device("cpu")) for i in mine]
    micro_batches = job.train.global_batch // int(job.train.micro_batch)
    tokens_of_step = job.train.global_batch * job.data.sequence_length

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return summed_loss(logits, targets) / tokens_of_step

    schedule = KINDS[contender](
        stages[0] if contender in SINGLE else stages, micro_batches, loss_fn=loss_of, scale_grads=False
    )

    def gradients(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        arguments = (tokens,) if 0 in parts else ()
        if count - 1 in parts:
            schedule.step(*arguments, target=targets, losses=losses)
        else:
            schedule.step(*arguments)
        return sum(float(loss) for loss in losses)

    return [(n, p) for part in parts.values() for n, p in part.named_parameters()], gradients


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def update(optimizer: torch.optim.AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
