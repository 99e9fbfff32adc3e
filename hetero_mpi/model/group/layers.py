"""A tensor-parallel rank's part of a stage: tensor shards, local experts, the vocabulary-parallel loss, and the exchanges.

    token ids -> sharded lookup, all-reduce -> blocks, each: attention shard, all-reduce, MLP shard, all-reduce
              -> logits of the local tokens -> all-reduce of (maximum, sum of exponentials, target's logit) -> loss

Experts: each rank runs its experts on all tokens routed to them. Every rank computes the router, as in transformers' expert
parallelism. Since devices may round near ties differently, all ranks use the leader's choices.

Loss: each rank has the logits of its vocabulary shard. Only three numbers per target are exchanged, and none for the gradient.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetero_mpi.model.group.division import (
    Trained,
    containers,
    divisions,
    expert_modules,
    is_attention,
    norms_over_heads,
    rowwise,
)
from hetero_mpi.model.group.exchanges import GroupLink, StageGroup, anchored, entered, left, replace_forward
from hetero_mpi.model.group.refusals import refusal
from hetero_mpi.model.group.tensor_division import Holding
from hetero_mpi.model.group.whole_layers import adapted_across, join_adapter, norm_over_members, start_magnitude
from hetero_mpi.model.layer.loss import IGNORED, piece_size
from hetero_mpi.model.layer.quantize import double_scales, packed_weights
from hetero_mpi.model.transformers.chain import TransformersChain


class DividedLayers:
    """Implements ``LayerShare`` for a stage: this rank's shards, exchanges and loss functions."""

    def __init__(self, chain: TransformersChain, tuning: Trained, group: StageGroup) -> None:
        reason = refusal(chain, tuning, group.shares, group.experts)
        assert reason is None and len(group.shares) == group.link.size, reason
        self._chain, self._link = chain, group.link
        self._frozen = bool(tuning.still)
        self._divisions = divisions(chain, tuning, group.shares, range(chain.layer_count), group.experts)
        model = chain.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        self._embedding, self._head = names[embedding], names[head]
        self._first_token = self._divisions[f"{self._embedding}.weight"].bounds[group.link.member]
        """First token id of this rank's vocabulary shard."""
        # ``endswith`` of an empty tuple is False.
        self._expert_modules = tuple(f".{name}" for name in expert_modules(chain))
        self._norms = tuple(f".{name}" for name in norms_over_heads(chain))

    @property
    def leads(self) -> bool:
        return self._link.member == 0

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._divisions[name].part(tensor, self._link.member)

    def exists(self, name: str) -> bool:
        return self._divisions[name].exists(self._link.member)

    def trains(self, name: str) -> bool:
        return self._divisions[name].trains(self._link.member)

    def double_scales(self, block: str, module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Map the name of each packed, sharded tensor of a block to the NF4 scales of this rank's shard.

        The full tensor is double-quantized, because shard bounds may lie within the 256 blocks that share a second-level scale.

        Args:
            block: name of the block in the model.
            module: the block before sharding.
        """
        scales = {}
        for name, weight in packed_weights(module).items():
            division = self._divisions[f"{block}.{name}"]
            if division.cut and division.exists(self._link.member):
                scales[name] = division.of_blocks.part(double_scales(weight, dtype), self._link.member)
        return scales

    def cut(self, model: nn.Module, layer: int) -> None:
        """Replace a full layer in host memory by this rank's shards."""
        for root in self._chain.module_names(layer):
            for path, module in model.get_submodule(root).named_modules(prefix=root):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    full = f"{path}.{name}"
                    if full in self._divisions and parameter.device.type != "meta":
                        part = self.shard(full, parameter.detach())
                        setattr(module, name, nn.Parameter(part, parameter.requires_grad))
        self.fit(model, layer)

    def fit(self, model: nn.Module, layer: int) -> None:
        """Set the sizes of a layer's modules to those of their shards, and remove tensors that only the leader holds."""
        for root in self._chain.module_names(layer):
            for path, module in model.get_submodule(root).named_modules(prefix=root):
                for name, _ in list(module.named_parameters(recurse=False)):
                    division = self._divisions.get(f"{path}.{name}")
                    if division is not None and division.holding is Holding.LEADER and not self.leads:
                        setattr(module, name, None)
                # Empty modules keep their sizes: they are not computed, and peft rejects adapters of width 0.
                if type(module) is nn.Linear and module.weight.numel():
                    module.out_features, module.in_features = module.weight.shape
                if isinstance(module, nn.Embedding):
                    self._fit_embedding(module)
                if path.endswith(self._expert_modules):
                    module.num_experts = self._experts(path)[1]
                    module._is_expert_parallel = True

    def _experts(self, path: str) -> tuple[int, int]:
        """Return (index of the first expert, number of experts) of this rank in a module of fused experts."""
        bounds = next(division.bounds for name, division in self._divisions.items() if name.rpartition(".")[0] == path)
        first, end = bounds[self._link.member : self._link.member + 2]
        return first, end - first

    def _fit_embedding(self, embedding: nn.Embedding) -> None:
        embedding.num_embeddings = len(embedding.weight)
        if embedding.padding_idx is not None:  # the token whose vector is not trained
            index = embedding.padding_idx - self._first_token
            embedding.padding_idx = index if 0 <= index < embedding.num_embeddings else None

    def connect(self, model: nn.Module, first: int, last: int) -> None:
        """Register the exchanges before and after the sharded modules of layers ``[first, last)``."""
        has_no_tokens = not self.exists(f"{self._embedding}.weight")
        if first == 0:
            embedding: Any = model.get_submodule(self._embedding)
            if has_no_tokens:
                weight = embedding.weight
                replace_forward(embedding, lambda ids: weight.new_zeros((*ids.shape, weight.shape[1])))
            size = len(embedding.weight)
            embedding.forward = partial(_sharded_lookup, embedding.forward, self._first_token, size, self._link)
            if self._frozen:  # else only the leader's backward, which trains norms, reaches the exchanges
                embedding.register_forward_hook(_require_gradient)
        for layer in range(max(first, 1), min(last, self._chain.layer_count - 1)):
            (name,) = self._chain.module_names(layer)
            self._connect_block(model.get_submodule(name))
            self._skip_empty_shards(name, model.get_submodule(name))
            for path, module in model.get_submodule(name).named_modules(prefix=name):
                if path.endswith(self._norms):
                    width = self._divisions[f"{path}.weight"].bounds[-1]
                    narrow = "olmo" not in self._chain.name
                    module.forward = partial(norm_over_members, module, width, self._link, narrow)
                if path.endswith(self._expert_modules):
                    ExpertShare(*self._experts(path), self._link).connect(module)
        for _, adapted, division in adapted_across(model, self._divisions):
            join_adapter(adapted, division, self._link)
        if last == self._chain.layer_count:
            head = model.get_submodule(self._head)
            if has_no_tokens:
                replace_forward(head, lambda x: x.new_zeros((*x.shape[:-1], 0)))
            head.register_forward_pre_hook(lambda _, arguments: (entered(arguments[0], self._link), *arguments[1:]))

    def start_magnitudes(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Map each row-parallel adapted layer to its initial DoRA magnitudes. Collective."""
        magnitudes = {
            path: start_magnitude(layer, self._link) for path, layer, _ in adapted_across(model, self._divisions)
        }
        return {path: value for path, value in magnitudes.items() if value is not None}

    def _connect_block(self, block: nn.Module) -> None:
        entrance = _Entrance(self._link)
        for container in (block.get_submodule(name) for name in containers(self._chain) if hasattr(block, name)):
            container.register_forward_pre_hook(partial(_enter_sharded, entrance), with_kwargs=True)
            container.register_forward_hook(partial(_leave_sharded, self._link))
        block.register_forward_hook(entrance.forget, always_call=True)

    def _skip_empty_shards(self, name: str, block: nn.Module) -> None:
        """Make attention and MLPs return zeros if this rank has no shard of them."""
        for local in rowwise(self._chain):
            if f"{name}.{local}.weight" in self._divisions and not self.exists(f"{name}.{local}.weight"):
                inner = local.rpartition(".")[0]
                zeros = partial(_zeros, block.get_submodule(local))
                replace_forward(block.get_submodule(inner), zeros, pair=is_attention(inner))

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss, as ``chain.loss`` does, from the logits of this rank's vocabulary shard."""
        return divided_summed_loss(logits, targets, self._first_token, self._link)

    def target_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each target; see ``layer.loss.target_losses``."""
        return divided_target_losses(logits, targets, self._first_token, self._link)

    def likeliest(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the number of targets that have the largest logit; see ``layer.loss.likeliest``."""
        rows, largest = logits.flatten(0, 1), torch.full((targets.numel(),), -torch.inf, device=logits.device)
        places, is_local = _local_targets(targets.flatten(), self._first_token, logits.shape[-1])
        target_logits = largest
        if rows.shape[1]:
            target_logits, largest = rows.gather(1, places.unsqueeze(1)).squeeze(1).float(), rows.max(1).values.float()
        return self._link.sum((is_local & (target_logits == self._link.maximum(largest))).float()).sum()


class _Entrance:
    """Entry of hidden states to a block's sharded modules. Parallel attention and MLP share one all-reduce of the gradient."""

    def __init__(self, link: GroupLink) -> None:
        self._link = link
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None

    def forget(self, *_: object) -> None:
        self._latest = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self._latest is None or self._latest[0] is not x:
            self._latest = x, entered(x, self._link)
        return self._latest[1]


def _enter_sharded(entrance: _Entrance, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Forward pre-hook of sharded modules: pass hidden states through the entry exchange."""
    if arguments:
        return (entrance.enter(arguments[0]), *arguments[1:]), keywords
    return arguments, {**keywords, "hidden_states": entrance.enter(keywords["hidden_states"])}


def _leave_sharded(link: GroupLink, module: nn.Module, arguments: object, output: Any) -> Any:
    """Forward hook of sharded modules: all-reduce the output. Attention weights, the second output of attention, are unused."""
    return (left(output[0], link), *output[1:]) if isinstance(output, tuple) else left(output, link)


def _zeros(last: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a row-parallel layer without columns: zeros, plus the bias on the rank that adds it."""
    zeros, bias = torch.zeros_like(x), last.bias
    return zeros if bias is None else zeros + bias


def _sharded_lookup(
    lookup: Callable[[torch.Tensor], torch.Tensor], first: int, tokens: int, link: GroupLink, ids: torch.Tensor
) -> torch.Tensor:
    """Return the embeddings of ``ids``: each rank looks up its own tokens, uses zeros for all others, and all-reduces."""
    local_ids = ids - first
    foreign = (local_ids < 0) | (local_ids >= tokens)
    return left(lookup(local_ids.clamp(0, tokens - 1)).masked_fill(foreign.unsqueeze(-1), 0.0), link)


def _require_gradient(module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
    """Make the output require a gradient, so that every exchange also takes place in backward."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


class ExpertShare:
    """Experts [first, first + count) of a layer. Called with hidden states (N, D), expert choices (N, K) and weights (N, K)."""

    def __init__(self, first: int, count: int, link: GroupLink) -> None:
        self._first, self._count, self._link = first, count, link

    def connect(self, experts: nn.Module) -> None:
        experts.register_forward_pre_hook(self._choose)
        experts.register_forward_hook(_anchor)
        if self._count == 0:
            replace_forward(experts, torch.zeros_like)

    def _choose(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Map choices of other ranks' experts to index ``count``, which transformers' kernels skip."""
        hidden_states, choices, weights, *rest = arguments
        with torch.no_grad():  # all members take the leader's choices; indices of experts are exact in fp32
            wide = torch.promote_types(weights.dtype, torch.float32)
            packed = torch.stack((choices.to(wide), weights.to(wide)))
            packed = self._link.sum(packed if self._link.member == 0 else torch.zeros_like(packed))
            difference = packed[1].to(weights.dtype) - weights
        choices, weights = packed[0].to(choices.dtype), weights + difference
        local_choices = choices - self._first
        foreign = (local_choices < 0) | (local_choices >= self._count)
        return hidden_states, local_choices.masked_fill(foreign, self._count), weights.masked_fill(foreign, 0.0), *rest


def _anchor(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Connect the output to its inputs even if no token is routed to this rank's experts."""
    return anchored(output, arguments[0], arguments[2])


def divided_summed_loss(logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
    """Sum the losses of all targets that are not ``IGNORED``: a differentiable fp32 scalar, equal on all ranks.

    Args:
        logits: (B, T, V'), for this rank's vocabulary shard.
        targets: (B, T) int64, token ids of the whole vocabulary.
        first: first token id of the shard.
    """
    losses = divided_target_losses(logits, targets, first, link).flatten()
    # Adds in the order of ``summed_loss``: each row is a vocabulary of one token.
    words = targets.flatten().clamp(max=0)
    return F.nll_loss(-losses.unsqueeze(1), words, ignore_index=IGNORED, reduction="sum")


def divided_target_losses(logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
    """Return each target's loss, (B, T) in fp32, differentiable, 0 for ``IGNORED``. Arguments: see ``divided_summed_loss``."""
    losses: torch.Tensor = _Losses.apply(logits.flatten(0, 1), targets.flatten(), first, link)
    return losses.view_as(targets)


class _Losses(torch.autograd.Function):
    """Losses of all targets, computed for a few rows of logits at a time (see ``layer.loss``)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
        largest = torch.full((len(logits),), -torch.inf, device=logits.device)
        for rows in _rows(logits):
            largest[rows] = logits[rows].max(1).values.float()
        largest = link.maximum(largest)
        exponentials, of_targets = torch.zeros_like(largest), torch.zeros_like(largest)
        words, is_local = _local_targets(targets, first, logits.shape[1])
        for rows in _rows(logits):
            shifted = logits[rows].float() - largest[rows].unsqueeze(1)
            of_targets[rows] = shifted.gather(1, words[rows].unsqueeze(1)).squeeze(1) * is_local[rows]
            exponentials[rows] = shifted.exp_().sum(1)
        summed, of_targets = link.sum(torch.stack((exponentials, of_targets))).unbind()
        logarithms = summed.log()
        ctx.save_for_backward(logits, words, is_local, targets, largest + logarithms)
        return torch.where(targets == IGNORED, 0.0, logarithms - of_targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, words, is_local, targets, norms = ctx.saved_tensors
        factors = (gradient * (targets != IGNORED)).unsqueeze(1)
        result = torch.empty_like(logits)
        for rows in _rows(logits):
            likelihoods = (logits[rows].float() - norms[rows].unsqueeze(1)).exp_().mul_(factors[rows])
            likelihoods.scatter_add_(1, words[rows].unsqueeze(1), -factors[rows] * is_local[rows].unsqueeze(1))
            result[rows] = likelihoods
        return result, None, None, None


def _local_targets(targets: torch.Tensor, first: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (each target's index in this rank's vocabulary shard, clamped; whether the target is in the shard)."""
    places = targets - first
    return places.clamp(0, words - 1), (places >= 0) & (places < words)


def _rows(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the rows to compute at a time; yield nothing on a rank without vocabulary."""
    if logits.shape[1] == 0:
        return
    size = max(1, piece_size(logits.numel(), logits.is_cpu) // logits.shape[1])
    yield from (slice(begin, begin + size) for begin in range(0, len(logits), size))
