"""What is not imported: a rank starts in two thirds of the time that way, and the light commands answer at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = """
import contextlib, sys
from hetero_mpi.cli import main

def unwanted(*names):
    return sorted(set(names) & set(sys.modules))

with contextlib.suppress(SystemExit):
    main(["--help"])
found = unwanted("numpy", "pydantic", "psutil", "hetero_mpi.launch.launcher.launcher", "hetero_mpi.launch.supervisor.elastic")
assert not found, found
profile = "homelab-m4max-2titanx"
assert main(["plan", "--profile", profile]) == main(["inspect", profile, "-o", sys.argv[1] + "/picture.svg"]) == 0
found = unwanted("torch", "transformers", "mpi4py", "h5py", "huggingface_hub", "tokenizers", "safetensors", "psutil")
assert not found, found
"""

RANK = """
import sys
from hetero_mpi.model.eager_imports import eager_imports

with eager_imports():
    import hetero_mpi.training.training_run

import torch
from transformers import LlamaConfig
from hetero_mpi.model.transformers.chain import build_on_meta

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = build_on_meta(LlamaConfig(**sizes)).to_empty(device="cpu")
adamw = torch.optim.AdamW(model.parameters())
model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
adamw.step()
from torch.utils.checkpoint import checkpoint
checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
unused = {"torch._dynamo.eval_frame", "torch.distributed.tensor", "torch._inductor", "peft", "bitsandbytes", "matplotlib"}
planner = {"hetero_mpi.planning.decision.planner", "hetero_mpi.planning.decision.decide", "hetero_mpi.launch.supervisor.elastic"}
found = sorted((unused | planner) & set(sys.modules))
assert not found, found

from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning

adapter_tuning(TransformersChain(model.config), AdapterTable(method="lora"), False, True)
assert {"peft", "bitsandbytes"} < set(sys.modules)
assert not {"torch._dynamo.eval_frame", "torch.distributed.tensor"} & set(sys.modules)
assert torch.distributed.is_available()
double = torch.compile(lambda tensor: 2 * tensor, backend="eager")  # as a user's own layers may
assert "torch._dynamo.eval_frame" not in sys.modules
assert double(torch.ones(2)).tolist() == double(torch.ones(2)).tolist() == [2.0, 2.0]
@torch.compile(backend="eager")
def half(tensor):
    return tensor / 2
assert half(torch.ones(2)).tolist() == [0.5, 0.5]
assert type(torch.compile(torch.nn.Linear(1, 1), backend="eager")).__name__ == "OptimizedModule"
from torch._dynamo.eval_frame import OptimizedModule
assert sys.modules["torch._dynamo"].config.cache_size_limit > 0
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_light_commands_import_nothing_of_the_ranks(tmp_path: Path) -> None:
    run(LIGHT, str(tmp_path))


@pytest.mark.slow
def test_a_rank_imports_nothing_that_it_does_not_use_and_can_still_compile() -> None:
    run(RANK)
