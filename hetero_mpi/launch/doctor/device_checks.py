"""The checks of ``doctor`` about devices: which ones torch offers on each host, and why an installed GPU is not offered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetero_mpi import __version__, units
from hetero_mpi.device.self_test_process import SelfTest, text_of
from hetero_mpi.launch.doctor.probe import HostFacts
from hetero_mpi.launch.doctor.probe_client import Examined, answered
from hetero_mpi.launch.hosts.diagnostics import Finding, Severity

INSTALL = "choose the build at https://pytorch.org/get-started/locally and install it into {python}'s environment"
_VENDORS = (("nvidia", "cuda", "NVIDIA"), ("amdgpu", "rocm", "AMD"), ("intel", "xpu", "Intel"))
"""(kernel driver, backend, vendor)."""
_HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def check_devices(places: Sequence[Examined]) -> Iterator[Finding]:
    """A finding per host's devices, and one for each vendor whose driver is loaded but whose GPUs are not offered."""
    for place, facts in answered(places):
        if "version" not in facts.torch:
            if "torch" not in facts.missing:
                remedy = f"install torch anew there: {INSTALL.format(python=facts.python)}"
                text = f"torch cannot be imported: {facts.torch.get('error', 'no answer')}"
                yield Finding("torch", Severity.FAILS, text, remedy, (place.title,))
            continue
        yield _offered(place, facts)
        for device, reason in facts.torch["errors"].items():
            if ":" in device:
                remedy = "end what else uses it, or leave it out" if "memory" in reason else ""
                yield Finding("devices", Severity.SLOW, f"{device} is not used: {reason}", remedy, (place.title,))
        offered = {device["backend"] for device in facts.torch["devices"]}
        for driver, backend, vendor in _VENDORS:
            if backend not in offered:
                yield from _not_used(place, facts, driver, backend, vendor)
        yield from _apple(place, facts, offered)
        yield from _old(place, facts.torch["devices"])


def check_self_tests(places: Sequence[Examined]) -> Iterator[Finding]:
    """The results of the devices' self-tests, where they were asked for."""
    for place, facts in answered(places):
        for test in map(SelfTest.from_dict, facts.self_tests):
            name, problems = f"{test.label} {test.about.get('device', '')}".strip(), test.problems
            if problems:
                text = f"{name}: {len(problems)} of {len(test.results)} checks failed, {problems[0]}"
                yield Finding("self-test", Severity.FAILS, text, test.remedy(), (place.title,))
            else:
                text = f"{name}: in {len(test.results)} checks it computed what the CPU does in fp64"
                yield Finding("self-test", Severity.FINE, text, where=(place.title,))


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
        name, _, gpu = place.device.partition(":")
        kind = devices[0]["backend"] if devices and name == "auto" else name
        gpus, where = sum(device["backend"] == kind for device in devices), (place.title,)
        if not devices:
            continue
        if not gpus or (gpu and int(gpu) >= gpus):
            offered = ", ".join(map(_label, devices))
            text = f"device {place.device!r} is asked for, and torch {facts.torch['version']} offers {offered}"
            remedy = f'name one of these, or "auto"; for another vendor: {INSTALL.format(python=facts.python)}'
            yield Finding("devices", Severity.FAILS, text, remedy, where)
        elif kind == "cpu" or gpu or not place.ranks or gpus == place.ranks:
            continue
        elif place.ranks > gpus and name == "auto":
            text = f"{place.ranks} ranks for {gpus} of {kind}: those beyond compute on the CPU"
            yield Finding("devices", Severity.NOTE, text, f"slots = {gpus} would leave them out", where)
        elif place.ranks > gpus:
            text = f"{place.ranks} ranks for {gpus} of {kind}: those beyond have no device"
            yield Finding("devices", Severity.FAILS, text, f"write slots = {gpus}", where)
        else:
            text = f"{place.ranks} of {gpus} GPUs ({kind}) have a rank"
            yield Finding(
                "devices", Severity.NOTE, text, f"slots = {gpus} would use all: one rank drives one GPU", where
            )


def _label(device: dict[str, Any]) -> str:
    return SelfTest(device["backend"], device["index"]).label


