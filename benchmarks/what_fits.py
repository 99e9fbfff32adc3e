"""What fits on which machines, with and without streaming, and how fast would it be? Plans for the devices of ``profiles/``.

    python benchmarks/what_fits.py [--alone] [--only NAME] [--jobs NAME ...] [--host-gib N] [--json FILE] [--check]

Every kind of device by itself, then the clusters of up to ``RANKS`` ranks (``--alone``: without these). A device computes other
shapes as fast as the ones of its profile, in operations per second; everything else follows by the rules of ``profile_parts``.
Sequences of 2048 tokens, 16 per step, in the dtype that the profile's times hold for. Hosts have 256 GiB, or what the profile says,
and a disk that reads ``DISK_PER_S``.
Tokens per second are predicted; ``-``: it does not fit; ``=``: the same plan as without streaming; ``d``: some layers are read from
the disk in every pass.
``--check`` exits 1 where a plan that fits without streaming gets another one that is not streamed, or is not 2 % faster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import profile_parts as parts  # noqa: E402
from harness import parser_of  # noqa: E402
from make_profiles import LLAMA_8B, LLAMA_70B  # noqa: E402
from moe_parts import QWEN3_235B, Mixture, Way, cost_of, times_of  # noqa: E402
from profile_parts import ADAM_TRAFFIC, GIB, PEAK_SHARE, Card, Shape, model_of, sheet_times, with_allocator  # noqa: E402

from hetero_mpi.planning.decision.decide import MIN_OFFLOAD_GAIN_RATIO  # noqa: E402
from hetero_mpi.planning.decision.planner import make_plan  # noqa: E402
from hetero_mpi.planning.types.plan import PlanReport  # noqa: E402
from hetero_mpi.planning.types.profile import ClusterProfile, DeviceProfile, HostProfile  # noqa: E402
from hetero_mpi.planning.types.request import PlanRequest  # noqa: E402
from hetero_mpi.planning.types.sizes import DTYPE_BYTES  # noqa: E402
from hetero_mpi.planning.types.toml_files import load_profile  # noqa: E402
from hetero_mpi.util.errors import UserError  # noqa: E402

SEQUENCE, BATCH, RANKS = 2048, 16, 3
HOST_GIB = 256.0
DISK_PER_S = 3e9
"""An NVMe disk on four lanes of PCIe 3.0 or more (assumed)."""
QWEN_14B = Shape(5120, 48, 13824, 152064, 1024)
QWEN_32B = Shape(5120, 64, 27648, 152064, 1024)
JOBS: dict[str, tuple[Shape | Mixture, bool]] = {
    "8B full": (LLAMA_8B, False),
    "14B full": (QWEN_14B, False),
    "32B full": (QWEN_32B, False),
    "32B NF4": (QWEN_32B, True),
    "70B NF4": (LLAMA_70B, True),
    "235B-A22B NF4": (QWEN3_235B, True),
}
"""Shape, and LoRA over NF4?"""
OTHERS = ("sailor", "hethub", "moe-")
"""Profiles that are left out: times of one narrow model in fp32, devices that are made up, and times of experts."""


@dataclass(frozen=True)
class Cell:
    resident: PlanReport | None
    planned: PlanReport | None
    """With streaming left to the planner."""

    @property
    def streams(self) -> bool:
        """Is some stage streamed?"""
        return self.planned is not None and any(stage.streamed for _, _, stage in self.planned.plan.numbered)

    @property
    def sound(self) -> bool:
        """Does what fits without streaming stay, or get clearly faster?"""
        if self.resident is None or self.planned is None:
            return self.resident is None and (self.planned is None or self.streams)
        if not self.streams:
            return self.planned.plan == self.resident.plan
        return self.planned.predicted_step_s < (1 - MIN_OFFLOAD_GAIN_RATIO) * self.resident.predicted_step_s

    def text(self) -> str:
        """Tokens per second without and with streaming."""
        without, planned = (_speed(report) for report in (self.resident, self.planned))
        files = any(stage.on_disk for _, _, stage in self.planned.plan.numbered) if self.planned is not None else False
        return f"{without} | {planned if self.streams or self.resident is None else '='}{' d' * files}"


def main() -> int:
    parser = parser_of(__doc__, alone=True, only="NVIDIA L4", jobs=["8B full"])
    parser.add_argument("--alone", action="store_true", help="devices by themselves only")
    parser.add_argument("--only", default="", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME", help="what is trained")
    parser.add_argument(
        "--host-gib", type=float, default=HOST_GIB, help="memory of a host of which the profile says none"
    )
    arguments = parser.parse_args()
    jobs = {name: JOBS[name] for name in arguments.jobs}
    rows: dict[str, dict[str, Cell]] = {}
    print("| tokens/s without, with streaming | " + " | ".join(f"{job} | " for job in jobs) + " |")
    print("| --- |" + " --- | --- |" * len(jobs))
    for name, profile in clusters(arguments.alone):
        if arguments.only not in name:
            continue
        rows[name] = {job: cell(profile, *shape, arguments.host_gib) for job, shape in jobs.items()}
        print(f"| {name} | " + " | ".join(one.text() for one in rows[name].values()) + " |", flush=True)
    unsound = [f"{name}, {job}" for name, row in rows.items() for job, one in row.items() if not one.sound]
    more = sum(one.resident is None and one.planned is not None for row in rows.values() for one in row.values())
    print(f"{more} more fit with streaming; changed without need: {', '.join(unsound) or 'none'}")
    if arguments.json:
        found = {name: {job: one.text() for job, one in row.items()} for name, row in rows.items()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(arguments.check and bool(unsound))


def clusters(alone: bool) -> Iterator[tuple[str, ClusterProfile]]:
    """Name -> what is looked at."""
    known = {path.stem: load_profile(path) for path in sorted((ROOT / "profiles").glob("*.toml"))}
    known = {name: profile for name, profile in known.items() if not name.startswith(OTHERS)}
    kinds = {device.name: (profile, device) for profile in known.values() for device in profile.devices}
    for kind, (profile, device) in sorted(kinds.items()):
        hosts = tuple(host for host in profile.hosts if host.name == device.host and device.shares_host_memory)
        yield kind, replace(profile, devices=(replace(device, rank=0),), links=(), host_links=(), hosts=hosts)
    for name, profile in {} if alone else known.items():
        if len(profile.devices) <= RANKS:
            yield f"{name} ({len(profile.devices)} ranks)", profile


def cell(profile: ClusterProfile, shape: Shape | Mixture, adapters: bool, host_gib: float = HOST_GIB) -> Cell:
    """The plans of a job on the cluster's devices. Of a mixture: LoRA on attention."""
    dtype = profile.model.dtype
    if isinstance(shape, Mixture):
        model = with_allocator(cost_of(shape, Way(True, False, dtype), SEQUENCE))
    else:
        model = with_allocator(model_of(shape, dtype, SEQUENCE, adapters))
    devices = tuple(_computing(device, profile, shape, adapters) for device in profile.devices)
    shared, hosts = {host.name: host for host in profile.hosts}, []
    for name in dict.fromkeys(device.host for device in devices):
        host = shared.get(name, HostProfile(name, 0, ""))
        if not host.memory_bytes:
            host = replace(host, memory_bytes=int(host_gib * GIB), memory_reason="assumed")
        hosts.append(replace(host, disk_bytes_per_s=DISK_PER_S))
    profile = replace(profile, model=model, devices=devices, hosts=tuple(hosts))
    return Cell(*(_plan(profile, how) for how in ("never", "auto")))


