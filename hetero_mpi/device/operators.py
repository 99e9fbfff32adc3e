"""``python -m hetero_mpi.device.operators cuda 1`` compares six operators on a device with fp64 on the CPU.

It also checks copies to the device and back. ``self_test`` runs it as a subprocess, because a driver or a kernel may crash the
process. A run only calls ``product_on`` when it starts.
"""

import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_mpi.comm.ranks.versions import installed
from hetero_mpi.device.accelerators import BACKENDS
from hetero_mpi.device.backend import DTYPES, HOST, Backend, Copied
from hetero_mpi.device.self_test import MARK, OPENING, Result
from hetero_mpi.device.shortage import is_out_of_memory
from hetero_mpi.util.background import start_unattended

ALLOWED = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""Maximum difference from the CPU's result relative to its norm: several times the rounding error, far below a wrong result."""
_TOKENS, _WIDTH, _INNER = 192, 256, 512
"""The number of tokens is 64 modulo 128, for which cuDNN's masked attention produced NaN gradients (pytorch#196678)."""
_HEADS, _GROUPS, _HEAD_WIDTH = 4, 2, 64
_COPY_BYTES, _COPIES = 64 << 20, 5
Compared = Iterator[tuple[str, Tensor, Tensor]]
"""Yields the name of a tensor, the device's tensor and the expected tensor (fp64, on the host)."""
Operator = Callable[[Backend, torch.dtype], Compared]


_GENERATOR = torch.Generator()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_GENERATOR)


def _output_and_gradients(
    backend: Backend, leaves: Mapping[str, Tensor], function: Callable[..., Tensor], exact: Callable[..., Tensor]
) -> Compared:
    """Yield the output and gradients of ``function`` on the device, and of ``exact`` in fp64, for comparison."""
    sides = []
    for values, compute in (
        ([backend.from_host(leaf.clone()) for leaf in leaves.values()], function),
        ([leaf.double() for leaf in leaves.values()], exact),
    ):
        arguments = [value.requires_grad_() for value in values]
        output = compute(*arguments)
        _GENERATOR.manual_seed(1)
        gradient = _random(*output.shape).to(next(iter(leaves.values())).dtype)
        output.backward(gradient.to(output.device, output.dtype))
        sides.append([output, *(argument.grad for argument in arguments)])
    names = ["output", *(f"gradient of {name}" for name in leaves)]
    for name, actual, expected in zip(names, *sides, strict=True):
        assert actual is not None and expected is not None
        yield name, actual, expected


def _product(backend: Backend, dtype: torch.dtype) -> Compared:
    leaves = {"inputs": _random(_TOKENS, _WIDTH).to(dtype), "weights": _random(_INNER, _WIDTH).to(dtype)}
    yield from _output_and_gradients(backend, leaves, F.linear, F.linear)


def _loss(backend: Backend, dtype: torch.dtype) -> Compared:
    """Compare cross-entropy. The loss is summed, because the gradients of a mean are too small for fp16."""

    def summed(logits: Tensor) -> Tensor:
        targets = torch.arange(_TOKENS, device=logits.device) * 7 % _INNER
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide, targets, reduction="sum")

    yield from _output_and_gradients(backend, {"logits": _random(_TOKENS, _INNER).to(dtype)}, summed, summed)


def _attention(masked: bool, backend: Backend, dtype: torch.dtype) -> Compared:
    """Compare attention (causal or sliding-window), also with logits near -120, where some kernels produce NaN gradients."""
    mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
    if masked:
        mask &= ~mask.tril(-_TOKENS // 2)
    device_mask = backend.from_host(mask[None, None]) if masked else None
    repeats = masked or not backend.shares_keys(dtype)  # as in training

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(_HEADS // _GROUPS, 1)

    def on_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeated(k), repeated(v)) if repeats else (k, v)
        return F.scaled_dot_product_attention(q, k, v, device_mask, is_causal=not masked, enable_gqa=not repeats)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (q @ repeated(k).transpose(-1, -2) / math.sqrt(_HEAD_WIDTH)).masked_fill(~mask, -math.inf)
        return logits.softmax(-1) @ repeated(v)

    queries, keys, values = (_random(1, heads, _TOKENS, _HEAD_WIDTH) for heads in (_HEADS, _GROUPS, _GROUPS))
    leaves = {"queries": queries.to(dtype), "keys": keys.to(dtype), "values": values.to(dtype)}
    yield from _output_and_gradients(backend, leaves, on_device, exact)
    queries, keys = queries * 0.1, keys * 0.1
    queries[..., 0], keys[..., 0] = 1.0, -120 * math.sqrt(_HEAD_WIDTH)
    leaves |= {"queries": queries.to(dtype), "keys": keys.to(dtype)}
    for name, actual, _ in _output_and_gradients(backend, leaves, on_device, exact):
        # Rounding of values near -120 is not tested.
        yield f"{name}, logits of -120", torch.isfinite(actual).all().float(), torch.ones(())


def _adamw(backend: Backend, _: torch.dtype) -> Compared:
    start, gradients = _random(256, 64), [_random(256, 64) for _ in range(3)]
    sides = []
    for dtype, device, fused in ((torch.float32, backend.device, True), (torch.float64, HOST, False)):
        first = start.to(dtype)  # on the host, as a GPU may lack fp64
        weight = nn.Parameter(first.clone().to(device))
        adamw = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=fused, foreach=None if fused else False)
        for gradient in gradients:
            weight.grad = gradient.to(dtype).to(device)
            adamw.step()
        sides.append({"updates": weight.detach() - first.to(device), **adamw.state[weight]})
    for name in ("updates", "exp_avg", "exp_avg_sq"):
        yield name, sides[0][name], sides[1][name]


