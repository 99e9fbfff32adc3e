"""The two ends of a tied matrix within a pipeline: the head's gradient goes to the embedding, new values come back.

The embedding's rank has the matrix. Both ways lead through host memory that is kept, beside what the device computes.
"""

from __future__ import annotations

import sys

import torch

from hetero_mpi.comm.transport import Transport
from hetero_mpi.device.backend import HOST
from hetero_mpi.engine.channel import PIECE_BYTES, Arrival, Outbox
from hetero_mpi.model.optimizer import Optimizer

_GRADIENT = 1 << 12
_WEIGHT = _GRADIENT + 1


class TiedMatrix:
    """One rank's end, or both.

    Args:
        embedding, head: the ranks of the two ends in its pipeline.
        name: of the embedding's parameter.
        whole: messages are not cut: in an emulation each piece would wait for a link's latency.

    Attributes:
        sends: it is the head, and the embedding is elsewhere.
        receives: it is the embedding, and the head is elsewhere.
    """

    def __init__(
        self, rank: int, embedding: int, head: int, name: str, optimizer: Optimizer, transport: Transport, whole: bool
    ) -> None:
        self.embedding, self.head, self.name = embedding, head, name
        self.optimizer, self.transport = optimizer, transport
        self.sends, self.receives = embedding != rank == head, head != rank == embedding
        self._piece_bytes = sys.maxsize if whole else PIECE_BYTES
        self._backend, self._done = optimizer.stage.backend, False
        stage, dtype = optimizer.stage, torch.float32
        matrix = stage.tied_head if self.sends else stage.parameters[name]
        assert matrix is not None
        self._copying = self._backend.copying()
        self._host: torch.Tensor | None = None
        """What is received, unless that can be received where it belongs."""
        if self.receives or (self.sends and self._backend.device != HOST):
            self._host = self._backend.host_buffer(matrix.shape, matrix.dtype if self.sends else dtype)
        other, tag = (embedding, _GRADIENT) if self.sends else (head, _WEIGHT)
        sent = dtype if self.sends else stage.dtype
        self._outbox = Outbox(transport, other, tag, self._backend, sent, self._piece_bytes)
        self._share: Arrival | None = None

    def begin(self) -> None:
        """A step begins: be ready for the head's gradient, which may come early."""
        self._done = False
        if self.receives:
            assert self._host is not None
            self._share = self._arrival(self.head, _GRADIENT, self._host, self._host)

    def join(self) -> None:
        """The head's gradient is whole. Once in a step: the head sends it, the embedding adds it to its own."""
        if self._done:
            return
        self._done = True
        if self.sends:
            self._outbox.put(self.optimizer.tied_gradient())
            return
        own = self.optimizer.gradient(self.name)
        if self._share is None:
            own.add_(self.optimizer.tied_gradient())
        else:
            self._share.wait()
            # The step decision waits for the norms, and so for this copy, before the next step receives into the same memory.
            own.add_(self._share.tensor.to(own.device, non_blocking=True))

    def end(self) -> None:
        """The step needs both gradients: return when the head's has left, or has been added."""
        self.join()
        self._outbox.flush()

    def share_weight(self) -> None:
        """Bring the embedding's values to the head's copy. Both ends call it."""
        stage = self.optimizer.stage
        if self.receives:
            self._outbox.put(stage.parameters[self.name])
            self._outbox.flush()
        elif self.sends:
            assert stage.tied_head is not None
            head = stage.storage_of(stage.tied_head)
            coming = self._arrival(self.embedding, _WEIGHT, head if self._host is None else self._host, head)
            coming.wait()
            coming.release()

    def _arrival(self, source: int, tag: int, buffer: torch.Tensor, tensor: torch.Tensor) -> Arrival:
        return Arrival(self.transport, source, tag, buffer, tensor, self._copying, self._piece_bytes)