def _offered(place: Examined, facts: HostFacts) -> Finding:
    gpus = [device for device in facts.torch["devices"] if device["backend"] != "cpu"]
    used = gpus or facts.torch["devices"]
    text = "; ".join(f"{_label(device)} {device['name']}, {device['memory']}" for device in used)
    if not gpus:
        text += f", {facts.cores} core{'' if facts.cores == 1 else 's'}"
    return Finding("devices", Severity.FINE, text, where=(place.title,))


def _not_used(place: Examined, facts: HostFacts, driver: str, backend: str, vendor: str) -> Iterator[Finding]:
    """Why a vendor's GPUs are not offered; nothing where the host has neither their driver nor a torch build for them."""
    loaded, built = facts.drivers.get(driver), backend in facts.torch["builds"]
    said = facts.torch["errors"].get(backend, "")
    if not loaded and not built:
        return
    where, version = (place.title,), facts.torch["version"]
    if not loaded:
        text = f"torch {version} is built for {vendor} GPUs, but no driver of {vendor} is loaded: the CPU computes"
        remedy = f"nothing, if there is no such GPU; else install {vendor}'s driver" + _container_hint(facts)
        yield Finding("devices", Severity.NOTE, text, remedy, where)
        return
    intro = f"{vendor}'s driver ({loaded}) is loaded, but "
    if not built:
        builds = ", ".join(facts.torch["builds"]) or "the CPU"
        remedy = f"to use the GPU: {INSTALL.format(python=facts.python)}"
        remedy += "\ntwo vendors in one box: an environment for each (docs/devices.md)"
        yield Finding("devices", Severity.NOTE, intro + f"torch {version} is built for {builds}", remedy, where)
        return
    hiding = [f"{name}={facts.variables[name]!r}" for name in _HIDING[backend] if name in facts.variables]
    if backend == "rocm" and facts.kfd == "closed":
        text, remedy = "this user may not open /dev/kfd", "sudo usermod -aG render,video $USER, then log in again"
    elif hiding:
        text, remedy = (
            f"{', '.join(hiding)} may hide the GPUs",
            f"unset {hiding[0].partition('=')[0]} there, or name an existing GPU",
        )
    elif "driver" in said and ("old" in said or "insufficient" in said):
        text = f"it is too old for torch {version}: {said}"
        remedy = "update the driver, or install a torch built for an older version: https://pytorch.org/get-started/previous-versions"
    else:
        text = f"torch {version} does not start it" + (f": {said}" if said else "")
        remedy = "restart the machine if the driver was updated; then compare driver and torch build" + _container_hint(
            facts
        )
    yield Finding("devices", Severity.SLOW, intro + text, remedy, where)


def _container_hint(facts: HostFacts) -> str:
    if not facts.system.startswith("Linux"):
        return ""
    return "; in a container, pass the device through (--gpus all, or --device /dev/kfd --device /dev/dri)"


def _apple(place: Examined, facts: HostFacts, offered: set[str]) -> Iterator[Finding]:
    if facts.system.startswith("Darwin") and facts.system.endswith("arm64") and "mps" not in offered:
        built = "mps" in facts.torch["builds"]
        text = "the GPU of this Mac is not offered: " + (
            "macOS is too old for it" if built else "torch was built without Metal"
        )
        remedy = "update macOS to 14 or later" if built else INSTALL.format(python=facts.python)
        yield Finding("devices", Severity.SLOW, text, remedy, (place.title,))


def _old(place: Examined, devices: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for device in devices:
        if device["backend"] != "cpu" and "bf16" not in device["dtypes"]:
            text = f"{_label(device)} {device['name']} does not compute in bf16"
            remedy = 'with dtype = "auto" the whole job then computes in fp16 with loss scaling; leave the GPU out to keep bf16'
            yield Finding("devices", Severity.NOTE, text, remedy, (place.title,))
        if device["memory_bytes"] < 1_000_000_000:
            text = f"{_label(device)} has {units.size(device['memory_bytes'])} of memory free"
            yield Finding("devices", Severity.SLOW, text, "end what else uses it", (place.title,))
