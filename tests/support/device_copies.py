"""Copies between host memory and a device beside what it computes, checked on real GPUs and on the stand-in."""

import torch

from hetero_mpi.device.backend import Backend
from hetero_mpi.engine.channel import HostBuffers


def copies_there_and_back(card: Backend, size: int) -> None:
    """The device computes what is copied right after, and memory that was copied from is written over at once. ``size``: of the
    matrices whose products keep the device busy."""
    buffers, copying = HostBuffers(card, torch.float32), card.copying()
    there = torch.zeros(1 << 22, device=card.device)
    matrix = torch.randn(size, size, device=card.device)
    for turn in range(8):
        for _ in range(20):
            matrix = (matrix @ matrix).tanh()
        there = there + matrix.sum().nan_to_num() * 0 + turn
        host = buffers.lend(there.shape)
        copying.after_compute()
        out = copying.copy(host, there)
        there = there.clone()
        out.wait()
        assert out.done() and bool((host == sum(range(turn + 1))).all()), turn
        back = torch.empty_like(there)
        copying.after_compute()
        copying.copy(back, host).hold_compute()
        assert torch.equal(back + 1, there + 1)
        buffers.give_back(host)
    card.finish_compute()
    assert buffers.allocated == 1
