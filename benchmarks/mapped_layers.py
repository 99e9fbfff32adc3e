"""Are frozen layers on disk read as fast by the system's page faults as by threads? Under a limit of half their bytes.

    python benchmarks/mapped_layers.py [--layers 24] [--width 4096] [--tokens 64] [--rounds 3] [--folder DIR]
                                       [--json FILE] [--check]

Writes layers of ``width * width`` numbers in fp32 as a streamed stage does, into files mapped into memory, in a process whose
control group may hold half of them (root is needed). Then passes go forward and back through all layers, each way in turn,
``--rounds`` times. In place, as a rank that computes in host memory: by page faults alone (ours), or the next layer's file is read
by a thread, or by the system on ``MADV_WILLNEED``. Into a device's slots, as a GPU: by threads into buffers, two layers ahead
(ours), or by a thread that copies from the mapping, one ahead. Medians over rounds; the ratio is that of times to ours.
``--check`` exits 1 where another way takes less than 1 / 1.2 of ours.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from harness import parser_of  # noqa: E402
from memory_limit import limited_group  # noqa: E402

from hetero_mpi.device.backend import Backend, Copying  # noqa: E402
from hetero_mpi.model.host_weights import HostLayer, ReadAhead  # noqa: E402
from hetero_mpi.util.background import Background, start_unattended  # noqa: E402

BAR = 1.2
OURS = {"in place": "faults", "to a device": "buffers"}
"""Kind of way -> the one that the program takes."""
PIECE_BYTES = 4 << 20
BESIDE_BYTES = 150_000_000
"""What the group may hold beside files, slots and buffers."""
Pass = Callable[[Sequence[int]], Iterator[torch.Tensor]]


def main() -> int:
    parser = parser_of(__doc__, layers=4, width=512, rounds=1)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk (default %(default)s)")
    parser.add_argument("--inside", type=Path, help="(the process in this control group)")
    arguments = parser.parse_args()
    if arguments.inside is not None:
        (arguments.inside / "cgroup.procs").write_text("0")
        sizes = (arguments.layers, arguments.width, arguments.tokens, arguments.rounds)
        print(json.dumps(_seconds(arguments.folder, *sizes)))
        return 0
    layer_bytes = 4 * arguments.width**2
    with limited_group(layer_bytes * arguments.layers // 2 + 4 * layer_bytes + BESIDE_BYTES) as group:
        sizes = [f"--{name}={getattr(arguments, name)}" for name in ("folder", "layers", "width", "tokens", "rounds")]
        command = [sys.executable, __file__, *sizes, "--inside", str(group)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    ratios = []
    for kind, seconds in rows.items():
        best = {way: median(each) for way, each in seconds.items()}
        for way, each in seconds.items():
            ratio = median(other / own for other, own in zip(each, seconds[OURS[kind]], strict=True))
            print(f"{kind}, {way}: {best[way]:.2f} s a pass, {ratio:.2f} of ours")
            ratios.append(ratio)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(arguments.check and min(ratios) < 1 / BAR)


def _seconds(place: Path, layers: int, width: int, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Kind -> way -> seconds of a pass in each round."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        stored = {i: HostLayer([_linear(width)], Backend(), Path(folder)) for i in range(layers)}
        ways = {"in place": _in_place(stored), "to a device": _to_device(stored)}
        found: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in each} for kind, each in ways.items()}
        x, sums = torch.randn(tokens, width), set()
        for _ in range(rounds):
            for kind, each in ways.items():
                for way, weights in each.items():
                    for order in (range(layers), range(layers)[::-1]):  # the first finds what another way has left
                        begin, y = time.perf_counter(), x
                        for weight in weights(order):
                            y = torch.nn.functional.normalize(y @ weight.view(torch.float32).view(width, width))
                        took_s = time.perf_counter() - begin
                    found[kind][way].append(took_s)
                    sums.add(float(y.sum()))
        assert len(sums) == 1, "all ways compute with the same bits"
    return found


def _linear(width: int) -> torch.nn.Module:
    return torch.nn.Linear(width, width, bias=False).requires_grad_(False)


def _in_place(layers: dict[int, HostLayer]) -> dict[str, Pass]:
    """The weights lie in the mapped files; what differs is how the next layer's file comes into memory."""

    def passing(prepare: Callable[[HostLayer], None]) -> Pass:
        def run(order: Sequence[int]) -> Iterator[torch.Tensor]:
            for place, layer in enumerate(order):
                if place + 1 < len(order):
                    prepare(layers[order[place + 1]])
                yield layers[layer].block

        return run

    def advise(layer: HostLayer) -> None:
        assert layer._file is not None
        layer._file.madvise(mmap.MADV_WILLNEED)

    def read(layer: HostLayer) -> None:
        at = 0
        while data := os.pread(layer._descriptor, PIECE_BYTES, at):
            at += len(data)

    def read_ahead(layer: HostLayer) -> None:
        start_unattended("reading a layer", lambda: read(layer))

    return {"faults": passing(lambda _: None), "thread": passing(read_ahead), "MADV_WILLNEED": passing(advise)}


def _to_device(layers: dict[int, HostLayer]) -> dict[str, Pass]:
    """Each layer is copied into one of two slots, the next one while the one before computes."""
    size = max(layer.bytes for layer in layers.values())
    slots = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    reading = ReadAhead(layers, Backend())

    def by_buffers(order: Sequence[int]) -> Iterator[torch.Tensor]:
        begun = reading.copy(order[0], slots[0], Copying())
        for place, _ in enumerate(order):
            begun()
            if place + 1 < len(order):
                begun = reading.copy(order[place + 1], slots[(place + 1) % 2], Copying())
                for layer in order[place + 2 :]:
                    reading.start_read(layer)
            yield slots[place % 2]

    def by_mapping(order: Sequence[int]) -> Iterator[torch.Tensor]:
        def begin(place: int) -> Background[torch.Tensor]:
            return Background("copying a layer", lambda: slots[place % 2].copy_(layers[order[place]].block))

        copying = begin(0)
        for place, _ in enumerate(order):
            copying.finish()
            if place + 1 < len(order):
                copying = begin(place + 1)
            yield slots[place % 2]

    return {"buffers": by_buffers, "mapping": by_mapping}


if __name__ == "__main__":
    sys.exit(main())
