"""Large clusters in small files: equal blocks and NICs told once, links by hosts; read back, edited, asked "what if?"."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.planning.decision.alternatives import faster_networks
from hetero_mpi.planning.types.cluster_changes import restricted, with_copy_of, with_faster_links, with_free_links
from hetero_mpi.planning.types.profile import ClusterProfile, HostLinkProfile
from hetero_mpi.planning.types.toml_files import load_profile, profile_from_dict, profile_to_dict, save_profile
from hetero_mpi.report.profile_text import inspection_lines
from hetero_mpi.util.units import numbers, ranks
from tests.support.errors import refuses
from tests.support.planning_samples import make_model, make_plan_of, make_profile

INSIDE, BETWEEN = (1e-6, 8e9), (1e-4, 0.12e9)


def cluster(hosts: str = "aabbb") -> ClusterProfile:
    """Ranks on hosts named by letters, all links told by two tables."""
    profile = make_profile([1.0] * len(hosts), make_model(6))
    devices = tuple(replace(device, host=host) for device, host in zip(profile.devices, hosts, strict=True))
    told = HostLinkProfile("*", "itself", *INSIDE), HostLinkProfile("*", "*", *BETWEEN)
    return replace(profile, devices=devices, links=(), host_links=told)


def listed(profile: ClusterProfile) -> ClusterProfile:
    """The same with a link for every pair of ranks."""
    pairs = [(a.rank, b.rank) for a in profile.devices for b in profile.devices if a != b]
    return replace(profile, links=tuple(profile.link(*pair) for pair in pairs), host_links=())


def test_equal_blocks_and_devices_are_written_once_and_read_back(tmp_path: Path) -> None:
    profile = cluster("aabbb" * 40)
    save_profile(profile, tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    assert text.count("[[model.layers]]") == 3 and "count = 6" in text
    assert text.count("like = 0") == 199 and text.count("forward_s") == len({"embedding", "block", "head"}) + 1
    (tmp_path / "p.toml").write_text(text.replace("\nlinks = []\n", "\n"))
    assert "\nlinks = []\n" in text and load_profile(tmp_path / "p.toml") == profile


def test_a_device_like_another_may_differ_in_what_it_says(tmp_path: Path) -> None:
    save_profile(cluster(), tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    place = text.index("like = 0", text.index("rank = 2"))
    (tmp_path / "p.toml").write_text(text[:place] + 'memory_bytes = 77\nname = "odd"\n' + text[place:])
    devices = load_profile(tmp_path / "p.toml").devices
    assert (devices[2].memory_bytes, devices[2].name) == (77, "odd") and devices[3].memory_bytes != 77
    assert devices[2].layers == devices[0].layers


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("count = 6", "count = 0", ("model.layers[1].count = 0",)),
        ("count = 6", 'count = "6"', ("model.layers[1].count = '6'",)),
        ("like = 0", "like = 1", ("devices[1].like = 1",)),
        ("like = 0", "like = -1", ("devices[1].like = -1",)),
        ('destination = "itself"', 'destination = "b"', ("host_links", "*")),
        ('destination = "itself"', 'destination = "*"', ("host_links", "* -> *", 2)),
    ],
)
def test_wrong_shorthand_is_named(tmp_path: Path, old: str, new: str, shown: tuple[object, ...]) -> None:
    save_profile(cluster(), tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    assert old in text
    (tmp_path / "p.toml").write_text(text.replace(old, new, 1))
    with refuses("file.invalid", *shown):
        load_profile(tmp_path / "p.toml")


def test_a_link_of_one_pair_overrides_what_hosts_say() -> None:
    profile = cluster()
    assert profile.link(0, 1).bytes_per_s == 8e9 and profile.link(1, 2).bytes_per_s == 0.12e9
    own = replace(profile.link(1, 2), bytes_per_s=5.0)
    odd = replace(profile, links=(own,))
    assert odd.link(1, 2).bytes_per_s == 5.0 and odd.link(2, 1).bytes_per_s == 0.12e9
    assert odd.messages_s((1, 2), 100)[0, 1] == pytest.approx(odd.transfer_s(1, 2, 100))
    assert profile_from_dict(profile_to_dict(odd)) == odd


def test_changed_clusters_are_the_same_however_their_links_are_told() -> None:
    short, long = cluster(), listed(cluster())

    def alike(a: ClusterProfile, b: ClusterProfile) -> None:
        assert a.devices == b.devices
        size = len(a.devices)
        for pair in ((x, y) for x in range(size) for y in range(size) if x != y):
            assert a.link(*pair) == b.link(*pair), pair
        assert profile_from_dict(profile_to_dict(a)) == a

    alike(with_free_links(short), with_free_links(long))
    alike(restricted(short, (1, 3, 4)), restricted(long, (1, 3, 4)))
    alike(with_copy_of(short, 3), with_copy_of(long, 3))
    alike(with_faster_links(short), with_faster_links(long))
    alike(with_faster_links(short, [(0, 2)], latency=False), with_faster_links(long, [(0, 2)], latency=False))
    plan = make_plan_of((0, 4, 8), (1, 2), 4)
    (name, faster), (same_name, same) = next(faster_networks(plan, short)), next(faster_networks(plan, long))
    assert name == same_name == "10 GbE instead of 1" and faster.link(0, 2).bytes_per_s == pytest.approx(1.2e9)
    alike(faster, same)


def test_a_second_rank_of_a_host_that_had_one_is_linked() -> None:
    profile = cluster("ab")
    only = replace(profile, host_links=(HostLinkProfile("*", "*", *BETWEEN),))
    assert with_copy_of(only, 0).link(0, 2).bytes_per_s == BETWEEN[1]


def test_many_ranks_take_few_lines() -> None:
    text = "\n".join(inspection_lines(cluster("aabbb" * 8)))
    assert "any other two hosts" in text and "inside a host" in text
    assert "... and 24 more" in text and text.count("\n") < 40
    assert numbers([7, 1, 2, 3, 9, 10]) == "1-3, 7, 9, 10"
    assert (ranks([4]), ranks([4, 5, 6])) == ("rank 4", "ranks 4-6")
