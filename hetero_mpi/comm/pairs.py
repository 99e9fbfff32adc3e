"""All pairs of n ranks in rounds of disjoint pairs, for measurements that must not disturb each other. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def quiet_rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """``rounds`` for ranks on ``hosts``, divided so that of the pairs between hosts no two in a round touch one host.

    >>> quiet_rounds(("a", "a", "b", "b"))
    [[(0, 3)], [(1, 2)], [(0, 2)], [(1, 3)], [(0, 1), (2, 3)]]
    """
    result = []
    for pairs in rounds(len(hosts)):
        waiting = pairs
        while waiting:
            now: list[tuple[int, int]] = []
            busy: set[str] = set()
            for a, b in waiting:
                touched = {hosts[a], hosts[b]} if hosts[a] != hosts[b] else set()
                if not touched & busy:
                    now.append((a, b))
                    busy |= touched
            result.append(now)
            waiting = [pair for pair in waiting if pair not in now]
    return result


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Disjoint pairs per round, every pair of ``range(n)`` once, lower rank first.

    For n = 4::

        round 0: 0-3 1-2
        round 1: 0-2 1-3  (0 stays, the others rotate)
        round 2: 0-1 2-3
    """
    seats: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    result = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result
