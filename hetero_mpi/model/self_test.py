"""``python -m hetero_mpi.model.self_test cuda 1``: does this device compute what the CPU computes in fp64?

A process of its own (``device/self_test_process.py`` starts it and says what the lines hold),
because a driver or a kernel may end the
process that meets it. What is compared is what training does: a small model forward and backward by ``Stage``, attention with and
without a mask, NF4 layers, AdamW; and copies between host memory and the device are timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hetero_mpi.background import Background
from hetero_mpi.comm.ranks.versions import installed
from hetero_mpi.device.accelerators import BACKENDS
from hetero_mpi.device.backend import DTYPES, HOST, Backend
from hetero_mpi.device.copying import Copied
from hetero_mpi.device.memory import is_out_of_memory
from hetero_mpi.device.self_test_process import MARK, NF4, OPENING, Result
from hetero_mpi.model.eager_imports import eager_imports

ALLOWED = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""Largest difference of a tensor from the CPU's, norm by norm: several times what rounding makes of it, far less than an error."""
_PACKED = 0.12
"""NF4 keeps about 0.09 of normally distributed weights' norm as rounding."""
_TOKENS, _HEADS, _GROUPS, _WIDTH = 192, 4, 2, 64
"""192 = 64 modulo 128, where cuDNN's masked attention gave gradients that are no numbers (pytorch#196678)."""
_CONFIG = {
    "model_type": "llama",
    "hidden_size": _HEADS * _WIDTH,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _GROUPS,
    "vocab_size": 512,
}
_COPY_BYTES, _COPIES = 64 << 20, 5
Compared = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
"""What it is, as the device has it, as it should be (fp64 or fp32, on the host)."""


@dataclass(frozen=True)
class _Check:
    name: str
    kind: str
    allowed: float
    compared: Callable[[Backend], Compared]


def checks_for(needs: Sequence[str]) -> list[_Check]:
    """The checks of what a job needs: dtypes, and ``NF4``."""
    found = [_Check("AdamW", "adamw", ALLOWED["fp32"], _adamw)]
    dtypes = [dtype for dtype in DTYPES if dtype in needs]
    for dtype in dtypes:
        allowed = ALLOWED[dtype]
        for masked, name in ((False, "attention"), (True, "masked attention")):
            compared = partial(_attention, dtype=DTYPES[dtype], masked=masked)
            found.append(_Check(f"{name} {dtype}", "attention", allowed, compared))
        found.append(_Check(f"model {dtype}", "model", allowed, partial(_model, dtype=dtype)))
    if NF4 in needs:
        found.append(_Check("NF4 weights", NF4, _PACKED, _nf4_weights))
        found += [_Check(f"NF4 layer {d}", NF4, ALLOWED[d], partial(_nf4_layer, dtype=DTYPES[d])) for d in dtypes]
    return found


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _adamw(backend: Backend) -> Compared:
    start, gradients = _random(256, 64), [_random(256, 64) for _ in range(3)]
    sides = []
    for dtype, device, fused in (
        (torch.float32, backend.device, backend.fused_optimizer()),
        (torch.float64, HOST, False),
    ):
        first = start.to(dtype)  # on the host: a GPU may know no fp64
        weight = nn.Parameter(first.clone().to(device))
        adamw = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=fused, foreach=None if fused else False)
        for gradient in gradients:
            weight.grad = gradient.to(dtype).to(device)
            adamw.step()
        sides.append({"updates": weight.detach() - first.to(device), **adamw.state[weight]})
    for name in ("updates", "exp_avg", "exp_avg_sq"):
        yield name, sides[0][name], sides[1][name]


def _model(backend: Backend, dtype: str) -> Compared:
    """Embedding, a block and a head: the loss, and the gradient of every parameter."""
    from hetero_mpi.model.stage import MicroBatch, Stage, StageSpec
    from hetero_mpi.model.transformers.chain import TransformersChain
    from hetero_mpi.model.transformers.families import read_config
    from hetero_mpi.model.transformers.weights import SeededStart

    chain = TransformersChain(read_config(dict(_CONFIG)))
    tokens, targets = torch.randint(0, int(_CONFIG["vocab_size"]), (2, 2, _TOKENS))  # type: ignore[call-overload]
    losses, stages = [], []
    for side, own in ((backend, dtype), (Backend(), "fp32")):
        stage = Stage(StageSpec(chain, 0, chain.layer_count, side, own), SeededStart(0))
        if side is not backend:
            stage.model.double()
        inputs = (side.from_host(tokens), side.from_host(targets))
        losses.append(stage.forward(MicroBatch(0, 0, 0, _TOKENS), *inputs))  # large enough a loss for fp16's gradients
        stage.backward(0)
        stages.append(stage)
    yield "loss", losses[0], losses[1]
    for name, parameter in stages[0].parameters.items():
        found, expected = parameter.grad, stages[1].parameters[name].grad
        assert found is not None and expected is not None
        yield f"gradient of {name}", found, expected


