"""The options of ``doctor``, the order of its checks, and the printing of its findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_mpi.errors import ExitCode
from hetero_mpi.launch.doctor import checks
from hetero_mpi.launch.doctor.checks import Check
from hetero_mpi.launch.doctor.device_checks import check_devices, check_self_tests, check_shares, self_test_lines
from hetero_mpi.launch.doctor.probe_client import Examined
from hetero_mpi.launch.hosts.diagnostics import Finding, as_json, lines_of, would_fail

CHECKS: tuple[Check, ...] = (
    checks.check_reach,
    checks.check_addresses,
    checks.check_hosts_differ,
    checks.check_packages,
    checks.check_versions,
    checks.check_mpi,
    checks.check_fault_tolerance,
    check_devices,
    check_self_tests,
    check_shares,
    checks.check_interfaces,
    checks.check_disks,
)
"""The checks in the order in which they are reported. Each looks at all hosts."""


@dataclass(frozen=True)
class DoctorOptions:
    """The options of ``doctor``."""

    hostfile: str | None = None
    hosts: str | None = None
    mpirun_args: tuple[str, ...] = ()
    """The launcher's options, which may name a launch agent."""
    run_dir: str = "runs"
    json: bool = False
    self_test: bool = False
    """Test every device: does it compute what the CPU does?"""


def report(options: DoctorOptions, findings: Sequence[Finding], places: Sequence[Examined]) -> int:
    """Print the findings as the options say; returns the exit code."""
    fails = would_fail(findings)
    if options.json:
        facts = {place.title: place.facts.to_dict() for place in places if place.facts is not None}
        print(json.dumps({"would_fail": fails, "findings": as_json(findings), "facts": facts}, indent=1))
    else:
        print("\n".join([*lines_of(findings), *self_test_lines(places)]))
    return int(ExitCode.FAILED if fails else ExitCode.DONE)
