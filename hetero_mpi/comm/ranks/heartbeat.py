"""Heartbeats: every rank reports where it stands to rank 0, and rank 0 sends the collection to all ranks.

They are small JSON messages on a communicator of their own, sent by a thread that does nothing else. So there is an answer when the
main threads are stuck. Nobody waits for anybody here. MPI is used because it is the one channel known to work between these
machines; it must allow calls from several threads (``THREAD_MULTIPLE``).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hetero_mpi.comm.ranks import ulfm
from hetero_mpi.comm.ranks.back_off import Pause
from hetero_mpi.comm.ranks.collectives import Collectives, decode, encode
from hetero_mpi.comm.ranks.world import World

_TAG = 1


class Heartbeat:
    """The newest report of each rank. The constructor and ``close`` are collective; in between one thread calls ``beat``.

    Attributes:
        words: rank -> its newest report, this rank's included; on other ranks than 0 as rank 0 has passed it on. Missing: none yet.
        heard_s: rank -> ``time.monotonic`` of its newest message: on rank 0 of every other rank, elsewhere of rank 0.
    """

    def __init__(self, world: World) -> None:
        self._comm = ulfm.duplicate(world.comm)
        self.rank, self.size = world.rank, world.size
        self.words: dict[int, Any] = {}
        peers = range(1, self.size) if self.rank == 0 else (0,)
        self.heard_s = {peer: time.monotonic() for peer in peers}
        self._sent, self._received = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        self._sending: dict[int, tuple[Any, Any]] = {}
        """Peer -> (MPI request, the bytes it sends)."""

    def beat(self, word: Any) -> None:
        """Receive what has come, and send ``word`` to rank 0 (rank 0: all reports to everybody). A peer that has not yet taken the
        last message is left out. Raises RankLost: some rank has died.
        """
        with ulfm.losses():
            self._take_all()
            self.words[self.rank] = word
            message = encode(sorted(self.words.items()) if self.rank == 0 else word)
            for peer in self.heard_s:
                under_way = self._sending.get(peer)
                if under_way is None or under_way[0].Test():
                    self._sending[peer] = self._comm.Isend(message, dest=peer, tag=_TAG), message
                    self._sent[peer] += 1

    def silent_s(self, peer: int) -> float:
        """Seconds since the newest message of ``peer``; 0 for this rank itself."""
        return time.monotonic() - self.heard_s[peer] if peer != self.rank else 0.0

    def forgive(self, pause_s: float) -> None:
        """This process was stopped for ``pause_s``: do not count that time as silence of the others."""
        for peer in self.heard_s:
            self.heard_s[peer] += pause_s

    def close(self) -> None:
        """Complete or cancel all messages. No ``beat`` follows."""
        sent = Collectives(self._comm, self.rank, self.size).all_gather_json(sorted(self._sent.items()))
        coming = {peer: dict(map(tuple, sent[peer])).get(self.rank, 0) for peer in self.heard_s}
        pause = Pause()
        while self._received != coming or not all(request.Test() for request, _ in self._sending.values()):
            self._take_all()
            pause.rest()

    def _take_all(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        for peer in self.heard_s:
            while self._comm.Iprobe(source=peer, tag=_TAG, status=status):
                payload = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._comm.Recv(payload, source=peer, tag=_TAG)
                self._received[peer] += 1
                self.heard_s[peer] = time.monotonic()
                said = decode(payload)
                self.words.update({int(rank): word for rank, word in said} if peer == 0 else {peer: said})
