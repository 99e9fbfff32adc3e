"""Times that cannot be right are refused, by rank, layer and curve."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.types.profile import ClusterProfile, Curve
from hetero_mpi.planning.types.toml_files import load_profile, save_profile
from tests.support.errors import refuses
from tests.support.planning_samples import make_model, make_profile


def two_ranks(**block: Curve) -> ClusterProfile:
    """``block``: curves of rank 1's blocks."""
    profile = make_profile([1.0, 1.0], make_model(2), 10**7, 0.0, 100.0)
    slow = profile.devices[1]
    layers = {**slow.layers, "block": replace(slow.layers["block"], **block)}
    return replace(profile, devices=(profile.devices[0], replace(slow, layers=layers)))


@pytest.mark.parametrize("seconds", [(0.0, 1.0), (0.0,), (5.0, 1.0), (1.0, 1e7)])
def test_impossible_times_are_refused(tmp_path: Path, seconds: tuple[float, ...]) -> None:
    save_profile(two_ranks(forward_s=Curve((10, 20)[: len(seconds)], seconds)), tmp_path / "p.toml")
    with refuses("file.invalid", f"{tmp_path / 'p.toml'}: devices[1].layers.block.forward_s = {list(seconds)}"):
        load_profile(tmp_path / "p.toml")


def test_where_nothing_is_done_nothing_takes_no_time(tmp_path: Path) -> None:
    """No gradient reaches a frozen embedding, and a layer without matrices has no weight part."""
    nothing = Curve((10,), (0.0,))
    profile = two_ranks(input_s=Curve((10,), (1.0,)), weight_s=nothing)
    save_profile(profile, tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml") == profile
    save_profile(two_ranks(backward_s=nothing), tmp_path / "p.toml")
    with refuses("file.invalid", "layers.block.backward_s = [0.0]"):
        load_profile(tmp_path / "p.toml")
    frozen = replace(profile.model, layers=tuple(replace(one, trainable_parameters=0) for one in profile.model.layers))
    save_profile(replace(two_ranks(backward_s=nothing), model=frozen), tmp_path / "p.toml")
    assert load_profile(tmp_path / "p.toml").model == frozen