def _attention(backend: Backend, dtype: torch.dtype, masked: bool) -> Compared:
    """Output and gradients, causal by flag or by a mask (then of a window, as some families have); twice.

    The second time every logit lies about -120, as in some heads of trained models: gradients that are no numbers then.
    """
    for shift in (0.0, -120.0):
        query, gradient = _random(1, _HEADS, _TOKENS, _WIDTH), _random(1, _HEADS, _TOKENS, _WIDTH)
        key, value = _random(1, _GROUPS, _TOKENS, _WIDTH), _random(1, _GROUPS, _TOKENS, _WIDTH)
        if shift:
            query, key = query * 0.1, key * 0.1
            query[..., 0], key[..., 0] = 1.0, shift * math.sqrt(_WIDTH)
        leaves = [tensor.to(dtype) for tensor in (query, key, value)]
        mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
        if masked:
            mask &= ~mask.tril(-_TOKENS // 2)
        device = [backend.from_host(leaf.clone()).requires_grad_() for leaf in leaves]
        own = backend.from_host(mask[None, None]) if masked else None
        q, k, v = device
        if repeat := masked or not backend.shares_keys(dtype):  # as in training
            k, v = (tensor.repeat_interleave(_HEADS // _GROUPS, 1) for tensor in (k, v))
        output = F.scaled_dot_product_attention(q, k, v, own, is_causal=not masked, enable_gqa=not repeat)
        output.backward(backend.from_host(gradient.to(dtype)))
        exact = [leaf.double().requires_grad_() for leaf in leaves]
        wanted = _exact_attention(exact, mask)
        wanted.backward(gradient.to(dtype).double())
        names = ("gradient of queries", "gradient of keys", "gradient of values")
        pairs = [("output", output, wanted)]
        pairs += [(name, leaf.grad, e.grad) for name, leaf, e in zip(names, device, exact, strict=True)]  # type: ignore[misc]
        for name, found, expected in pairs:
            if not shift:
                yield name, found, expected
            else:  # how well -120 and a little is rounded is not at issue
                yield f"{name}, logits of {shift:g}", torch.isfinite(found).all().float(), torch.ones(())


def _exact_attention(leaves: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.repeat_interleave(_HEADS // tensor.shape[1], 1) for tensor in leaves)
    logits = (q @ k.transpose(-1, -2) / math.sqrt(_WIDTH)).masked_fill(~mask, -math.inf)
    return logits.softmax(-1) @ v


def _nf4_weights(backend: Backend) -> Compared:
    """Packed on the host, unpacked on the device."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from hetero_mpi.model.layer.quantize import BLOCK

    weights = _random(512, 256).float()
    packed, state = quantize_4bit(weights, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    state.to(backend.device)
    yield "unpacked weights", dequantize_4bit(backend.from_host(packed), state), weights


def _nf4_layer(backend: Backend, dtype: torch.dtype) -> Compared:
    """A layer as QLoRA holds it: forward, the gradient of its input, and forward of one row, which has a kernel of its own."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from hetero_mpi.model.layer.quantize import BLOCK, quantize

    layers = nn.Sequential(nn.Linear(256, 512, bias=False))
    weights = layers[0].weight.detach().to(dtype)
    packed, state = quantize_4bit(weights, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    exact = dequantize_4bit(packed, state).double()
    quantize(layers, backend.device, dtype, double=True)
    inputs, gradient = _random(_TOKENS, 256).to(dtype), _random(_TOKENS, 512).to(dtype)
    there = backend.from_host(inputs.clone()).requires_grad_()
    output = layers(there)
    output.backward(backend.from_host(gradient))
    assert there.grad is not None
    yield "output", output, inputs.double() @ exact.T
    yield "gradient of the input", there.grad, gradient.double() @ exact
    with torch.no_grad():
        yield "output of one row", layers(backend.from_host(inputs[:1])), inputs[:1].double() @ exact.T


def run_check(check: _Check, backend: Backend) -> Result:
    """Compare; what goes wrong is a result too."""
    torch.manual_seed(0)
    begin, worst, what = time.perf_counter(), 0.0, ""
    try:
        for name, found, expected in check.compared(backend):
            host, expected = backend.to_host(found).double(), expected.detach().double()
            difference = float((host - expected).norm() / expected.norm())
            if not difference <= worst:
                worst, what = difference, name
            if not math.isfinite(difference):
                break
    except Exception as error:  # whatever a driver may say
        return _failed(check.name, check.kind, error)
    number = worst if math.isfinite(worst) else None
    return Result(check.name, check.kind, number, check.allowed, what, time.perf_counter() - begin)


def _failed(check: str, kind: str, error: Exception) -> Result:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Result(check, kind, error=text, short=is_out_of_memory(error))


def copy_speeds(backend: Backend) -> tuple[Result, dict[str, float]]:
    """Are bytes the same after a way to the device and back? And bytes per second, by direction and kind of host memory."""
    begin, speeds = time.perf_counter(), {}
    there, back = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=backend.device) for _ in range(2))
    pinned = [backend.host_buffer((_COPY_BYTES,), torch.uint8) for _ in range(2)]
    pageable = [torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2)]
    pinned[0].copy_(torch.arange(_COPY_BYTES, dtype=torch.int32).to(torch.uint8))
    queues = [backend.copying(), backend.copying()]
    there.copy_(pinned[0])
    pinned[1].copy_(there)
    differ = float((pinned[0] != pinned[1]).sum())
    for kind, (source, target) in (("pinned", pinned), ("pageable", pageable)):
        speeds[f"to the device, {kind}"] = _speed(backend, lambda s=source: [queues[0].copy(there, s)])  # type: ignore[misc]
        speeds[f"from the device, {kind}"] = _speed(backend, lambda t=target: [queues[0].copy(t, back)])  # type: ignore[misc]
    if queues[0].beside:
        both = lambda: [queues[0].copy(there, pinned[0]), queues[1].copy(pinned[1], back)]  # noqa: E731
        speeds["both at once, pinned, each"] = _speed(backend, both)
    took_s = time.perf_counter() - begin
    return Result("copies", "copies", differ, 0.0, "bytes that differ", took_s), speeds


def _speed(backend: Backend, copies: Callable[[], list[Copied]]) -> float:
    seconds = []
    for _ in range(_COPIES):
        backend.synchronize()
        begin = time.perf_counter()
        for copied in copies():
            copied.wait()
        backend.synchronize()
        seconds.append(time.perf_counter() - begin)
    return _COPY_BYTES / statistics.median(seconds)


def about(backend: Backend) -> dict[str, str]:
    """What a reader of the results must know; no host's name and no path."""
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


def _tell(what: str, value: object) -> None:
    print(MARK + json.dumps([what, value]), flush=True)


def _run(backend: Backend, needs: Sequence[str], copies: bool) -> None:
    for check in checks_for(needs):
        _tell("begin", [check.name, check.kind])
        _tell("result", asdict(run_check(check, backend)))
    if copies:
        _tell("begin", ["copies", "copies"])
        try:
            result, speeds = copy_speeds(backend)
        except Exception as error:
            result, speeds = _failed("copies", "copies", error), {}
        _tell("result", asdict(result))
        _tell("speeds", speeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("index", type=int)
    parser.add_argument("--needs", help="dtypes and nf4, separated by commas; without: all of the device's, and copies")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    Background("waiting for the parent's end", _end_with_the_parent)
    try:
        with eager_imports():  # of all that the checks use
            import hetero_mpi.model.transformers.weights  # noqa: F401
        backend = BACKENDS[arguments.backend](arguments.index)
        backend.make_current()
        needs = arguments.needs.split(",") if arguments.needs else list(backend.dtypes())
        if not arguments.needs:
            needs += [NF4] if importlib.util.find_spec("bitsandbytes") else []
            _tell("about", about(backend))
    except Exception as error:
        _tell("result", asdict(_failed(OPENING, "start", error)))
    else:
        _run(backend, needs, not arguments.needs and backend.name != "cpu")
    _tell("begin", ["", ""])
    return 0


if __name__ == "__main__":
    sys.exit(main())
