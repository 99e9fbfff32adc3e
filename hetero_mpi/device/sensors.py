"""Figures that an accelerator tells of itself: how busy it is, its power, its temperature.

The vendor's library is asked, by torch's own calls (pynvml, amdsmi), and where that tells nothing the driver's files. Neither is
required, and either may take long: nobody reads them on the path of a step.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

PCI_DEVICES = Path("/sys/bus/pci/devices")
_LIBRARY = {"busy": "utilization", "watts": "power_draw", "celsius": "temperature"}
_FILES = {
    "busy": ("gpu_busy_percent", 0.01),
    "watts": ("hwmon/hwmon*/power1_[ai]*", 1e-6),
    "celsius": ("hwmon/hwmon*/temp1_input", 1e-3),
}
"""Figure -> the driver's file below the device (amdgpu, and what of it others have), and its unit."""


def sensors(module: Any, device: Any, name: str) -> dict[str, float]:
    """``busy`` (a share), ``watts`` and ``celsius``, as far as they are told. ``name``: of the backend."""
    units = {"busy": 0.01, "watts": 1e-3 if name == "cuda" else 1.0, "celsius": 1.0}
    found = {}
    for figure, function in _LIBRARY.items():
        with contextlib.suppress(Exception):  # no library, no such function of this vendor, a slice of a GPU
            found[figure] = units[figure] * getattr(module, function)(device)
    if len(found) < len(_FILES):
        with contextlib.suppress(Exception):  # no PCI device, or torch does not tell which
            of = module.get_device_properties(device)
            place = PCI_DEVICES / f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
            found = from_files(place) | found
    return found


def from_files(place: Path) -> dict[str, float]:
    """The same by the driver's files below ``place``."""
    found = dict[str, float]()
    for figure, (pattern, unit) in _FILES.items():
        for path in sorted(place.glob(pattern)):
            with contextlib.suppress(OSError, ValueError):
                found.setdefault(figure, unit * int(path.read_text()))
    return found
