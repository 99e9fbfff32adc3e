"""A language model as a chain of layers: embedding, block 0 .. block L-1, head (final norm and output projection).

``base_model_pp_plan`` of transformers' configurations lists the modules before and after the blocks. The chain's own model is on
torch's meta device: it has names and shapes but takes no memory.

This module also computes initial values for modules that were on the meta device, by the family's own rules and seeded by name. A
module without such a rule is an error.
"""

import contextlib
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from hetero_mpi.model.layer.interface import Example, LayerChain, ParameterSpec, embedding_matrices, seeded
from hetero_mpi.model.layer.loss import IGNORED, Routers, summed_loss
from hetero_mpi.model.layer.quantize import unpack_experts
from hetero_mpi.model.transformers import packed_records
from hetero_mpi.model.transformers.head_slices import HeadSlices
from hetero_mpi.model.transformers.supported import MASKED_FAMILIES
from hetero_mpi.planning.types.sizes import DTYPE_BYTES, EMBEDDING, HEAD
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the full transformers model in fp32 on the meta device; buffers stored in model files become frozen parameters.

    Raises UserError if the configuration's sizes are inconsistent.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # the type depends on the failing part of the model
        raise UserError(
            "model.configuration",
            f"transformers cannot build a {config.model_type} model with this configuration ({type(error).__name__}: {error}); "
            f"correct the values in config.json, or in [model.config]",
        ) from error
    # Buffers in a model's files (a router's correction, a layer's scale) become frozen parameters, as which they are read,
    # placed, kept and written.
    in_files = model.state_dict().keys()
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if f"{prefix}.{name}" in in_files:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return model


def random_rates(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, attribute) of each non-zero rate of random numbers in training: dropout, or a router's jitter."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
        if "drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout))
    ]


