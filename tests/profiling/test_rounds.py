"""Repetitions in turns, by a made-up clock: what is repeated how often, what is left out, and what a burst of load falls on."""

from typing import Any

import pytest
import torch

from hetero_mpi.profiling.timings import TimedPart, TimedVariant, TimingRounds, TimingSamples


class Machine:
    """Takes ``row_s`` seconds for a sequence, and more while a burst lasts."""

    def __init__(self, row_s: float, most_rows: int = 1000) -> None:
        self.row_s, self.most_rows = row_s, most_rows
        self.now = 0.0
        self.ran: list[tuple[str, int]] = []
        self.forgotten = 0

    def clock(self) -> float:
        return self.now

    def way(self, name: str, rows: tuple[int, ...], repeats: int, **options: Any) -> TimedVariant:
        def run(count: int, samples: TimingSamples) -> None:
            if count > self.most_rows:
                raise torch.OutOfMemoryError
            self.now += count * self.row_s
            self.ran.append((name, count))
            samples.add(TimedPart.FORWARD, name, count, count * self.row_s)

        def forget() -> None:
            self.forgotten += 1

        return TimedVariant(run, forget, rows, TimingSamples(), repeats, **options)


def times_of(way: TimedVariant, name: str) -> dict[int, int]:
    """Sequences -> repetitions that count."""
    curve = way.samples.curve(TimedPart.FORWARD, name, 1)
    assert curve is not None
    return {count: len(times) for count, times in zip(curve.sample_tokens, curve.samples, strict=True)}


def test_every_round_runs_each_way_with_each_number_once() -> None:
    machine = Machine(0.001)
    ways = [machine.way("whole", (1, 2, 4), 3), machine.way("member", (1, 2, 4), 2)]
    TimingRounds(machine.clock, warms_up=False).time(ways)
    assert [times_of(way, name) for way, name in zip(ways, ("whole", "member"), strict=True)] == [
        {1: 3, 2: 3, 4: 3},
        {1: 2, 2: 2, 4: 2},
    ]
    begun = 2 * 4  # one that warms up for each number, and of the smallest one that counts
    assert machine.ran[begun : begun + 6] == [("whole", n) for n in (1, 2, 4)] + [("member", n) for n in (1, 2, 4)]


@pytest.mark.parametrize(
    ("seconds", "rows", "warms_up", "expected"),
    [
        (0.05, (1, 2, 8, 16), False, {1: 5, 2: 2, 8: 1, 16: 1}),
        (0.05, (1, 16), True, {16: 1}),
        (2.0, (1, 2, 4), False, {1: 1, 2: 1}),
    ],
)
def test_long_repetitions_are_few_and_their_first_counts_unless_the_device_warms_up(
    seconds: float, rows: tuple[int, ...], warms_up: bool, expected: dict[int, int]
) -> None:
    """Numbers that take too long are left out."""
    machine = Machine(seconds)
    way = machine.way("whole", rows, 5)
    TimingRounds(machine.clock, warms_up=warms_up).time([way])
    found = times_of(way, "whole")
    assert expected.items() <= found.items() and (warms_up or found == expected)
    assert machine.ran.count(("whole", 16)) == (16 in rows) * (2 if warms_up else 1)


def test_what_is_close_to_another_way_is_timed_at_both_ends_of_what_is_short() -> None:
    machine = Machine(0.04)
    ways = [machine.way("whole", (1, 2, 4, 8, 16), 2), machine.way("again", (1, 2, 4, 8, 16), 2, ends=True)]
    TimingRounds(machine.clock, warms_up=False).time(ways)
    assert list(times_of(ways[1], "again")) == [1, 4]
    assert list(times_of(ways[0], "whole")) == [1, 2, 4, 8, 16]


def test_numbers_without_memory_are_left_out_but_not_the_smallest() -> None:
    machine = Machine(0.001, most_rows=2)
    way = machine.way("whole", (1, 2, 4, 8), 3)
    TimingRounds(machine.clock, warms_up=False).time([way])
    assert times_of(way, "whole") == {1: 3, 2: 3} and machine.forgotten == 1
    machine.most_rows = 0
    with pytest.raises(torch.OutOfMemoryError):
        TimingRounds(machine.clock, warms_up=False).time([machine.way("whole", (1, 2), 3)])