def _computing(device: DeviceProfile, profile: ClusterProfile, shape: Shape | Mixture, adapters: bool) -> DeviceProfile:
    """The device with times of ``shape``."""
    block = next(layer for layer in profile.model.layers if layer.kind == "block")
    width = block.boundary_bytes_per_token / DTYPE_BYTES[profile.model.dtype]
    forward = device.layers["block"].forward_s
    operations = 2.0 * block.parameters + 2.0 * profile.model.sequence_length * width
    memory_bytes_per_s = ADAM_TRAFFIC / device.optimizer_s_per_parameter
    traffic = parts.TRAFFIC if profile.model.trained_whole else parts.LORA_TRAFFIC
    moved = traffic * block.activation_bytes_per_token / (1 + parts.ALLOCATOR_SHARE)
    token_s = forward.seconds[-1] / forward.tokens[-1] - moved / memory_bytes_per_s
    card = Card(device.name, device.backend, 0.0, memory_bytes_per_s, operations / token_s / PEAK_SHARE)
    if isinstance(shape, Mixture):
        way = Way(True, False, profile.model.dtype)
        return replace(device, layers=times_of(card, shape, way, {"block"}, sequence=SEQUENCE))
    return replace(device, layers=sheet_times(card, shape, SEQUENCE, profile.model.dtype, adapters))


def _plan(profile: ClusterProfile, streaming: str) -> PlanReport | None:
    request = PlanRequest(
        BATCH,
        SEQUENCE,
        (1, 2, 4),
        max_pipelines=len(profile.devices),
        recompute_choices=(False, True),
        streaming=streaming,
    )
    try:
        return make_plan(profile, request)
    except UserError:
        return None


def _speed(report: PlanReport | None) -> str:
    return "-" if report is None else f"{BATCH * SEQUENCE / report.predicted_step_s:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
