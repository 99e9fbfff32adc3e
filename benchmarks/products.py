"""Products of narrow dtypes on a processor without units for them: torch's own beside ours in fp32, forward and backward.

    python benchmarks/products.py [--rounds 5] [--only NAME] [--json FILE]

``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/products.py``: as a processor with AVX2 only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.device import products  # noqa: E402
from hetero_mpi.device.backend import DTYPES  # noqa: E402

_Shapes = tuple[tuple[int, ...], ...]
_CASES: dict[str, tuple[Callable[..., torch.Tensor], _Shapes]] = {
    "linear layer, 256 x 1024 x 1024": (F.linear, ((256, 1024), (1024, 1024))),
    "head, 64 x 1024 x 16384": (F.linear, ((64, 1024), (16384, 1024))),
    "attention, 8 heads of 64, 256 tokens": (F.scaled_dot_product_attention, ((1, 8, 256, 64),) * 3),
    "convolution, 32 channels, 4 of 32 x 32": (F.conv2d, ((4, 32, 32, 32), (32, 32, 3, 3))),
}


def seconds(operation: Callable[..., torch.Tensor], shapes: _Shapes, dtype: str) -> float:
    """Of one forward and backward, after one that warms up."""
    operands = [torch.randn(shape).to(DTYPES[dtype]).requires_grad_() for shape in shapes]
    gradient = torch.ones_like(operation(*operands))
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        operation(*operands).backward(gradient)
        times.append(time.perf_counter() - begin)
    return times[-1]


def main() -> int:
    parser = parser_of(__doc__, rounds=1, only="convolution")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of the three")
    parser.add_argument("--only", default="", metavar="NAME", help="only products whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, tuple[float, ...]] = {}
    for dtype in ("bf16", "fp16"):
        products.widen_products(dtype)
        has = "has" if products.has_products(dtype) else "lacks"
        print(f"{dtype}: this processor {has} products; ms, median of {arguments.rounds}")
        for name, (operation, shapes) in _CASES.items():
            if arguments.only not in name:
                continue
            rounds: list[tuple[float, float, float]] = []
            for _ in range(arguments.rounds):
                products._widened.clear()
                plain, own = seconds(operation, shapes, "fp32"), seconds(operation, shapes, dtype)
                products._widened.add(DTYPES[dtype])
                rounds.append((plain, own, seconds(operation, shapes, dtype)))
            found[f"{name}, {dtype}"] = plain, own, ours = tuple(
                1e3 * statistics.median(column) for column in zip(*rounds, strict=True)
            )
            print(f"  {name}: fp32 {plain:.1f}, torch {own:.1f}, ours {ours:.1f} ({own / ours:.1f} times faster)")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