class TransformersChain(LayerChain):
    """A causal language model from transformers; ``model`` is the whole model on the meta device.

    Blocks with equal shapes and attention type are of the same kind. If ``dropout`` is false, it is off whatever ``config`` says.
    """

    def __init__(self, config: PreTrainedConfig, dropout: bool = True) -> None:
        self.config, self._dropout = config, dropout
        self.name, self.logits = config.model_type, config.vocab_size
        self._fp32_names: dict[torch.dtype, set[str]] = {}
        self.model = self._build()
        plan = self.model._pp_plan or {}
        base = self.model.base_model_prefix
        inner = [name for name in plan if name.startswith(f"{base}.")]
        outer = [name for name in plan if not name.startswith(f"{base}.")]
        modules = dict(self.model.named_modules())
        lists = [name for name in inner if isinstance(modules.get(name), nn.ModuleList)]
        if len(lists) != 1 or not outer:
            raise UserError(
                "model.no_pipeline_plan",
                f"transformers declares no pipeline plan for the {self.name} family that hetero_mpi can use",
            )
        self._layer_norms = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.LayerNorm))
        self.blocks_name = lists[0]
        position = inner.index(self.blocks_name)
        self.before_names = tuple(inner[:position])
        self.after_names = tuple(inner[position + 1 :] + outer)
        self.blocks = len(self.model.get_submodule(self.blocks_name))
        self.layer_count = self.blocks + 2
        self.summary = f"{self.name}, {units.plural(self.blocks, 'block')}"
        self.embeddings, self.draws = embedding_matrices(self.model), bool(random_rates(self.model))
        self.tied = self._tied_pair()
        spec_and_trained = {
            name: (ParameterSpec(name, self.layer_of(name), tuple(parameter.shape)), parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
            if self.tied is None or name != self.tied[0]
        }
        self.routers = self._routers()
        self.parameters = {name: spec for name, (spec, trained) in spec_and_trained.items() if trained}
        self.constants = {name: spec for name, (spec, trained) in spec_and_trained.items() if not trained}
        self._refuse_strays()
        self.kinds = self._kinds()

    def module_names(self, layer: int) -> tuple[str, ...]:
        if layer == 0:
            return self.before_names
        if layer == self.layer_count - 1:
            return self.after_names
        return (f"{self.blocks_name}.{layer - 1}",)

    def layer_of(self, name: str) -> int:
        if name.startswith(f"{self.blocks_name}."):
            return int(name[len(self.blocks_name) + 1 :].split(".", 1)[0]) + 1
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in self.before_names):
            return 0
        return self.layer_count - 1

    def dtype_of(self, name: str, compute: torch.dtype) -> torch.dtype:
        """Return a tensor's dtype if the model's dtype is ``compute``; some families keep routers and decay rates in fp32."""
        if compute == torch.float32:
            return compute
        if compute not in self._fp32_names:
            with torch.device("meta"):
                narrow = AutoModelForCausalLM.from_config(self.config, dtype=compute)
            patterns = [pattern.replace("*", ".*") for pattern in narrow._get_dtype_plan(compute)]
            self._fp32_names[compute] = {
                name
                for name, tensor in narrow.state_dict().items()
                if tensor.dtype == torch.float32 or any(re.search(pattern, name) for pattern in patterns)
            }
        return torch.float32 if name in self._fp32_names[compute] else compute

    def decays(self, name: str) -> bool:
        """Return whether weight decay applies, by the name rules of transformers' ``Trainer``: not to biases and norms."""
        return _NOT_DECAYED.search(name.lower()) is None and not name.startswith(self._layer_norms)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.config.to_dict())

    def _build(self) -> PreTrainedModel:
        model = build_on_meta(self.config)
        for module, name in random_rates(model) if not self._dropout else ():
            if "jitter" not in name:
                setattr(module, name, 0.0)
        return model

    def frame(self) -> PreTrainedModel:
        model = self._build()
        packed_records.install_rotary(model)
        model.get_output_embeddings().register_forward_pre_hook(_align_rows)
        return model

    def vacate(self, model: nn.Module, layer: int) -> None:
        for name in self.module_names(layer):
            for module in model.get_submodule(name).modules():
                materialize(module)

    def initialise(self, model: Any, layer: int, seed: int) -> None:
        """Initialise meta parameters in fp32 host memory by the family's rules, seeded by (seed, module name)."""
        for root in self.module_names(layer):
            for name, module in model.get_submodule(root).named_modules(prefix=root):
                names = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
                if not names or (self.tied is not None and names == [self.tied[0]]):
                    continue  # a tied head takes the embedding's values
                materialize(module)
                _fill_with_nan(module.named_parameters(recurse=False))
                with seeded(seed, name), torch.no_grad():
                    model._init_weights(module)
                for leaf, parameter in module.named_parameters(recurse=False):
                    message = (
                        f"{name}.{leaf}: transformers gives the {self.name} family no rule to initialise it; start "
                        f"from a model directory instead ([model] path; transformers' from_config and save_pretrained write one)"
                    )
                    _require_value(parameter, message)

    def restore_buffers(self, model: Any, device: torch.device) -> None:
        """Compute the buffers that no file stores (rotary frequencies, embedding scale) by the family's own rules."""
        for module in model.modules():
            buffers = [(name, b) for name, b in module.named_buffers(recurse=False) if b is not None and b.is_meta]
            if not buffers:
                continue
            for name, buffer in buffers:
                module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype), persistent=False)
            _fill_with_nan(module.named_buffers(recurse=False))
            # Parameters of this module hold their start already: transformers' initialisers leave flagged tensors alone.
            flagged = list(module.parameters(recurse=False))
            for parameter in flagged:
                parameter._is_hf_initialized = True
            with torch.no_grad():
                model._init_weights(module)
            for name, _ in buffers:
                message = f"transformers gives the {self.name} family no rule to compute its buffer {name}"
                _require_value(getattr(module, name), message)
                module.register_buffer(name, getattr(module, name).to(device), persistent=False)

    def recompute(self, model: nn.Module, enabled: bool) -> None:
        """Enable or disable activation checkpointing of blocks; random states are saved only for models with dropout."""
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        draws = bool(random_rates(model))
        unpack_experts(model, not enabled, draws)
        if enabled:
            getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False, "preserve_rng_state": draws})
        else:
            getattr(model, f"{kind}_checkpointing_disable")()

    def run(self, model: nn.Module, first: int, last: int, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Map token ids (B, T) or hidden states (B, T, D) to hidden states or, on the last stage, to logits (B, T, V)."""
        inputs = {"input_ids": x} if first == 0 else {"inputs_embeds": x}
        keywords.setdefault("use_cache", False)
        if self.routers is not None:
            keywords["output_router_logits"] = False  # transformers would compute the loss of the routers that are here
        if last < self.layer_count:
            return model.base_model(**inputs, **keywords).last_hidden_state
        return model(**inputs, **keywords).logits

    def attention(self, records: list[list[int]] | None, repeats: bool) -> contextlib.AbstractContextManager[None]:
        return packed_records.attention(records, repeats)

    def isolation(self, x: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
        if positions is None:
            return {}
        keywords: dict[str, Any] = {"position_ids": positions}
        if self.name in MASKED_FAMILIES:
            hidden = x if x.is_floating_point() else torch.empty((*x.shape, 0), device=x.device)
            mask_arguments = self.config, hidden, None, None, positions
            keywords["attention_mask"] = {
                "full_attention": create_causal_mask(*mask_arguments),
                "sliding_attention": create_sliding_window_causal_mask(*mask_arguments),
            }
        return keywords

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed cross-entropy of logits (B, T, V) for the targets (B, T) that are not ``IGNORED``."""
        return summed_loss(outputs, targets)

    def sliced_head(self, model: nn.Module, dtype: str, share: Any) -> HeadSlices:
        return HeadSlices(self, DTYPE_BYTES[dtype] * self.config.vocab_size, model, share)

    def boundary(self, layer: int, rows: int, length: int) -> tuple[int, ...]:
        width = self.config.hidden_size
        return rows, length + (self.routers.places(width) if self.routers is not None else 0), width

    def example(self, first: int, last: int, rows: int, length: int, dtype: torch.dtype) -> Example:
        tokens = torch.arange(math.prod((rows, length))).view(rows, length) % self.config.vocab_size
        hidden = torch.full(self.boundary(first, rows, length), 0.01, dtype=dtype)
        hidden += torch.linspace(0, 1, hidden.shape[-1], dtype=dtype)
        targets, gradient = (tokens, None) if last == self.layer_count else (None, torch.full_like(hidden, 1e-3))
        return tokens if first == 0 else hidden, targets, gradient

    def length(self, inputs: NDArray[Any]) -> int:
        return int(inputs.shape[1])

    def counted(self, targets: NDArray[Any]) -> int:
        return int(np.count_nonzero(targets != IGNORED))

    def _routers(self) -> Routers | None:
        if not getattr(self.config, "output_router_logits", False):
            return None
        model: Any = self.model
        recorder = model.base_model._can_record_outputs["router_logits"]
        names = tuple(name for name, module in model.named_modules() if isinstance(module, recorder.target_class))
        return Routers(names, recorder.index, model.num_experts, model.num_experts_per_tok, model.router_aux_loss_coef)

    def _tied_pair(self) -> tuple[str, str] | None:
        pairs = dict(self.model.all_tied_weights_keys)
        if not pairs:
            return None
        if len(pairs) > 1:
            raise UserError(
                "model.tied",
                f"hetero_mpi can tie the output projection to the embedding, but this {self.config.model_type} model ties "
                f"{len(pairs)} pairs: {pairs}",
            )
        return next(iter(pairs.items()))

    def _refuse_strays(self) -> None:
        """Reject parameters outside all layers, which no rank would train."""
        prefixes = tuple(f"{name}." for name in (*self.before_names, self.blocks_name, *self.after_names))
        strays = [name for name in (*self.parameters, *self.constants) if not name.startswith(prefixes)]
        if strays:
            raise UserError(
                "model.stray_parameters",
                f"parameters outside the pipeline plan of {self.config.model_type}: {', '.join(strays[:5])}",
            )

    def _kinds(self) -> tuple[str, ...]:
        layer_types = getattr(self.config, "layer_types", None) or ["block"] * self.blocks
        signatures: dict[tuple, str] = {}  # type: ignore[type-arg]
        kinds = []
        for index in range(self.blocks):
            prefix = f"{self.blocks_name}.{index}."
            shapes = tuple((n[len(prefix) :], s.shape) for n, s in self.parameters.items() if n.startswith(prefix))
            signature = (layer_types[index], shapes)
            if signature not in signatures:
                same_type = sum(signature_of_kind[0] == layer_types[index] for signature_of_kind in signatures)
                signatures[signature] = layer_types[index] + (f"_{same_type + 1}" if same_type else "")
            kinds.append(signatures[signature])
        return (EMBEDDING, *kinds, HEAD)


def _align_rows(head: nn.Module, arguments: tuple[torch.Tensor]) -> torch.Tensor:
    """Give the head's input (B, T, D) the strides of contiguous rows; a forward pre-hook.

    For the strides of a slice of a sequence, torch runs a batched matrix product, and a CPU copies a frozen head's weight.
    """
    return arguments[0].reshape(-1, arguments[0].shape[-1]).view(arguments[0].shape)


def language(chain: LayerChain) -> TransformersChain:
    """Return the chain as a language model, for what only language models support: adapters, emulation, text generation."""
    assert isinstance(chain, TransformersChain), f"{chain.name} is not a language model"
    return chain


def materialize(module: nn.Module) -> None:
    """Replace meta parameters held directly by ``module`` with uninitialised host tensors, in fp32 unless they are integers."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.device.type == "meta":
            dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype), parameter.requires_grad))


def _fill_with_nan(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill with NaN, so that values which are never initialised can be detected."""
    for _, tensor in tensors:
        if tensor.is_floating_point():
            tensor.detach().fill_(math.nan)


def _require_value(tensor: torch.Tensor, message: str) -> None:
    if tensor.is_floating_point() and math.isnan(tensor.detach().sum().item()):
        raise UserError("model.no_initial_value", message)
