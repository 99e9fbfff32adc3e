"""A job and a made-up profile in files, and commands as a person runs them on these."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from hetero_mpi.planning.types.profile import ClusterProfile, LayerTimes
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import save_profile
from tests.support.planning_samples import JOB_TOML, make_model, make_profile, with_spread

JOB = JOB_TOML + "[plan]\npipelines = 1\n"
REQUEST = PlanRequest(8, 10, (1, 2), recompute_choices=(False, True), split_choices=(False, True), indifference=0.005)
"""The job as planning sees it, on three ranks."""


def cluster() -> ClusterProfile:
    """A fast, a medium and a very slow rank on slow links, with the samples that the links were fitted to."""
    profile = make_profile((1.0, 1.5, 12.0), make_model(6), latency_s=0.05, bytes_per_s=2e4)
    links = tuple(replace(link, sample_bytes=(1000, 10_000), sample_s=(0.1, 0.5)) for link in profile.links)
    devices = tuple(
        replace(device, layers={kind: spread(times) for kind, times in device.layers.items()})
        for device in profile.devices
    )
    return replace(profile, links=links, devices=devices)


def spread(times: LayerTimes) -> LayerTimes:
    """With repetitions whose quartiles are 5 % apart."""
    return LayerTimes(with_spread(times.forward_s, 0.05), with_spread(times.backward_s, 0.05))


def fill(directory: Path) -> Path:
    """Write ``job.toml`` and ``profile.toml``; returns the directory."""
    (directory / "job.toml").write_text(JOB)
    save_profile(cluster(), directory / "profile.toml")
    return directory


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints: on stdout, or on stderr where it fails."""
    found = main(arguments)
    out, err = capsys.readouterr()
    assert found == code, err or out
    return " ".join((out if code == 0 else err).split())  # lines are wrapped
