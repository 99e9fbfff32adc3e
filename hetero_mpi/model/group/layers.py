"""A member's share of a stage: its parts of the tensors, its experts, its words of the loss, and the exchanges where shares begin
and end.

Experts: each member runs its own on all tokens that chose them. Everybody computes the router, as in transformers' own expert
parallelism; unlike devices may round near ties differently, so the leader's choices count.

Loss: each member has the logits of some words only. Of every target the members exchange three numbers: the largest logit, the
sum of the exponentials, and the target's own logit. The gradient of the logits needs no exchange.
"""

from __future__ import annotations

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
    """The answers for a stage of a group: which part of a tensor is its own, where to exchange, and what the loss is."""

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
        self._words = self._divisions[f"{self._embedding}.weight"].bounds[group.link.member]
        """The first of this member's words."""
        # An empty tuple ends no path.
        self._expert_modules = tuple(f".{name}" for name in expert_modules(chain))
        self._norms = tuple(f".{name}" for name in norms_over_heads(chain))

    @property
    def leads(self) -> bool:
        return self._link.member == 0

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This member's part of a tensor."""
        return self._divisions[name].part(whole, self._link.member)

    def exists(self, name: str) -> bool:
        return self._divisions[name].exists(self._link.member)

    def trains(self, name: str) -> bool:
        """Whether a trained tensor has a gradient here."""
        return self._divisions[name].trains(self._link.member)

    def double_scales(self, block: str, module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Name of each tensor in a block that is packed and cut -> the scales of this member's part, as double quantisation of the
        whole tensor leaves them: 256 blocks share a scale of their scales, and cuts fall within them.

        Args:
            block: its name in the model.
            module: the block, which is whole.
        """
        scales = {}
        for name, weight in packed_weights(module).items():
            division = self._divisions[f"{block}.{name}"]
            if division.cut and division.exists(self._link.member):
                scales[name] = division.of_blocks.part(double_scales(weight, dtype), self._link.member)
        return scales

    def cut(self, model: nn.Module, layer: int) -> None:
        """Leave of a layer in host memory, which is whole, this member's parts."""
        for root in self._chain.module_names(layer):
            for path, module in model.get_submodule(root).named_modules(prefix=root):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    full = f"{path}.{name}"
                    if full in self._divisions and parameter.device.type != "meta":
                        part = self.own(full, parameter.detach())
                        setattr(module, name, nn.Parameter(part, parameter.requires_grad))
        self.fit(model, layer)

    def fit(self, model: nn.Module, layer: int) -> None:
        """Give the modules of a layer the sizes of their parts, and take away what only the leader has."""
        for root in self._chain.module_names(layer):
            for path, module in model.get_submodule(root).named_modules(prefix=root):
                for name, _ in list(module.named_parameters(recurse=False)):
                    division = self._divisions.get(f"{path}.{name}")
                    if division is not None and division.held is Holding.LEADER and not self.leads:
                        setattr(module, name, None)
                # What has nothing left is not computed, and peft takes no adapter of no width.
                if type(module) is nn.Linear and module.weight.numel():
                    module.out_features, module.in_features = module.weight.shape
                if isinstance(module, nn.Embedding):
                    self._fit_words(module)
                if path.endswith(self._expert_modules):
                    module.num_experts = self._experts(path)[1]
                    module._is_expert_parallel = True

    def _experts(self, path: str) -> tuple[int, int]:
        """(the first, how many) of this member's experts, of the module that has them."""
        bounds = next(division.bounds for name, division in self._divisions.items() if name.rpartition(".")[0] == path)
        first, end = bounds[self._link.member : self._link.member + 2]
        return first, end - first

    def _fit_words(self, embedding: nn.Embedding) -> None:
        embedding.num_embeddings = len(embedding.weight)
        if embedding.padding_idx is not None:  # the word whose vector is not trained
            place = embedding.padding_idx - self._words
            embedding.padding_idx = place if 0 <= place < embedding.num_embeddings else None

    def connect(self, model: nn.Module, first: int, last: int) -> None:
        """Exchange wherever a share of the layers ``[first, last)`` of a stage's model begins and ends."""
        wordless = not self.exists(f"{self._embedding}.weight")
        if first == 0:
            embedding: Any = model.get_submodule(self._embedding)
            if wordless:
                weight = embedding.weight
                replace_forward(embedding, lambda ids: weight.new_zeros((*ids.shape, weight.shape[1])))
            embedding.forward = partial(_looked_up, embedding.forward, self._words, len(embedding.weight), self._link)
            if self._frozen:  # else only the leader, which trains norms, comes to the exchanges before them in backward
                embedding.register_forward_hook(_reached)
        for layer in range(max(first, 1), min(last, self._chain.layer_count - 1)):
            (name,) = self._chain.module_names(layer)
            self._connect_block(model.get_submodule(name))
            self._leave_out(name, model.get_submodule(name))
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
            if wordless:
                replace_forward(head, lambda x: x.new_zeros((*x.shape[:-1], 0)))
            head.register_forward_pre_hook(lambda _, given: (entered(given[0], self._link), *given[1:]))

    def start_magnitudes(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Layer -> DoRA's start, of those whose columns are cut. Collective."""
        found = {path: start_magnitude(layer, self._link) for path, layer, _ in adapted_across(model, self._divisions)}
        return {path: value for path, value in found.items() if value is not None}

    def _connect_block(self, block: nn.Module) -> None:
        entrance = _Entrance(self._link)
        for container in (block.get_submodule(name) for name in containers(self._chain) if hasattr(block, name)):
            container.register_forward_pre_hook(partial(_enter, entrance), with_kwargs=True)
            container.register_forward_hook(partial(_leave, self._link))
        block.register_forward_hook(entrance.forget, always_call=True)

    def _leave_out(self, name: str, block: nn.Module) -> None:
        """Compute nothing of attention and MLPs of which this member has no part."""
        for local in rowwise(self._chain):
            if f"{name}.{local}.weight" in self._divisions and not self.exists(f"{name}.{local}.weight"):
                inner = local.rpartition(".")[0]
                zeros = partial(_zeros, block.get_submodule(local))
                replace_forward(block.get_submodule(inner), zeros, pair=is_attention(inner))

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses, as ``chain.loss``, of logits of this member's words."""
        return divided_summed_loss(logits, targets, self._words, self._link)

    def target_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of each target, as ``layer.loss.target_losses``."""
        return divided_target_losses(logits, targets, self._words, self._link)

    def likeliest(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many targets have the largest logit, as ``layer.loss.likeliest``."""
        rows, largest = logits.flatten(0, 1), torch.full((targets.numel(),), -torch.inf, device=logits.device)
        places, here = _own_words(targets.flatten(), self._words, logits.shape[-1])
        own = largest
        if rows.shape[1]:
            own, largest = rows.gather(1, places.unsqueeze(1)).squeeze(1).float(), rows.max(1).values.float()
        return self._link.sum((here & (own == self._link.maximum(largest))).float()).sum()


class _Entrance:
    """Where hidden states enter the shares of a block. Attention and MLP that see the same tensor (parallel blocks) share one
    exchange of its gradient."""

    def __init__(self, link: GroupLink) -> None:
        self._link = link
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None

    def forget(self, *_: object) -> None:
        self._latest = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self._latest is None or self._latest[0] is not x:
            self._latest = x, entered(x, self._link)
        return self._latest[1]


def _enter(entrance: _Entrance, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Hidden states enter a module."""
    if arguments:
        return (entrance.enter(arguments[0]), *arguments[1:]), keywords
    return arguments, {**keywords, "hidden_states": entrance.enter(keywords["hidden_states"])}


def _leave(link: GroupLink, module: nn.Module, arguments: object, output: Any) -> Any:
    """The output of a share of attention or an MLP becomes the whole's. Attention gives its weights, too, which nobody reads."""
    return (left(output[0], link), *output[1:]) if isinstance(output, tuple) else left(output, link)


def _zeros(last: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer cut by columns, without any: its bias, if this member adds it."""
    zeros, bias = torch.zeros_like(x), last.bias
    return zeros if bias is None else zeros + bias


def _looked_up(
    lookup: Callable[[torch.Tensor], torch.Tensor], first: int, words: int, link: GroupLink, ids: torch.Tensor
) -> torch.Tensor:
    """The embeddings of ``ids``: every member has some words, and zeros for all others."""
    own = ids - first
    foreign = (own < 0) | (own >= words)
    return left(lookup(own.clamp(0, words - 1)).masked_fill(foreign.unsqueeze(-1), 0.0), link)


def _reached(module: nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
    """Every exchange has a backward, whatever is trained before it."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


class ExpertShare:
    """The experts [first, first + count) of a layer, which are called with hidden states (N, D), the experts that each token chose
    (N, K), and their weights (N, K)."""

    def __init__(self, first: int, count: int, link: GroupLink) -> None:
        self._first, self._count, self._link = first, count, link

    def connect(self, experts: nn.Module) -> None:
        experts.register_forward_pre_hook(self._choose)
        experts.register_forward_hook(_anchor)
        if self._count == 0:
            replace_forward(experts, torch.zeros_like)

    def _choose(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Choices of other members' experts become number ``count``, which transformers' kernels skip."""
        hidden_states, chosen, weights, *rest = given
        chosen, weights = _agreed(chosen, weights, self._link)
        own = chosen - self._first
        foreign = (own < 0) | (own >= self._count)
        return hidden_states, own.masked_fill(foreign, self._count), weights.masked_fill(foreign, 0.0), *rest


def _agreed(chosen: torch.Tensor, weights: torch.Tensor, link: GroupLink) -> tuple[torch.Tensor, torch.Tensor]:
    """The leader's choices and weights. (Numbers of experts are exact in fp32.)"""
    with torch.no_grad():
        wide = torch.promote_types(weights.dtype, torch.float32)
        both = torch.stack((chosen.to(wide), weights.to(wide)))
        both = link.sum(both if link.member == 0 else torch.zeros_like(both))
        difference = both[1].to(weights.dtype) - weights
    return both[0].to(chosen.dtype), weights + difference


def _anchor(module: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Perhaps no token chose this member's experts."""
    return anchored(output, given[0], given[2])


def divided_summed_loss(logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
    """Sum of the losses of all targets that are not ``IGNORED``, a scalar (fp32), differentiable; the same on all members.

    Args:
        logits: (B, T, V'), of this member's words.
        targets: (B, T) int64, words of the whole vocabulary.
        first: this member's first word.
    """
    losses = divided_target_losses(logits, targets, first, link).flatten()
    # The order of additions of ``summed_loss``: each row is a vocabulary of one word.
    words = targets.flatten().clamp(max=0)
    return F.nll_loss(-losses.unsqueeze(1), words, ignore_index=IGNORED, reduction="sum")


def divided_target_losses(logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
    """Loss of each target, (B, T) in fp32, differentiable; 0 where it is ``IGNORED``. Takes what ``divided_summed_loss`` does."""
    losses: torch.Tensor = _Losses.apply(logits.flatten(0, 1), targets.flatten(), first, link)
    return losses.view_as(targets)


class _Losses(torch.autograd.Function):
    """The losses of all targets, a few rows of logits at a time (``layer.loss``)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, link: GroupLink) -> torch.Tensor:
        largest = torch.full((len(logits),), -torch.inf, device=logits.device)
        for rows in _rows(logits):
            largest[rows] = logits[rows].max(1).values.float()
        largest = link.maximum(largest)
        exponentials, of_targets = torch.zeros_like(largest), torch.zeros_like(largest)
        words, here = _own_words(targets, first, logits.shape[1])
        for rows in _rows(logits):
            shifted = logits[rows].float() - largest[rows].unsqueeze(1)
            of_targets[rows] = shifted.gather(1, words[rows].unsqueeze(1)).squeeze(1) * here[rows]
            exponentials[rows] = shifted.exp_().sum(1)
        summed, of_targets = link.sum(torch.stack((exponentials, of_targets))).unbind()
        logarithms = summed.log()
        ctx.save_for_backward(logits, words, here, targets, largest + logarithms)
        return torch.where(targets == IGNORED, 0.0, logarithms - of_targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, words, here, targets, norms = ctx.saved_tensors
        factors = (gradient * (targets != IGNORED)).unsqueeze(1)
        result = torch.empty_like(logits)
        for rows in _rows(logits):
            likelihoods = (logits[rows].float() - norms[rows].unsqueeze(1)).exp_().mul_(factors[rows])
            likelihoods.scatter_add_(1, words[rows].unsqueeze(1), -factors[rows] * here[rows].unsqueeze(1))
            result[rows] = likelihoods
        return result, None, None, None


def _own_words(targets: torch.Tensor, first: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(each target's place among this member's words, any place for a word of another one; is it this member's?)"""
    places = targets - first
    return places.clamp(0, words - 1), (places >= 0) & (places < words)


def _rows(logits: torch.Tensor) -> Iterator[slice]:
    """Rows that are computed at once; none of a member without words."""
    if logits.shape[1] == 0:
        return
    size = max(1, piece_size(logits.numel(), logits.is_cpu) // logits.shape[1])
    yield from (slice(begin, begin + size) for begin in range(0, len(logits), size))
