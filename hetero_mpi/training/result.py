"""The result of a finished run, which all ranks receive, and the model or adapter directory, which rank 0 writes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerFast

from hetero_mpi.comm.ranks.world import World
from hetero_mpi.data.tokenizer import save_tokenizer
from hetero_mpi.engine.trainer import Trainer
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.model.adapters.adapter_files import adapter_directory, write_adapter
from hetero_mpi.model.custom.custom_chain import CustomChain
from hetero_mpi.model.files.model_directory import LayersWriter, ModelDirectoryWriter
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.profile import ClusterProfile
from hetero_mpi.planning.types.toml_files import plan_to_dict, profile_from_dict, profile_to_dict, report_from_dict
from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.logs import say
from hetero_mpi.rundir.metrics import Evaluation
from hetero_mpi.rundir.run_directory import result_step
from hetero_mpi.state.redistribute import LiveState, collect, tensor_shards
from hetero_mpi.util import units
from hetero_mpi.util.display import Displayed

_PATHS = ("run_dir", "result", "checkpoint")
"""Fields of ``TrainResult`` that are paths."""


@dataclass(frozen=True, repr=False)
class TrainResult(Displayed):
    """The results of a finished run, the same on every rank; the files are on rank 0's host."""

    run_dir: Path
    losses: tuple[float, ...]
    """Loss of every step, including those before a resumed checkpoint, in nats (mean over target tokens or samples)."""
    evaluations: tuple[Evaluation, ...]
    """Evaluations that this process has run, each with its step number."""
    step_s: float | None
    """Measured seconds per step: the median without the first two steps; None if there were too few steps."""
    report: PlanReport
    """The plan of the last step, with its predictions."""
    profile: ClusterProfile
    """The profile for which the plan was made."""
    result: Path
    """Output directory: ``model`` or ``adapter``."""
    checkpoint: Path | None
    """The newest checkpoint; None if none could be written."""
    skipped: int
    """Number of steps that were skipped because of non-finite gradients."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Speed and loss by transformers' names, such as ``train_runtime`` (seconds), for ``hetero_mpi.Trainer``."""

    @property
    def training_loss(self) -> float:
        """Mean loss of all steps."""
        return sum(self.losses) / len(self.losses)

    @property
    def global_step(self) -> int:
        """Number of completed steps, including those before a resumed checkpoint."""
        return len(self.losses)


def past_result(metadata: Mapping[str, Any], path: Path, job: JobConfig, run_dir: Path) -> TrainResult | None:
    """Return the result of the run whose last checkpoint is ``path``; None if the run is unfinished. Called on rank 0."""
    step, patience = metadata["step"], job.train.early_stopping_patience
    is_over = step == job.train.steps or 0 < patience <= (metadata.get("higher_in_a_row") or 0)
    result = run_dir / ("model" if job.adapter.method == "none" else "adapter")
    in_run_dir = path.resolve().is_relative_to(run_dir.resolve())
    if not (is_over and in_run_dir and result_step(run_dir) == step and result.is_dir()):
        return None
    run = read_run(run_dir)
    if run.report is None or run.profile is None:
        return None
    return TrainResult(
        run_dir=run_dir,
        losses=tuple(float(loss) for loss in metadata["losses"]),
        evaluations=run.metrics.evaluations,
        step_s=run.median_step_s(),
        report=run.report,
        profile=run.profile,
        result=result,
        checkpoint=path,
        skipped=step - metadata["updates"],
    )


def share_past_result(world: World, result: TrainResult | None) -> TrainResult | None:
    """Broadcast rank 0's result of a finished run, and tell the user that the run is finished. Collective."""
    shared = share_result(world, result)
    if shared is not None:
        say(
            f"the run is already finished: all {units.plural(len(shared.losses), 'step')} are done, and the result is in "
            f"{shared.result}. To train further, raise [train] steps (of a Trainer: max_steps or num_train_epochs); to start "
            "again, choose another run directory (--run-dir, output_dir)"
        )
    return shared


def share_result(world: World, result: TrainResult | None) -> TrainResult | None:
    """Broadcast rank 0's ``result``; None if rank 0 has none. Collective."""
    values: dict[str, Any] | None = None
    if result is not None:
        values = {
            **{name: str(value) if isinstance(value, Path) else value for name, value in vars(result).items()},
            "evaluations": [asdict(evaluation) for evaluation in result.evaluations],
            "report": plan_to_dict(result.report),
            "profile": profile_to_dict(result.profile),
        }
    values = world.broadcast_json(values)
    if values is None:
        return None
    values |= {name: Path(values[name]) for name in _PATHS if values[name] is not None}
    values["losses"] = tuple(values["losses"])
    values["evaluations"] = tuple(Evaluation(**evaluation) for evaluation in values["evaluations"])
    values["report"], values["profile"] = report_from_dict(values["report"]), profile_from_dict(values["profile"])
    return TrainResult(**values)


def save_model(
    trainer: Trainer,
    directory: Path,
    shard_bytes: int,
    tokenizer: PreTrainedTokenizerFast | None,
    generation: Mapping[str, Any] | None,
) -> None:
    """Write the model layer by layer, and its tokenizer, on rank 0. Collective. ``generation``: as in ``result_writer``."""
    listed = tensor_shards(trainer.tuning, trainer.plan, ("parameters",), trainer.dtype)
    coming = collect(trainer.rank, trainer.transport, listed, LiveState(trainer, rounded=True))
    if trainer.rank != 0:
        for _ in coming:
            pass
        return
    with result_writer(trainer.chain, directory, shard_bytes, generation) as writer:
        for _, of_layer in groupby(coming, key=lambda pair: trainer.chain.layer_of(pair[0].name)):
            writer.add({shard.name: tensor for shard, tensor in of_layer})
        if tokenizer is not None:
            save_tokenizer(tokenizer, writer.path)


def save_adapter(
    trainer: Trainer, directory: Path, base: str | None, tokenizer: PreTrainedTokenizerFast | None
) -> None:
    """Write the adapter and the tokenizer on rank 0 as a PEFT directory. Collective. ``base``: name of the base model."""
    listed = tensor_shards(trainer.tuning, trainer.plan, ("parameters",))
    coming = collect(trainer.rank, trainer.transport, listed, LiveState(trainer))
    state = {shard.name: tensor.clone() for shard, tensor in coming}
    if trainer.rank == 0:
        with adapter_directory(directory) as output:
            write_adapter(output.path, trainer.tuning, state, base)
            if tokenizer is not None:
                save_tokenizer(tokenizer, output.path)


class ResultWriter(Protocol):
    """Writes a trained model layer by layer to a directory that becomes visible when it is complete."""

    path: Path
    """Temporary directory, to which other files of the model can be added."""

    def add(self, state: dict[str, torch.Tensor]) -> None:
        """Write the next layer's parameters and constants, given in host memory."""


def result_writer(
    chain: LayerChain, directory: Path, shard_bytes: int, generation: Mapping[str, Any] | None
) -> AbstractContextManager[ResultWriter]:
    """Return a writer for the trained model of ``chain``.

    A language model is written in files of at most ``shard_bytes``, with ``generation`` as ``generation_config.json``. A custom
    model is written to ``model.safetensors`` as the state dict of a ``torch.nn.Sequential`` of its layers.
    """
    if not isinstance(chain, CustomChain):
        return ModelDirectoryWriter(language(chain).model, directory, shard_bytes, generation)
    sizes = {spec.name: spec.shape for spec in (*chain.parameters.values(), *chain.constants.values())}
    return LayersWriter(directory, [partial(chain.buffers, layer) for layer in range(chain.layer_count)], sizes)
