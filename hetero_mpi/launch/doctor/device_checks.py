"""The checks of ``doctor`` about devices: which ones torch offers on each host, and why an installed GPU is not offered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetero_mpi import __version__
from hetero_mpi.device.self_test import SelfTest, text_of
from hetero_mpi.launch.doctor.diagnostics import Finding, found
from hetero_mpi.launch.doctor.host_facts import Examined, HostFacts, answered
from hetero_mpi.report import units

_VENDORS = (("nvidia", "cuda", "NVIDIA"), ("amdgpu", "rocm", "AMD"), ("intel", "xpu", "Intel"))
"""(kernel driver, backend, vendor)."""
_HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
LEAST_MEMORY_BYTES = 1_000_000_000


def check_devices(places: Sequence[Examined]) -> Iterator[Finding]:
    """The devices of each host; what is wrong with one, or why a vendor's GPUs are not offered though their driver is loaded."""
    for place, facts in answered(places):
        if "version" in facts.torch:
            yield found("devices", place.title, devices=_offered(facts))
            for kind, values in _odd(facts):
                yield found(kind, place.title, **values)
        elif "torch" not in facts.missing:
            error = facts.torch.get("error", "no answer")
            yield found("no torch", place.title, error=error, python=facts.python)


def _offered(facts: HostFacts) -> str:
    devices = facts.torch["devices"]
    gpus = [device for device in devices if device["backend"] != "cpu"]
    text = "; ".join(f"{_label(device)} {device['name']}, {device['memory']}" for device in gpus or devices)
    return text if gpus else f"{text}, {units.plural(facts.cores, 'core')}"


def _odd(facts: HostFacts) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind of finding, its values)."""
    offered = {device["backend"] for device in facts.torch["devices"]}
    for device, reason in facts.torch["errors"].items():
        if ":" in device:
            yield ("device full" if "memory" in reason else "device unused"), {"device": device, "reason": reason}
    container = "; in a container, pass the device through (--gpus all, or --device /dev/kfd --device /dev/dri)"
    for driver, backend, vendor in _VENDORS:
        loaded, built = facts.drivers.get(driver), backend in facts.torch["builds"]
        if backend in offered or not (loaded or built):
            continue
        said = facts.torch["errors"].get(backend, "")
        hiding = [f"{name}={facts.variables[name]!r}" for name in _HIDING[backend] if name in facts.variables]
        if not loaded:
            kind = "no driver"
        elif not built:
            kind = "other build"
        elif backend == "rocm" and facts.kfd == "closed":
            kind = "no permission"
        elif hiding:
            kind = "hidden"
        elif "driver" in said and ("old" in said or "insufficient" in said):
            kind = "old driver"
        else:
            kind, said = "GPU not started", f": {said}" if said else ""
        yield (
            kind,
            {
                "vendor": vendor,
                "loaded": loaded,
                "version": facts.torch["version"],
                "python": facts.python,
                "builds": ", ".join(facts.torch["builds"]) or "the CPU",
                "said": said,
                "hiding": ", ".join(hiding),
                "variable": hiding[0].partition("=")[0] if hiding else "",
                "container": container if facts.system.startswith("Linux") else "",
            },
        )
    if facts.system.startswith("Darwin") and facts.system.endswith("arm64") and "mps" not in offered:
        yield ("old macOS" if "mps" in facts.torch["builds"] else "no Metal"), {"python": facts.python}
    for device in facts.torch["devices"]:
        if device["backend"] != "cpu" and "bf16" not in device["dtypes"]:
            yield "no bf16", {"device": _label(device), "model": device["name"]}
        if device["memory_bytes"] < LEAST_MEMORY_BYTES:
            yield "little memory", {"device": _label(device), "free": units.size(device["memory_bytes"])}


def check_self_tests(places: Sequence[Examined]) -> Iterator[Finding]:
    """The results of the devices' self-tests, where they were asked for."""
    for place, facts in answered(places):
        for test in map(SelfTest.from_dict, facts.self_tests):
            name, problems = f"{test.label} {test.about.get('device', '')}".strip(), test.problems
            values = {"device": name, "checks": len(test.results), "failed": len(problems)}
            if problems:
                yield found("self-test fails", place.title, problem=problems[0], remedy=test.remedy(), **values)
            else:
                yield found("self-test", place.title, **values)


def self_test_lines(places: Sequence[Examined]) -> list[str]:
    """All results of the self-tests, without the names of hosts; empty where nothing was tested."""
    lines = []
    for _, facts in answered(places):
        drivers = {
            backend: f"{driver} {facts.drivers[driver]}" for driver, backend, _ in _VENDORS if driver in facts.drivers
        }
        for test in map(SelfTest.from_dict, facts.self_tests):
            lines += text_of(test, drivers.get(test.backend, ""))
    return ["", f"Self-test, to be pasted into an issue (hetero_mpi {__version__}):", *lines] if lines else []


def check_shares(places: Sequence[Examined]) -> Iterator[Finding]:
    """Ranks compared with GPUs: ranks without a GPU, GPUs without a rank, and requested devices that do not exist."""
    for place, facts in answered(places):
        devices = facts.torch.get("devices", [])
        if not devices:
            continue
        name, _, gpu = place.device.partition(":")
        kind = devices[0]["backend"] if name == "auto" else name
        gpus = sum(device["backend"] == kind for device in devices)
        values = {"kind": kind, "gpus": gpus, "ranks": place.ranks, "device": place.device, "python": facts.python}
        if not gpus or (gpu and int(gpu) >= gpus):
            offered = ", ".join(map(_label, devices))
            yield found("no such device", place.title, version=facts.torch["version"], offered=offered, **values)
        elif kind != "cpu" and not gpu and place.ranks > gpus:
            yield found("ranks on the CPU" if name == "auto" else "too many ranks", place.title, **values)
        elif kind != "cpu" and not gpu and 0 < place.ranks < gpus:
            yield found("idle GPUs", place.title, **values)


def _label(device: dict[str, Any]) -> str:
    return SelfTest(device["backend"], device["index"]).label
