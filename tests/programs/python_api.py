"""Uses hetero_mpi as a program would, on all ranks: ``OUT`` writes what each of them saw there, ``OUT follow`` what each
saw of steps; ``alone OUT`` breaks on one between calls, ``callback OUT`` in a callback.

The first is for ranks that stay: that programs of their own end well is seen of those of the document.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpi4py import MPI

import hetero_mpi
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.model.eager_imports import eager_imports
from hetero_mpi.planning.types.plan import PipelinePlan, StagePlan

with eager_imports():  # as a rank of ``train`` does
    import hetero_mpi.training.training_run

RANK = MPI.COMM_WORLD.Get_rank()


def job_in(out: Path, **changes: Any) -> hetero_mpi.Job:
    tables: dict[str, dict[str, Any]] = {
        "model": {"factory": "tests.programs.layers_model:plain"},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2},
        "checkpoint": {"every": 1},
        "output": {"run_dir": out / "{name}"},
        "plan": {"pipelines": 1, "rebalance": False},
        "profile": {"repeats": 1, "largest_message_bytes": 4096, "cache": False},
        "report": {"write": False},
        "cluster": {"threads": 1},
    }
    return hetero_mpi.Job.build(tables, name="made", directory=out, set=changes)


def refused(call: Any) -> list[Any]:
    try:
        call()
    except hetero_mpi.UserError as error:
        return [str(error), error.exit_code]
    raise AssertionError("nothing was raised")


def use(out: Path) -> None:
    job = job_in(out)
    profile = hetero_mpi.profile(job)
    report = hetero_mpi.plan(job, profile)
    plan = report.plan
    first = hetero_mpi.train(job, plan=plan, profile=profile)
    again = hetero_mpi.train(job, plan=plan, profile=profile, run_dir=out / "again")
    # Only rank 0's arguments count: the others name a job that is nowhere.
    longer = job_in(out, **{"train.steps": 5}) if RANK == 0 else Path("nowhere.toml")
    resumed = hetero_mpi.train(longer, profile=profile if RANK == 0 else None, resume="latest" if RANK == 0 else None)
    if RANK == 0:
        hetero_mpi.save_profile(profile, out / "profile.toml")
        hetero_mpi.save_plan(report, out / "plan.toml")
    found = {
        "losses": [first.losses, again.losses, resumed.losses],
        "directories": [str(one.run_dir) for one in (first, again, resumed)],
        "checkpoint": str(resumed.checkpoint),
        "result": str(first.result),
        "step_s": first.step_s,
        "same": first.report.plan.pipelines == plan.pipelines and first.profile == profile,
        "resume": refused(lambda: hetero_mpi.train(job, resume="nowhere.h5", profile=profile)),
        "job": refused(lambda: hetero_mpi.train("nowhere.toml")),
        "few": refused(lambda: hetero_mpi.train(job, profile="profiles/homelab-5090-strix-halo.toml")),
        "ranks": MPI.COMM_WORLD.allreduce(1),
    }
    (out / f"rank{RANK}.json").write_text(json.dumps(found))


def follow(out: Path) -> None:
    """Step by step, by a plan that leaves rank 2 idle; each rank has a part in it."""
    job = job_in(out, **{"train.steps": 6, "train.evaluate_every": 2, "checkpoint.every": 2})
    stage = [StagePlan((rank,), 3 * rank, 3 * rank + 3, 1 - rank) for rank in (0, 1)]
    profile = hetero_mpi.profile(job)
    report = hetero_mpi.plan(job, profile)
    plan = replace(report.plan, pipelines=(PipelinePlan(tuple(stage), 2, 4),))
    how: dict[str, Any] = {"plan": plan, "profile": profile}
    seen = list[Any]()
    plain = hetero_mpi.train(job, **how, run_dir=out / "plain")
    called = hetero_mpi.train(
        job,
        **how,
        run_dir=out / "called",
        on_plan=lambda one: seen.append(["plan", one.plan == plan]),
        on_step=(lambda one: seen.append(["step", one.step, one.loss, one.step_s])) if RANK != 1 else None,
        on_evaluate=lambda one: seen.append(["evaluation", one.step, one.loss]),
        on_checkpoint=lambda one: seen.append(["checkpoint", one.name, one.exists()]),
    )

    run = hetero_mpi.steps(job, **how, run_dir=out / "iterated")
    sums = [MPI.COMM_WORLD.allreduce(step.step) for step in run]  # messages of the program's own between the steps
    assert run.result is not None and not run.under_way and list(run) == []

    named = hetero_mpi.steps(job, **how, run_dir=out / "left")
    for step in named:
        if step.step == 3 and RANK == 2:
            break
    assert not named.under_way
    left = step.step
    begun = hetero_mpi.steps(job, **how, run_dir=out / "left", resume="latest")
    went_on = [step.held_out_loss for step in begun]
    assert begun.result is not None

    half_way = hetero_mpi.steps(job, **how, run_dir=out / "half")
    next(half_way)
    under_way = refused(lambda: hetero_mpi.train(job))
    half_way.close()

    def enough(step: hetero_mpi.Step) -> None:
        if step.step == 3 and RANK == 1:
            raise hetero_mpi.StopTraining

    stopped = hetero_mpi.train(job, **how, run_dir=out / "stopped", on_step=enough)
    found = {
        "seen": seen,
        "losses": [one.losses for one in (plain, called, run.result, begun.result, stopped)],
        "result": [one.result.is_dir() for one in (called, run.result, begun.result, stopped)],
        "sums": sums,
        "left": [left, half_way.result, under_way],
        "went_on": went_on,
    }
    (out / f"follow{RANK}.json").write_text(json.dumps(found))


def fail_alone(out: Path) -> None:
    """Rank 1's program breaks between two calls; rank 0 is in the second one."""
    refused(lambda: hetero_mpi.train("nowhere.toml"))
    if RANK == 1:
        raise ValueError("rank 1 has had enough")
    hetero_mpi.train(job_in(out))


def fail_in_callback(out: Path) -> None:
    def fail(step: hetero_mpi.Step) -> None:
        if RANK == 1 and step.step == 2:
            raise ValueError("rank 1 has had enough")

    hetero_mpi.train(job_in(out), on_step=fail)


def main(world: World) -> int:
    (follow if sys.argv[2:] else use)(Path(sys.argv[1]))
    print("the end of the program", flush=True)
    return 0


if __name__ == "__main__":
    {"alone": fail_alone, "callback": fail_in_callback}[sys.argv[1]](Path(sys.argv[2]))
    print("the end of the program", flush=True)
