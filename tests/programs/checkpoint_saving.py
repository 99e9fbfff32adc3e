"""Background saving on 3 ranks, without a model: ``checkpoint_saving.py DIRECTORY``. Rank 0 prints the cases that passed.

Rank 0 leads and holds one small tensor; ranks 1 and 2 hold tensors larger than a piece. What a rank holds is a function of
(kind, name, round), so rank 0 knows what every file must contain.
"""

import resource
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from hetero_mpi.comm.ranks.mpi_start import run_guarded
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.device.backend import Backend, Memory
from hetero_mpi.state import saving
from hetero_mpi.state.directory import checkpoint_path
from hetero_mpi.state.hdf5 import PIECE_BYTES, CheckpointError
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.state.redistribute import TensorShard
from hetero_mpi.state.saving import MAX_PIECES, Saver, Snapshots
from hetero_mpi.state.writer import CheckpointWriter
from tests.support.checkpoint_samples import told

KINDS = ("parameters", "moments1", "moments2")
SHAPES = {"a.small": (3,), "b.large": (PIECE_BYTES // 12 + 5, 3), "c.scalar": (), "d.deep": (2, 3, PIECE_BYTES // 16)}
HELD = {"a.small": 0, "b.large": 1, "c.scalar": 1, "d.deep": 2}
"""Name -> the rank that holds it."""


COUNTED = torch.arange(PIECE_BYTES, dtype=torch.float32)[: max(int(np.prod(shape)) for shape in SHAPES.values())]


def value(kind: str, name: str, round_: int) -> torch.Tensor:
    """What the tensor is in a round: no two elements near each other are equal, nor two tensors."""
    begin = 1000.0 * round_ + 100 * KINDS.index(kind) + list(SHAPES).index(name)
    return (COUNTED[: int(np.prod(SHAPES[name]))] + begin).reshape(SHAPES[name])


class Case:
    """A saver on a directory of its own, over tensors that follow a formula."""

    def __init__(self, world: World, directory: Path, **table: Any) -> None:
        self.world, self.directory = world, directory
        listed = [
            TensorShard(kind, name, shape, torch.float32, HELD[name])
            for name, shape in SHAPES.items()
            for kind in KINDS
        ]
        own = [shard for shard in listed if shard.owner == world.rank]
        self.tensors = {(shard.kind, shard.name): torch.empty(shard.shape) for shard in own}
        wishes = SimpleNamespace(**{"keep": 9, "keep_best": 0, "background": True, **table})

        def live(shard: Any) -> torch.Tensor:
            return self.tensors[shard.kind, shard.name]

        self.snapshots = snapshots = Snapshots(world.rank, Backend(), listed, live)  # type: ignore[arg-type]
        self.saver = Saver(world, snapshots, directory, wishes, threaded=True)  # type: ignore[arg-type]

    def become(self, round_: int) -> None:
        """As an optimizer's step does: new values in the same memory."""
        for (kind, name), tensor in self.tensors.items():
            tensor.copy_(value(kind, name, round_))

    def save(self, round_: int) -> Path:
        """Take the round's values, begin a checkpoint of them, and overwrite them at once."""
        self.become(round_)
        path = self.saver.save(told(round_, held_out_loss=10.0 - round_))
        self.become(99)
        return path

    def check(self, round_: int) -> None:
        """On rank 0: the file holds exactly that round."""
        if self.world.rank != 0:
            return
        with CheckpointReader(checkpoint_path(self.directory, round_)) as reader:
            assert reader.metadata["step"] == round_ and reader.held_out_loss() == 10.0 - round_
            for kind in KINDS:
                assert reader.names(kind) == tuple(SHAPES)
                for name in SHAPES:
                    array, dtype = reader.read(kind, name)
                    assert dtype == "float32" and np.array_equal(array, value(kind, name, round_).numpy()), (kind, name)


def the_file_is_the_moment_of_the_call(world: World, directory: Path) -> None:
    case = Case(world, directory)
    with case.saver:
        for round_ in (1, 2, 3):
            case.save(round_)
    for round_ in (1, 2, 3):
        case.check(round_)
    if world.rank == 0:
        assert case.saver.newest == checkpoint_path(directory, 3)


def training_goes_on_meanwhile(world: World, directory: Path) -> None:
    """Rank 0's disk hangs until training, two steps later, lets it go on; nothing is to be seen before."""
    case, go_on, finish = Case(world, directory), threading.Event(), CheckpointWriter.__exit__

    def hang(writer: CheckpointWriter, *error: Any) -> None:
        assert go_on.wait(30), "training was not there to let the disk go on"
        finish(writer, *error)

    with mock.patch.object(CheckpointWriter, "__exit__", hang):
        path = case.save(1)
        world.barrier()
        assert not path.exists()
        go_on.set()
        case.saver.finish()
    case.check(1)


def a_step_has_one_snapshot(world: World, directory: Path) -> None:
    """Peer replicas of the saved step share its snapshot; memory is used again when nobody holds what is in it."""
    case = Case(world, directory)
    held = case.snapshots.holder(2)
    taken = []
    with case.saver:
        for round_ in (1, 2, 3, 4):
            case.become(round_)
            case.saver.save(told(round_, held_out_loss=10.0 - round_))
            case.become(99)
            taken.append(case.snapshots.snapshot_after(round_, held) if round_ % 2 else None)
    for round_ in (1, 2, 3, 4):
        case.check(round_)
    first, third = taken[0], taken[2]
    assert first is not None and third is not None and list(held) == [first, third]
    for round_, snapshot in ((1, first), (3, third)):
        for (kind, name), tensor in snapshot.views.items():
            assert torch.equal(tensor, value(kind, name, round_)), "the others' steps have not touched it"
    case.become(5)
    assert case.snapshots.snapshot_after(5, held) is first and list(held) == [third, first]


def memory_is_bounded(world: World, directory: Path) -> None:
    """Rank 0 holds 12 bytes of some 65 MB, and grows by its few pieces, the first checkpoint included."""
    case = Case(world, directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_ in (1, 2, 3):
        case.save(round_)
        case.saver.finish()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if world.rank == 0:
        total = checkpoint_path(directory, 3).stat().st_size
        assert total > 50e6 and grown < MAX_PIECES * PIECE_BYTES + 12e6, (total, grown)
        print(f"rank 0 grew by {grown / 1e6:.0f} MB for files of {total / 1e6:.0f} MB", flush=True)


def a_full_disk_costs_one_checkpoint(world: World, directory: Path) -> None:
    case, write, calls = Case(world, directory), CheckpointWriter.write_pieces, 0

    def fail_at_the_third(writer: CheckpointWriter, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            next(iter(arguments[-1]))
            raise CheckpointError("checkpoint.unwritable", f"{writer.path}: no space left on device")
        write(writer, *arguments)

    case.save(1)
    case.saver.finish()
    with mock.patch.object(CheckpointWriter, "write_pieces", fail_at_the_third):
        case.save(2)
        case.saver.finish()
    case.save(3)
    case.saver.finish()
    case.check(1)
    case.check(3)
    if world.rank == 0:
        assert case.saver.newest == checkpoint_path(directory, 3)
        assert not checkpoint_path(directory, 2).exists()


def other_errors_of_the_background_reach_training(world: World, directory: Path) -> None:
    case = Case(world, directory)
    with mock.patch.object(saving, "prune", side_effect=ZeroDivisionError("a defect")):
        case.save(1)
        try:
            case.saver.finish()
            assert world.rank != 0
        except ZeroDivisionError as error:
            assert world.rank == 0
            assert sys.version_info < (3, 11) or "writing the checkpoint of step 1" in error.__notes__[0]


def without_memory_or_wish_training_waits(world: World, directory: Path) -> None:
    case = Case(world, directory / "wish", background=False)
    path = case.save(1)
    assert world.rank != 0 or path.exists()
    case.check(1)
    case = Case(world, directory / "memory")
    with mock.patch.object(saving, "host_memory", lambda: Memory(1000, "little")):
        path = case.save(2)
    assert world.rank != 0 or path.exists()
    case.check(2)


def main(world: World) -> int:
    cases = (
        the_file_is_the_moment_of_the_call,
        training_goes_on_meanwhile,
        a_step_has_one_snapshot,
        memory_is_bounded,
        a_full_disk_costs_one_checkpoint,
        other_errors_of_the_background_reach_training,
        without_memory_or_wish_training_waits,
    )
    for case in cases:
        case(world, Path(sys.argv[1]) / case.__name__)
        world.barrier()
        if world.rank == 0:
            print("passed:", case.__name__, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
