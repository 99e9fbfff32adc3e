"""What is trained, and how the rest is held: everything (full training), or LoRA adapters over frozen, perhaps NF4, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetero_mpi.errors import UserError
from hetero_mpi.job.load import AdapterTable, JobConfig
from hetero_mpi.job.rules import EIGHT_BIT
from hetero_mpi.model.adapter import adapted
from hetero_mpi.model.layer.interface import LayerChain, ParameterSpec
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta, language

_UNPACKABLE = {
    "longcat_flash": "has routers that read the matrix of a linear layer directly, which 4 bits do not allow"
}
"""Family -> why its linear layers cannot be packed."""
_LEAST = 4096
"""bitsandbytes keeps the moments of smaller parameters in fp32."""


@dataclass(frozen=True)
class Tuning:
    """The trained tensors of a whole model and the state of the others; the same on every rank."""

    trainable: dict[str, ParameterSpec]
    """Name -> trained tensor, in the model's order. Adapter tensors bear their names in adapter files, without the prefix."""
    constants: dict[str, ParameterSpec] = field(default_factory=dict)
    """Name -> tensor that is never trained but belongs into checkpoints and model directories (full training only)."""
    adapter: AdapterTable | None = None
    """None: full training."""
    modules: tuple[tuple[int, str], ...] = ()
    """(layer, full name) of every adapted linear layer."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Full name of each adapted parameter of fused experts -> what the names of its adapter's tensors begin with."""
    nf4: bool = False
    """Linear layers and fused experts of blocks are held in NF4."""
    double: bool = True
    """The scales of NF4 weights are quantised too."""
    frozen: bool = False
    """Nothing is trained: the model is only used."""
    eight_bit: frozenset[str] = frozenset()
    """Names of trained tensors whose moments are kept in blocks of 8 bits."""

    @property
    def full(self) -> bool:
        return self.adapter is None and not self.frozen

    def modules_in(self, first: int, last: int) -> list[str]:
        return [name for layer, name in self.modules if first <= layer < last]

    def specs(self, first: int, last: int) -> list[ParameterSpec]:
        return [spec for spec in self.trainable.values() if first <= spec.layer < last]

    def adapted_tensors(self, chain: LayerChain, first: int, last: int) -> dict[str, str]:
        """Adapted tensor of the model -> what the names of its adapter's tensors begin with."""
        found = {f"{name}.weight": name for name in self.modules_in(first, last)}
        return found | {n: wrapper for n, wrapper in self.parameters.items() if first <= chain.layer_of(n) < last}

    def suffixes(self) -> list[str]:
        """Last parts of the adapted modules' names, as adapter configurations list them."""
        return sorted({name.rpartition(".")[2] for _, name in self.modules})

    def uses_dropout(self, chain: LayerChain) -> bool:
        return chain.draws() or (self.adapter is not None and self.adapter.dropout > 0)


def full_training(chain: LayerChain) -> Tuning:
    return Tuning(dict(chain.parameters), dict(chain.constants))


def nothing_trained() -> Tuning:
    """A model that is only used: no gradients, no masters."""
    return Tuning({}, frozen=True)


def tuning_of(job: JobConfig, chain: LayerChain) -> Tuning:
    """The job's tuning of a model.

    :raises UserError: as ``adapter_tuning``.
    """
    if job.adapter.method == "none":
        found = full_training(chain)
    else:
        nf4, double = job.model.quantization == "nf4", job.model.double_quantization
        found = adapter_tuning(language(chain), job.adapter, nf4, double)
    return in_eight_bit(found, chain) if job.train.optimizer == EIGHT_BIT else found


def in_eight_bit(tuning: Tuning, chain: LayerChain) -> Tuning:
    """The tuning with moments in 8 bits where bitsandbytes and transformers' Trainer keep them so: not of small tensors, nor of
    embeddings."""
    large = {name for name, spec in tuning.trainable.items() if spec.count >= _LEAST}
    return replace(tuning, eight_bit=frozenset(large - chain.embeddings()))


def adapter_tuning(chain: TransformersChain, adapter: AdapterTable, nf4: bool, double: bool) -> Tuning:
    """An adapter over frozen weights.

    :raises UserError: the adapter's targets match nothing, or lie outside the blocks; or the family cannot be packed.
    """
    if nf4 and chain.name in _UNPACKABLE:
        raise UserError(f'[model] quantization = "nf4": {chain.name} {_UNPACKABLE[chain.name]}; set it to "none"')
    found = adapted(build_on_meta(chain.config), adapter)
    outside = [name for name in found.modules if not name.startswith(f"{chain.blocks_name}.")]
    if outside:
        raise UserError(
            f"[adapter] targets = {adapter.targets!r} match {outside[0]}, which is not inside a block; "
            f"adapt linear layers of blocks only"
        )
    trainable = {name: ParameterSpec(name, chain.layer_of(name), shape) for name, shape in found.shapes.items()}
    placed = tuple((chain.layer_of(name), name) for name in found.modules)
    return Tuning(trainable, {}, adapter, placed, found.parameters, nf4, double)
