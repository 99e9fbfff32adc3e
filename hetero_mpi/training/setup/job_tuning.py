"""The tuning that a job asks for: an adapter or all weights, what of them is frozen, and at which learning rates."""

from __future__ import annotations

import re
from dataclasses import replace

from hetero_mpi.job.rules import EIGHT_BIT, as_toml
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.job.training_tables import TrainTable
from hetero_mpi.model.adapters.adapter_tuning import adapter_tuning
from hetero_mpi.model.layer.interface import LayerChain, ParameterSpec
from hetero_mpi.model.transformers.chain import language
from hetero_mpi.model.tuning import MAGNITUDE, Tuning, full_training
from hetero_mpi.planning.types.moments import OF_OPTIMIZER
from hetero_mpi.util.errors import UserError

_LEAST = 4096
"""bitsandbytes keeps the moments of smaller parameters in fp32."""


def tuning_of(job: JobConfig, chain: LayerChain) -> Tuning:
    """The job's tuning of a model.

    :raises UserError: as ``adapter_tuning``; or a parameter that ``train`` names is none.
    """
    if job.adapter.method == "none":
        found = full_training(chain)
    else:
        nf4, double = job.model.quantization == "nf4", job.model.double_quantization
        found = adapter_tuning(language(chain), job.adapter, nf4, double)
    still = _still(job.train, found, chain)
    shares = _shares(job.train, found, still)
    found = replace(found, shares=shares, still=still, noise=job.train.neftune_noise_alpha)
    return with_moments(found, chain, job.train.optimizer)


def _shares(train: TrainTable, tuning: Tuning, still: frozenset[str]) -> dict[str, float]:
    """:attr:`Tuning.shares`: by ``learning_rates``, and else LoRA+'s. ``still``: is not trained."""
    found: dict[str, float] = {}
    for pattern, rate in (train.learning_rates or {}).items():
        own = _named("learning_rates", pattern, tuning) - found.keys()
        if own <= still:
            told = "is found in no parameter that is trained and that none before it is found in"
            raise UserError(
                "train.learning_rates",
                f"[train] learning_rates: {as_toml(pattern)} {told}: put it first, or leave it out",
            )
        found |= dict.fromkeys(own, rate / train.learning_rate)
    if train.lora_plus_ratio != 1:
        later = [name for name in tuning.trainable if ".lora_B." in name or name.endswith(MAGNITUDE)]
        found = dict.fromkeys(later, train.lora_plus_ratio) | found
    return found


def _still(train: TrainTable, tuning: Tuning, chain: LayerChain) -> frozenset[str]:
    """:attr:`Tuning.still`."""
    found, blocks = set[str](), chain.layer_count - 2
    for entry in train.freeze:
        if isinstance(entry, str):
            found |= _named("freeze", entry, tuning)
        elif entry < blocks:
            found |= {name for name, spec in tuning.trainable.items() if spec.layer == entry + 1}
        else:
            raise UserError(
                "train.freeze",
                f"[train] freeze: this model has no block {entry}; the first is 0, the last {blocks - 1}",
            )
    if chain.tied is not None and not found.isdisjoint(chain.tied):
        raise UserError(
            "train.freeze",
            f"[train] freeze: {chain.tied[1]} is the matrix of the head, too, and is trained: name others",
        )
    if found >= tuning.trainable.keys():
        raise UserError("train.freeze", "[train] freeze: nothing is left to train; name fewer parameters")
    return frozenset(found)


def _named(key: str, pattern: str, tuning: Tuning) -> set[str]:
    """The trained tensors in whose names a pattern is found. Raises UserError: there are none."""
    found = {name for name in tuning.trainable if re.search(pattern, name)}
    if not found:
        some = ", ".join(list(tuning.trainable)[:3])
        raise UserError(
            "train.pattern",
            f"[train] {key}: {as_toml(pattern)} is found in no name of a trained parameter, such as {some}",
        )
    return found


def with_moments(tuning: Tuning, chain: LayerChain, optimizer: str) -> Tuning:
    """The tuning with what an optimizer keeps. In 8 bits: where bitsandbytes and transformers' Trainer keep it so, not of small
    tensors, nor of embeddings. Muon: steps matrices between the embedding and the head; biases and norms are none."""

    def own(spec: ParameterSpec) -> bool:
        if optimizer == EIGHT_BIT:
            return spec.count >= _LEAST and spec.name not in chain.embeddings
        inside = 0 < spec.layer < chain.layer_count - 1 and spec.name not in chain.embeddings
        return optimizer == "adafactor" or (inside and len(spec.shape) == 2 and chain.decays(spec.name))

    if optimizer == "adamw":
        return tuning
    names = [name for name, spec in tuning.trainable.items() if own(spec)]
    return replace(tuning, optimizer=optimizer, moments=dict.fromkeys(names, OF_OPTIMIZER[optimizer][-1]))
