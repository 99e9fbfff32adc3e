"""The state, the logs and the callbacks of transformers' Trainer during a run, and the members by which scripts use them.

Every rank keeps the state; callbacks (``transformers.TrainerCallback``) are called on rank 0.
"""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, trainer_pt_utils
from transformers.trainer_callback import CallbackHandler

from hetero_mpi.interop import trainer_arguments
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.metrics import Evaluation
from hetero_mpi.state.directory import step_of
from hetero_mpi.step_iterator import Step, StopTraining
from hetero_mpi.training.result import TrainResult
from hetero_mpi.util.errors import require


def accelerator(trainer: Any) -> SimpleNamespace:
    """Return what scripts use of accelerate's ``Accelerator``. Starts MPI."""
    from hetero_mpi.comm.ranks.mpi_start import program_world

    world = program_world()
    facts: dict[str, Any] = {"is_main_process": world.rank == 0, "is_local_main_process": world.local_rank == 0}
    facts |= {"process_index": world.rank, "num_processes": world.size, "wait_for_everyone": world.barrier}
    return SimpleNamespace(print=print if world.rank == 0 else lambda *values, **options: None, **facts)


def checkpoint_folder(path: Path) -> Path:
    """Return the directory, such as RUN/checkpoint-8, by which transformers' ``get_last_checkpoint`` finds a checkpoint."""
    return path.parent.parent / f"checkpoint-{step_of(path)}"


def link_checkpoints(run_dir: Path) -> None:
    """Create ``checkpoint_folder`` with a link for each checkpoint, and remove those of removed checkpoints. On rank 0."""
    paths = run_dir.glob("checkpoints/step-*.h5")
    links = {checkpoint_folder(path) / path.name: Path("..", "checkpoints", path.name) for path in paths}
    with contextlib.suppress(OSError):  # such as a file system without links
        for link in run_dir.glob("checkpoint-*/step-*.h5"):
            if link not in links and link.is_symlink():
                link.unlink()
                link.parent.rmdir()
        for link in (link for link in links if not link.is_symlink()):
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(links[link])