def _nf4(backend: Backend, dtype: torch.dtype) -> Compared:
    """Compare NF4 weights quantised on the host: dequantised, in products (forward, backward), and with one row (own kernel)."""
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = _random(_INNER, _WIDTH).to(dtype)
    packed, state = quantize_4bit(weights, blocksize=64, compress_statistics=True, quant_type="nf4")
    exact = dequantize_4bit(packed, state).double()
    state.to(backend.device)
    nf4 = backend.from_host(packed)
    yield "unpacked weights", dequantize_4bit(nf4, state), exact
    rows = _random(_TOKENS, _WIDTH).to(dtype)
    yield from _output_and_gradients(
        backend, {"inputs": rows}, lambda x: matmul_4bit(x, nf4.t(), quant_state=state), lambda x: x @ exact.T
    )
    with torch.no_grad():
        row_output = matmul_4bit(backend.from_host(rows[:1]), nf4.t(), quant_state=state)
    yield "output of one row", row_output, rows[:1].double() @ exact.T


def _checks(backend: Backend) -> dict[str, Callable[[Backend], Result]]:
    """Return the checks for all capabilities of the device, by name."""
    operators: dict[str, Operator] = {"product": _product, "loss": _loss}
    operators |= {"attention": partial(_attention, False), "masked attention": partial(_attention, True)}
    operators |= {"NF4 product": _nf4} if importlib.util.find_spec("bitsandbytes") is not None else {}
    checks: dict[str, Callable[[Backend], Result]] = {"AdamW": partial(_compare, "AdamW", _adamw, "fp32")}
    for dtype in (dtype for dtype in DTYPES if dtype in backend.dtypes()):
        for name, operator in operators.items():
            checks[f"{name} {dtype}"] = partial(_compare, f"{name} {dtype}", operator, dtype)
    return checks | ({"copies": copies} if backend.name != "cpu" else {})


def product_on(backend: Backend) -> Result:
    """Compare a matrix product on the device, forward and backward, with the CPU."""
    try:
        return _compare("product fp32", _product, "fp32", backend)
    except Exception as error:  # whatever a driver may say
        return _failed("product fp32", error)


def _compare(check: str, operator: Operator, dtype: str, backend: Backend) -> Result:
    _GENERATOR.manual_seed(0)
    begin, worst, what = time.perf_counter(), 0.0, ""
    for name, actual, expected in operator(backend, DTYPES[dtype]):
        expected = expected.detach().double()
        difference = float((backend.to_host(actual).double() - expected).norm() / expected.norm())
        if not difference <= worst:
            worst, what = difference, name
        if not math.isfinite(difference):
            break
    return Result(check, worst if math.isfinite(worst) else None, ALLOWED[dtype], what, time.perf_counter() - begin)


def copies(backend: Backend) -> Result:
    """Check that bytes survive a round trip to the device, and measure copy speeds by direction and kind of host memory."""
    begin = time.perf_counter()
    received, sent = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=backend.device) for _ in range(2))
    pinned = [backend.host_buffer((_COPY_BYTES,), torch.uint8) for _ in range(2)]
    pageable = [torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2)]
    pinned[0].copy_(torch.arange(_COPY_BYTES, dtype=torch.int32).to(torch.uint8))
    received.copy_(pinned[0])
    pinned[1].copy_(received)
    differ = float((pinned[0] != pinned[1]).sum())
    queues = [backend.copying(), backend.copying()]
    copies_by_kind: dict[str, Callable[[], list[Copied]]] = {}
    for kind, (source, target) in (("pinned", pinned), ("pageable", pageable)):
        copies_by_kind[f"to the device, {kind}"] = lambda source=source: [queues[0].copy(received, source)]  # type: ignore[misc]
        copies_by_kind[f"from the device, {kind}"] = lambda target=target: [queues[0].copy(target, sent)]  # type: ignore[misc]
    if queues[0].overlaps:
        both = lambda: [queues[0].copy(received, pinned[0]), queues[1].copy(pinned[1], sent)]  # noqa: E731
        copies_by_kind["both at once, pinned, each"] = both
    speeds = {}
    for name, copy in copies_by_kind.items():
        seconds = []
        for _ in range(_COPIES):
            backend.synchronize()
            start = time.perf_counter()
            for copied in copy():
                copied.wait()
            backend.synchronize()
            seconds.append(time.perf_counter() - start)
        speeds[name] = _COPY_BYTES / statistics.median(seconds)
    return Result("copies", differ, 0.0, "differing bytes", time.perf_counter() - begin, speeds=speeds)


def about(backend: Backend) -> dict[str, str]:
    """Describe the device and the software for a bug report, without host names and paths."""
    return {
        "device": backend.description(),
        "architecture": backend.architecture(),
        "memory": backend.memory().reason,
        "computes in": ", ".join(backend.dtypes()),
        "torch": torch.__version__,
        **{name: installed(name) for name in ("bitsandbytes", "transformers")},
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _print_marked(value: object) -> None:
    print(MARK + json.dumps(value), flush=True)


def _failed(check: str, error: Exception) -> Result:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Result(check, error=text, short=is_out_of_memory(error))


def main(name: str, index: str) -> int:
    warnings.simplefilter("ignore")
    start_unattended("waiting for the parent's end", _end_with_the_parent)
    try:
        backend = BACKENDS[name](int(index))
        backend.make_current()
        checks = _checks(backend)
        _print_marked({"about": about(backend), "checks": list(checks)})
    except Exception as error:
        checks = {}
        _print_marked(asdict(_failed(OPENING, error)))
    for check, compare in checks.items():
        try:
            _print_marked(asdict(compare(backend)))
        except Exception as error:  # whatever a driver may say
            _print_marked(asdict(_failed(check, error)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
