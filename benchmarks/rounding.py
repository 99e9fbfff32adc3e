"""How does rounding grow from step to step? Plans of one rank that add in another order, against the batch at once.

    python benchmarks/rounding.py [--json FILE] [--check]

A small model, dense or a mixture of experts, takes six steps in one process: micro-batches of all 8 sequences at once; in slices of
one sequence; and micro-batches of 2. Printed are the largest relative differences of the gradient norm of the first update, which
begins from equal state, and of the loss of steps 1, 3 and 6; for how many of 128 tokens in four layers and six steps routers choose
other experts; and how many steps all three skip. "Products in fp32": torch's Newton-Schulz iteration in fp32, not bf16. ``--check``
exits 1 where the first update differs by 1e-6 in fp32.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness import parser_of  # noqa: E402

from hetero_mpi.data.batch import Batch  # noqa: E402
from hetero_mpi.job.training_tables import TrainTable  # noqa: E402
from hetero_mpi.model.adapters.adapter_tuning import with_moments  # noqa: E402
from hetero_mpi.model.layer.quantize import fused_experts  # noqa: E402
from hetero_mpi.model.transformers.chain import TransformersChain  # noqa: E402
from hetero_mpi.model.transformers.families import read_config  # noqa: E402
from hetero_mpi.model.tuning import full_training  # noqa: E402
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan  # noqa: E402
from tests.support.family_configs import tiny_keys  # noqa: E402
from tests.support.ranks import Threads  # noqa: E402
from tests.support.training_cases import Case  # noqa: E402

BATCH, LENGTH, STEPS, TOLD, BAR = 8, 16, 6, (1, 3, 6), 1e-6
WAYS = ((8, None), (8, 1), (2, None))
"""(sequences of a micro-batch, of a slice): the first one is what the others are compared with."""
FAMILIES = ("llama", "qwen3", "mixtral", "qwen3_moe")
METHODS = {
    "AdamW, fp32": ("adamw", "fp32"),
    "Muon, fp32": ("muon", "fp32"),
    "Muon, fp32, products in fp32": ("muon", "fp32"),
    "AdamW, bf16": ("adamw", "bf16"),
    "AdamW, fp16": ("adamw", "fp16"),
}
Choices = dict[tuple[int, int], torch.Tensor]
"""(step, layer with experts) -> the experts of each token."""


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = [compared(family, method) for method in METHODS for family in FAMILIES]
    steps = " | ".join(f"loss, step {step}" for step in TOLD)
    print(
        f"| method | model | gradient norm, first update | {steps} | rerouted tokens | skipped steps |\n|{' --- |' * 8}"
    )
    for row in rows:
        told = (row[key] for key in ("norm", *(f"loss {step}" for step in TOLD)))
        figures = (f"{value:.0e}".replace("e-0", "e-").replace("0e+00", "0") for value in told)
        print(f"| {row['method']} | {row['family']} | {' | '.join(figures)} | {row['choices']} | {row['skipped']} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    exact = [max(float(row["loss 1"]), float(row["norm"])) for row in rows if "16" not in str(row["method"])]
    return int(arguments.check and max(exact) > BAR)


def compared(family: str, method: str) -> dict[str, float | str]:
    """A row of the table: the largest difference that any way makes."""
    products = wide_newton_schulz if "products" in method else torch.optim._muon._zeropower_via_newtonschulz
    with patch("torch.optim._muon._zeropower_via_newtonschulz", products):
        (losses, norms, choices), *others = [steps_taken(family, *METHODS[method], *way) for way in WAYS]
    found: dict[str, float | str] = {"method": method, "family": family, "skipped": int(np.isnan(norms).sum())}
    assert all(np.array_equal(np.isnan(other[1]), np.isnan(norms)) for other in others), "plans skip unlike steps"
    for step in TOLD:
        found[f"loss {step}"] = max(float(abs(other[0][step - 1] / losses[step - 1] - 1)) for other in others)
    found["norm"] = max(float(abs(other[1] / norms - 1)[~np.isnan(norms)][0]) for other in others)
    found["choices"] = max(
        sum(int((other[2][place] != chosen).any(-1).sum()) for place, chosen in choices.items()) for other in others
    )
    return found


def steps_taken(
    family: str, optimizer: str, dtype: str, micro_batch: int, sliced: int | None
) -> tuple[np.ndarray, np.ndarray, Choices]:
    """Loss and gradient norm (not a number: a skipped step) of each step, and the routers' choices."""
    config = Case("", family, False, 0.0, True, micro_batch, "even").config
    chain = TransformersChain(read_config({**(tiny_keys(family) if "moe" in family else {}), **config}))
    stage = StagePlan((0,), 0, chain.layer_count, 0, slice_sequences=sliced)
    plan = Plan((PipelinePlan((stage,), micro_batch, BATCH),), BATCH, LENGTH, chain.layer_count)
    train = TrainTable(
        steps=STEPS,
        global_batch=BATCH,
        learning_rate=3e-3,
        schedule="constant",
        dtype=dtype,  # type: ignore[arg-type]
        clip_norm=0.5,
        optimizer=optimizer,  # type: ignore[arg-type]
    )
    (trainer,) = Threads(chain, plan, train, with_moments(full_training(chain), chain, optimizer)).trainers
    parts, step = defaultdict[tuple[int, int], list[torch.Tensor]](list), 0
    for layer, experts in enumerate(dict.fromkeys(holder for _, holder, *_ in fused_experts(trainer.stages[0].model))):
        experts.register_forward_pre_hook(lambda _, given, layer=layer: parts[step, layer].append(given[1].clone()))
    decisions = []
    for step in range(STEPS):
        tokens = np.random.default_rng(step).integers(0, chain.config.vocab_size, (BATCH, LENGTH + 1), np.int32)
        inputs, targets = (np.ascontiguousarray(part) for part in (tokens[:, :-1], tokens[:, 1:]))
        decisions.append(trainer.step(step, Batch(inputs, targets, targets.size)).decision)
    norms = [one.grad_norm if one.finite else np.nan for one in decisions]
    choices = {place: torch.cat(chosen).sort(-1).values for place, chosen in parts.items()}
    return np.array([one.loss for one in decisions]), np.array(norms), choices


def wide_newton_schulz(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, least: float
) -> torch.Tensor:
    """torch's ``_zeropower_via_newtonschulz`` in the gradient's dtype."""
    (a, b, c), turned = coefficients, gradient.shape[0] > gradient.shape[1]
    x = gradient.T if turned else gradient
    x = x / x.norm().clamp(min=least)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if turned else x


if __name__ == "__main__":
    sys.exit(main())