class TrainerMembers:
    """Members of transformers' ``Trainer`` that scripts use besides training."""

    args: Any
    is_fsdp_enabled = is_deepspeed_enabled = False
    log_metrics, save_metrics = trainer_pt_utils.log_metrics, trainer_pt_utils.save_metrics
    save_state, accelerator = trainer_pt_utils.save_state, property(accelerator)
    callback_handler, log = property(attrgetter("_events")), property(attrgetter("_events.log"))
    pop_callback = property(attrgetter("_events.pop_callback"))
    remove_callback = property(attrgetter("_events.remove_callback"))

    @property
    def state(self) -> TrainerState:
        """The state of the last run, with ``log_history``."""
        return self.callback_handler.state

    def add_callback(self, callback: Any) -> None:
        """Add a ``TrainerCallback``, or its class."""
        callback = callback() if isinstance(callback, type) else callback
        is_valid = isinstance(callback, TrainerCallback)
        require(is_valid, "trainer.callback", "callbacks", "TrainerCallback objects", callback)
        self.callback_handler.callbacks.append(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0. Starts MPI."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its host. Starts MPI."""
        return bool(self.accelerator.is_local_main_process)

    def end(self, *_: Any, **__: Any) -> None:
        """Do nothing: each run has ended its trackers."""

    init_hf_repo = store_flos = end

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Say what writes a model card; scripts call this on rank 0 only."""
        write_line(
            f"no model card yet: `hetero-mpi export {self.args.output_dir} OUT` writes a model or adapter with one"
        )

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__.removeprefix("Dataset")
        reasons = [*trainer_arguments.unsupported_members([name]), (name, f"it has {', '.join(dir(self))}")]
        raise AttributeError(f"{kind} has no {name!r}: {reasons[0][1]}")


class TrainerEvents:
    """Keeps the state of a trainer and calls its callbacks with ``args``.

    It logs every ``log_every`` steps (0: never). ``max_steps`` is 0 if unknown.
    """

    pop_callback, remove_callback = CallbackHandler.pop_callback, CallbackHandler.remove_callback

    def __init__(self, args: Any, log_every: int, log_first: bool, max_steps: int) -> None:
        self._args, self._log_every, self._log_first = args, log_every, log_first
        self.callbacks: list[Any] = []
        self.begin(0, max_steps)

    def begin(self, rank: int, max_steps: int) -> None:
        """Prepare for a run with an empty log."""
        first = rank == 0
        self.state = TrainerState(max_steps=max_steps, is_world_process_zero=first, is_local_process_zero=first)
        self._control, self._losses, self._checkpoints = TrainerControl(), list[float](), list[Path]()
        self._begins_epoch = True

    def on_step(self, step: Step, sets: Sequence[str]) -> None:
        """Pass a completed step on. Raises StopTraining if a callback stops the run. ``sets``: names of the evaluation sets."""
        epoch = step.epoch or 0.0
        ends_epoch = int(epoch) > int(self.state.epoch or 0)
        if self._begins_epoch:
            self.call("on_epoch_begin")
        self.call("on_step_begin")
        self.state, self._begins_epoch = replace(self.state, global_step=step.step, epoch=epoch), ends_epoch
        self._losses.append(step.loss)
        self.call("on_step_end")
        if ends_epoch:
            self.call("on_epoch_end")
        is_due = bool(self._log_every) and step.step % self._log_every == 0
        if is_due or self._control.should_log or (self._log_first and step.step == 1):
            values = {"loss": statistics.fmean(self._losses), "grad_norm": step.grad_norm, "learning_rate": step.lr}
            self._losses.clear()
            self.log(values | step.rewards())
        for evaluation in step.evaluations:
            self.on_evaluate(evaluation, sets)
        self._call_on_save()
        if self._control.should_evaluate or self._control.should_save:
            write_line("should_evaluate and should_save of callbacks have no effect: set eval_steps and save_steps")
        stops, self._control = self._control.should_training_stop, TrainerControl()
        if stops:
            raise StopTraining

    def set_step(self, step: int, epoch: float | None) -> None:
        """Set the number of completed steps."""
        self.state = replace(self.state, global_step=step, epoch=epoch)

    def on_checkpoint(self, path: Path) -> None:
        """Note a complete checkpoint, which may be that of an earlier step."""
        self._checkpoints.append(path)
        if self.state.is_world_process_zero:
            link_checkpoints(path.parent.parent)
        if step_of(path) == self.state.best_global_step:
            self.state = replace(self.state, best_model_checkpoint=str(checkpoint_folder(path)))

    def on_evaluate(self, evaluation: Evaluation, sets: Sequence[str], prefix: str = "eval") -> dict[str, float]:
        """Log an evaluation, note whether it is the best, and return it by transformers' names."""
        main, *names = [f"{prefix}_{name}".removesuffix("_") for name in sets or [""]]
        named = {"loss": evaluation.loss, "mean_token_accuracy": evaluation.token_accuracy} | evaluation.rewards()
        values = {f"{main}_{name}": value for name, value in named.items() if value is not None}
        losses = evaluation.sets or {}
        values |= {f"{name}_loss": losses[key] for name, key in zip(names, sets[1:], strict=True)}
        values = self.log(values)
        self.call("on_evaluate", metrics=values)
        if self.state.best_metric is None or evaluation.loss < self.state.best_metric:
            paths = [str(checkpoint_folder(path)) for path in self._checkpoints if step_of(path) == evaluation.step]
            best = {"best_global_step": evaluation.step, "best_model_checkpoint": paths[0] if paths else None}
            self.state = replace(self.state, best_metric=evaluation.loss, **best)
        return values

    def log(self, values: dict[str, float], start_time: float | None = None) -> dict[str, float]:
        """Add values to ``state.log_history``, pass them on, and return them with the epoch."""
        values = {**values, "epoch": self.state.epoch}
        self.state.log_history.append({**values, "step": self.state.global_step})
        self.call("on_log", logs=values)
        return values

    def end(self, result: TrainResult, seconds: float, rows: int) -> dict[str, float]:
        """Log the end of a run of ``rows`` rows, and return its metrics by transformers' names."""
        rates = {"train_samples_per_second": rows / seconds, "train_steps_per_second": len(result.losses) / seconds}
        metrics = self.log({"train_runtime": seconds, **rates, "train_loss": result.training_loss})
        self._call_on_save()
        self.call("on_train_end")
        return metrics

    def _call_on_save(self) -> None:
        """Call ``on_save`` for each checkpoint completed since, with the state at its step."""
        now = self.state
        for step in map(step_of, self._checkpoints):
            self.set_step(step, (now.epoch or 0.0) * step / (now.global_step or step))
            self.call("on_save")
        self.state, self._checkpoints = now, []

    def call(self, event: str, **values: Any) -> None:
        """Call a method of all callbacks, on rank 0."""
        for callback in self.callbacks if self.state.is_world_process_zero else ():
            control = getattr(callback, event)(self._args, self.state, self._control, model=None, **values)
            self._control = control or self._control
