"""Few parameters from noisy samples: lines, bends that are there, points that are far off, ranks that are alike."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.fit import fitted_curve, pooled
from hetero_mpi.planning.types.profile import ClusterProfile, Curve, DeviceProfile, LayerTimes
from hetero_mpi.planning.types.toml_files import load_profile, profile_from_dict, profile_to_dict, save_profile
from tests.support.planning_samples import make_model, make_profile

COUNTS = (128, 256, 384, 512, 1024, 2048)
Truth = Callable[[int], float]


def straight(tokens: int) -> float:
    return 1e-4 + 1e-6 * tokens


def ramp(tokens: int) -> float:
    """A device that is not busy below 600 tokens."""
    return max(6e-4, 1e-6 * tokens)


def timed(draw: random.Random, truth: Truth, noise: float, repetitions: float = 0.02) -> dict[int, list[float]]:
    """Five repetitions at each count. ``noise``: what those of a count have in common; ``repetitions``: each by itself."""
    middles = {tokens: truth(tokens) * math.exp(draw.gauss(0, noise)) for tokens in COUNTS}
    return {
        tokens: [middle * math.exp(draw.gauss(0, repetitions)) for _ in range(5)] for tokens, middle in middles.items()
    }


def test_a_line_is_two_knots_and_keeps_its_samples() -> None:
    samples = {tokens: [straight(tokens)] * 3 for tokens in COUNTS}
    curve = fitted_curve(samples)
    assert curve.tokens == (128, 2048) and curve.sample_tokens == COUNTS
    assert [curve.at(tokens) for tokens in COUNTS] == pytest.approx([straight(tokens) for tokens in COUNTS])
    assert curve.samples == tuple(tuple(times) for times in samples.values())


def test_a_single_count_gives_a_line_through_the_origin() -> None:
    curve = fitted_curve({100: [3.0, 1.0, 2.0]})
    assert (curve.tokens, curve.seconds, curve.at(50)) == ((100,), (2.0,), 1.0)


def test_work_neither_falls_with_tokens_nor_begins_under_zero() -> None:
    falling = fitted_curve({10: [3.0], 20: [2.0], 40: [1.0]})
    assert falling.seconds[0] == pytest.approx(falling.seconds[1])
    steep = fitted_curve({10: [1.0], 20: [4.0]})
    assert steep.at(20) == pytest.approx(2 * steep.at(10)), "nothing left for no tokens"


def test_a_layer_that_no_gradient_reaches_takes_no_time() -> None:
    assert fitted_curve({10: [0.0], 20: [0.0, 0.0]}).seconds == (0.0, 0.0)


def test_a_far_point_is_left_out_where_there_are_four() -> None:
    samples = {tokens: [straight(tokens)] for tokens in COUNTS[:4]} | {512: [3 * straight(512)]}
    assert fitted_curve(samples).at(256) == pytest.approx(straight(256))
    del samples[384]
    assert fitted_curve(samples).at(512) > 1.2 * straight(512), "of three any may be the wrong one"


@pytest.mark.parametrize(("noise", "most"), [(0.0, 0), (0.02, 0), (0.1, 1)])
def test_noise_is_no_bend(noise: float, most: int) -> None:
    draw = random.Random(f"noise {noise}")
    curves = [fitted_curve(timed(draw, straight, noise), noise) for _ in range(50)]
    assert sum(len(curve.tokens) > 2 for curve in curves) <= most


def test_a_bend_is_found() -> None:
    draw = random.Random("bend")
    curves = [fitted_curve(timed(draw, ramp, 0.01)) for _ in range(20)]
    assert all(len(curve.tokens) == 3 and 512 <= curve.tokens[1] <= 1024 for curve in curves)
    assert all(curve.at(t) == pytest.approx(ramp(t), rel=0.1) for curve in curves for t in COUNTS)


def test_a_bend_that_noise_would_make_is_none() -> None:
    draw = random.Random("hidden")
    assert all(len(fitted_curve(timed(draw, ramp, 0.01), 0.5).tokens) == 2 for _ in range(20))


def cluster(draw: random.Random, noise: float, slowness: tuple[float, ...], hosts: str = "aaab") -> ClusterProfile:
    """Ranks with one name, on hosts by their letters, timed with noise."""
    profile = make_profile(slowness, make_model(4))

    def device(one: DeviceProfile) -> DeviceProfile:
        factor = slowness[one.rank]

        def curve(share: float) -> Curve:
            return fitted_curve(timed(draw, lambda tokens: factor * share * straight(tokens), noise))

        layers = {
            kind: LayerTimes(curve(share), curve(2 * share))
            for kind, share in (("embedding", 0.01), ("block", 1.0), ("head", 3.0))
        }
        copies = {
            "copy_latency_s": 1e-5 * (1 + one.rank / 10),
            "device_to_host_bytes_per_s": 1e9 * (1 + 9 * (one.rank == 1)),
        }
        return replace(one, name="card", host=hosts[one.rank], layers=layers, **copies)  # type: ignore[arg-type]

    return replace(profile, devices=tuple(map(device, profile.devices)))


def block_s(profile: ClusterProfile) -> list[float]:
    return [device.layers["block"].forward_s.at(512) / straight(512) for device in profile.devices]


@pytest.mark.parametrize("seed", range(10))
def test_like_ranks_share_their_parameters(seed: int) -> None:
    """At 10 % a point; the rank of the other host is not like them."""
    before = cluster(random.Random(seed), 0.1, (1.0, 1.0, 1.0, 1.0))
    seconds = block_s(pooled(before))
    assert seconds[0] == seconds[1] == seconds[2] != seconds[3] and seconds[0] == pytest.approx(1.0, rel=0.12)
    samples = [device.layers["block"].forward_s.samples for device in before.devices]
    assert [device.layers["block"].forward_s.samples for device in pooled(before).devices] == samples


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_is_slower_than_its_like_stays_so(seed: int) -> None:
    seconds = block_s(pooled(cluster(random.Random(seed), 0.02, (1.0, 1.3, 1.0), "aaa")))
    assert seconds[0] == seconds[2] and seconds[1] == pytest.approx(1.3, rel=0.05)


def test_what_all_curves_show_at_one_count_is_no_chance() -> None:
    """One sequence takes as long as two: of a single curve that point would be left out."""
    profile = cluster(random.Random(4), 0.01, (1.0,), "a")

    def slow(curve: Curve) -> Curve:
        first, *others = curve.samples
        return fitted_curve(dict(zip(COUNTS, (tuple(1.5 * one for one in first), *others), strict=True)))

    layers = {
        kind: LayerTimes(slow(one.forward_s), slow(one.backward_s)) for kind, one in profile.devices[0].layers.items()
    }
    profile = replace(profile, devices=(replace(profile.devices[0], layers=layers),))
    found = [one.devices[0].layers["block"].forward_s for one in (profile, pooled(profile))]
    assert found[0].at(128) < 1.1 * straight(128) and found[1].at(128) > 1.4 * straight(128)
    assert found[1].at(1024) == pytest.approx(straight(1024), rel=0.1)


def test_like_hosts_share_too_and_figures_that_agree() -> None:
    found = pooled(cluster(random.Random(1), 0.02, (1.0,) * 4, "aabb"))
    assert len(set(block_s(found))) == 1
    assert [device.copy_latency_s for device in found.devices] == [pytest.approx(1.15e-5)] * 4
    assert [device.device_to_host_bytes_per_s for device in found.devices] == [1e9, 1e10, 1e9, 1e9], "a slot of its own"


def test_curves_without_samples_stay() -> None:
    profile = make_profile((1.0, 1.01), make_model(4))
    assert pooled(profile) == profile


def test_samples_are_in_files_and_messages(tmp_path: Path) -> None:
    profile = pooled(cluster(random.Random(2), 0.05, (1.0, 1.0), "ab"))
    save_profile(profile, tmp_path / "p.toml")
    for read in (load_profile(tmp_path / "p.toml"), profile_from_dict(profile_to_dict(profile))):
        assert read == profile
        curves = [one.devices[1].layers["head"].backward_s for one in (read, profile)]
        assert curves[0].samples == curves[1].samples and curves[0].sample_tokens == COUNTS
