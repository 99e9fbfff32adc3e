"""Tries families of models: does a split over three stages equal the whole model?

    OMP_NUM_THREADS=1 python -m tests.family_trial            # every family, three minutes; writes the tables of docs/models.md
    OMP_NUM_THREADS=1 python -m tests.family_trial llama phi  # some, printed

The reference is transformers' own whole model in fp32, loaded by ``from_pretrained``; one process, no MPI.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hetero_mpi.device.backend import Backend
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_tuning import adapted, adapter_tuning
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.layer.loss import IGNORED, Routed
from hetero_mpi.model.layer.quantize import fused_experts
from hetero_mpi.model.stage import MicroBatch, Stage
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta, random_rates
from hetero_mpi.model.transformers.supported import (
    LEAKING_FAMILIES,
    PADDING_FAMILIES,
    PROVEN_FAMILIES,
    REFUSED_FAMILIES,
    ROUTER_LOSS_FAMILIES,
)
from hetero_mpi.model.transformers.weights import FileStart, SeededStart
from hetero_mpi.model.tuning import Tuning, lora_config
from hetero_mpi.util.errors import UserError
from tests.support.family_configs import VOCABULARY, dropout_rates, families, tiny_keys
from tests.support.stages import stage_of, trained_once

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LIMIT = 1e-6
"""Relative difference allowed in the loss and in every gradient's norm. (Most families give the same bits.)"""
ISOLATION_LIMIT = 1e-4
"""The same of gradients, between packed records and a sequence for each: those of routers are small differences of large sums.
Where records see each other, some gradient differs by more than 1e-2."""
_RECORDS = ([7, 9, 8], [24])
"""Lengths of the records of each sequence."""
_LIMIT = 16
"""Tokens beyond which a text has another rotary table, where that is tried: some records are shorter, one is longer."""
_BY_LENGTH = ("longrope", "dynamic", "windowed")
_USUAL_LAYERS = {
    "LATENT": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "MLP": ("gate_proj", "up_proj", "down_proj"),
    "QKVO": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""Word of docs/models.md -> the names of layers for which it stands."""
_LENGTHS = (24, 9)
"""Tokens of each sequence of ``_batch`` up to the last that is learnt."""


class Different(Exception):
    """The split model is not the whole one; the text says where."""


@dataclass(frozen=True)
class Trial:
    """What was seen of a family that passed."""

    tied: str
    experts: str
    adapted: tuple[str, ...]
    """Last parts of the names of the linear layers in blocks that take a LoRA adapter."""
    all_linear: bool
    """Are they what "all-linear" means?"""
    from_scratch: bool
    """Has transformers a rule for every start weight?"""
    isolates: bool
    """Do records of one sequence not see each other where positions say which they are?"""
    router_loss: bool
    """Has it one, which three stages compute?"""
    by_length: tuple[str, ...]
    """Which of ``_BY_LENGTH`` it knows, under which records side by side have the numbers of each by itself."""


def try_family(family: str) -> Trial:
    """Compare forward, backward and loading, untied and tied, and dropout over two partitions.

    Raises:
        Different: a number differs.
        Exception: whatever stands in the way of running the family.
    """
    tied = set()
    for wanted in (False, True):
        config = _config({**tiny_keys(family), "tie_word_embeddings": wanted})
        chain = TransformersChain(config)
        with tempfile.TemporaryDirectory() as directory:
            whole = _whole_model(config, directory)
            start = FileStart(ModelFiles(directory), chain)
            _compare(chain, whole, start)
            tied.add(chain.tied is not None)
            if not wanted:
                _compare_dropout(family, start)
                adapter = _adapter(chain)
                modules = _compare_adapter(chain, whole, start, adapter)
    experts = list(fused_experts(chain.model))
    return Trial(
        "either" if len(tied) == 2 else ("always" if True in tied else "never"),
        "fused" if experts else ("separate" if any(".experts." in n for n in chain.parameters) else ""),
        tuple(sorted({name.rpartition(".")[2] for name in modules})),
        adapter.targets == "all-linear",
        _can_start_from_scratch(chain),
        _isolates(family),
        _router_loss(family),
        tuple(kind for kind in _BY_LENGTH if _compare_by_length(family, kind)),
    )


def row(family: str, trial: Trial | None) -> str:
    """The family's line in docs/models.md; ``trial``: None for a refused one."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    if trial is None:
        return f"| {family} | {name} | {REFUSED_FAMILIES[family]} |"
    names = list(trial.adapted)
    for word, usual in _USUAL_LAYERS.items():
        if set(usual) <= set(names):
            names = [word, *(name for name in names if name not in usual)]
    usual_name = f"{family}ForCausalLM".replace("_", "").lower() == name.replace("_", "").lower()
    notes = {
        name: not usual_name,
        f"{trial.experts} experts": bool(trial.experts),
        f"{trial.tied} tied": trial.tied != "either",
        "no start weights": not trial.from_scratch,
        "not isolated": not trial.isolates,
        "router loss": trial.router_loss,
    }
    cells = (
        family,
        ("" if trial.all_linear else "by name: ") + ", ".join(names),
        ", ".join(note for note, holds in notes.items() if holds),
    )
    return f"| {' | '.join(cells)} |"


def _config(keys: dict[str, object]) -> PreTrainedConfig:
    arguments = {name: value for name, value in keys.items() if name != "model_type"}
    config = AutoConfig.for_model(str(keys["model_type"]), **arguments)
    config.use_cache = False
    return config


def _whole_model(config: PreTrainedConfig, directory: str) -> PreTrainedModel:
    """A random model, saved to ``directory`` and loaded again."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim < 2 and tensor.is_floating_point():  # start as ones and zeros: mistakes there would not show
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32).train()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of 24 tokens; the second one's last 15 targets do not count."""
    generator = torch.Generator().manual_seed(9)
    tokens, targets = torch.randint(1, VOCABULARY, (2, 2, 24), generator=generator)
    targets[1, 9:] = IGNORED
    return tokens, targets


def _stages(chain: TransformersChain, start: FileStart, *cuts: int, tuning: Tuning | None = None) -> list[Stage]:
    bounds = zip((0, *cuts), (*cuts, chain.layer_count), strict=True)
    return [stage_of(chain, first, last, Backend(), "fp32", start, tuning=tuning) for first, last in bounds]


def _run(chain: TransformersChain, stages: list[Stage]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss (mean over the targets) and gradients, the two shares of a tied matrix added as the trainer does."""
    tokens, targets = _batch()
    count = int((targets != IGNORED).sum())
    if chain.routers is None:
        loss = trained_once(stages, MicroBatch(0, 0, 0, count), tokens, targets)
    else:
        routed = [Routed(torch.tensor([length]), 0.5) for length in _LENGTHS]
        positions = (MicroBatch(0, 0, row, count, routed=own) for row, own in enumerate(routed))
        loss = sum(map(trained_once, [stages] * 2, positions, tokens.split(1), targets.split(1)))
    found = {n: p.grad for stage in stages for n, p in stage.parameters.items() if p.grad is not None}
    if chain.tied is not None and chain.tied[1] in found:
        found[chain.tied[1]] = found[chain.tied[1]] + stages[-1].tied_head.grad
    return loss, found


def _compare(chain: TransformersChain, whole: PreTrainedModel, start: FileStart) -> None:
    stages = _stages(chain, start, 2, 4)
    values = whole.state_dict()
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if stage.first <= chain.layer_of(name) < stage.last and not torch.equal(parameter, values[name]):
                raise Different(f"{name} is loaded with other values")
    loss, found = _run(chain, stages)
    _require_equal(
        loss, _run_whole(whole), found, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    )


def _run_whole(whole: torch.nn.Module) -> float:
    """Loss, and gradients; row by row where routers have a loss, of which transformers' own is that of a batch."""
    tokens, targets = _batch()
    count, total = (targets != IGNORED).sum(), 0.0
    plain = whole.get_base_model() if isinstance(whole, PeftModel) else whole
    routed = getattr(plain.config, "output_router_logits", False)
    for rows in (slice(0, 1), slice(1, 2)) if routed else (slice(0, 2),):
        outputs = whole(input_ids=tokens[rows], use_cache=False)
        logits, own = outputs.logits.float().flatten(0, 1), targets[rows].flatten()
        loss = F.cross_entropy(logits, own, ignore_index=IGNORED, reduction="sum") / count
        if routed:
            function = sys.modules[type(plain).__module__].load_balancing_loss_func
            mask = torch.arange(tokens.shape[1]).unsqueeze(0) < _LENGTHS[rows.start]
            of_routers = function(outputs.router_logits, plain.num_experts, plain.num_experts_per_tok, mask)
            loss = loss + 0.5 * plain.router_aux_loss_coef * of_routers
        loss.backward()
        total += float(loss)
    return total


def _adapter(chain: TransformersChain) -> AdapterTable:
    """LoRA on all linear layers of the blocks that peft adapts as such, and on all fused experts."""
    everything = AdapterTable(method="lora", rank=4)
    parameters = sorted({name for _, _, name, _ in fused_experts(chain.model)})
    try:
        adapted(build_on_meta(chain.config), everything)
        return everything.model_copy(update={"parameters": parameters})
    except UserError:
        pass
    linears = {n.rpartition(".")[2] for n, m in chain.model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets = []
    for name in sorted(linears - {"lm_head"}):
        adapter = AdapterTable(method="lora", rank=4, targets=[name])
        try:
            adapted(build_on_meta(chain.config), adapter)
        except UserError:
            continue
        targets.append(name)
    return AdapterTable(method="lora", rank=4, targets=targets, parameters=parameters)


def _compare_adapter(
    chain: TransformersChain, whole: PreTrainedModel, start: FileStart, adapter: AdapterTable
) -> list[str]:
    """Three stages with LoRA against plain peft, from a random B; ``whole`` is changed. Returns the adapted modules."""
    tuning = adapter_tuning(chain, adapter, False, True)
    stages = _stages(chain, start, 2, 4, tuning=tuning)
    for stage in stages:
        for name, parameter in stage.parameters.items():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
    reference = get_peft_model(whole, lora_config(adapter, adapter.targets, list(tuning.parameters))).train()
    require_equal_to_peft(chain, stages, reference)
    return [name for _, name in tuning.modules]


def require_equal_to_peft(chain: TransformersChain, stages: list[Stage], plain: torch.nn.Module) -> None:
    """The loss and all gradients of the stages are those of peft's model, with the stages' values."""
    values = {name: parameter for stage in stages for name, parameter in stage.parameters.items()}
    own = {n.removeprefix("base_model.model.").replace(".default.", "."): p for n, p in plain.named_parameters()}
    with torch.no_grad():
        for name, parameter in values.items():
            own[name].copy_(parameter)
    loss, found = _run(chain, stages)
    expected = _run_whole(plain.train())
    _require_equal(loss, expected, found, {n: own[n].grad for n in values if own[n].grad is not None})


def _compare_dropout(family: str, start: FileStart) -> None:
    """With dropout everywhere: one stage and four stages draw the same masks."""
    rates = dropout_rates(family)
    config = _config({**tiny_keys(family), "tie_word_embeddings": False, **rates})
    chain = TransformersChain(config)
    if bool(rates) is not bool(random_rates(chain.model)):
        raise Different(f"{sorted(rates)} are not seen as dropout")
    _require_equal(*_interleaved(_run(chain, _stages(chain, start)), _run(chain, _stages(chain, start, 1, 3, 5))))


def _interleaved(
    one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]
) -> tuple[float, float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return one[0], other[0], one[1], other[1]


def _require_equal(
    loss: float, expected: float, found: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> None:
    if not abs(loss - expected) <= LIMIT * abs(expected):
        raise Different(f"loss {loss} instead of {expected}")
    if set(found) != set(gradients):
        raise Different(f"gradients of other parameters: {sorted(set(found) ^ set(gradients))[:3]}")
    if not any(gradient.norm() > 0 for gradient in gradients.values()):
        raise Different("no gradient at all")
    for name, gradient in gradients.items():
        if not (found[name] - gradient).norm() <= LIMIT * gradient.norm():
            raise Different(f"gradient of {name} differs by {(found[name] - gradient).norm() / gradient.norm():.1e}")


def _can_start_from_scratch(chain: TransformersChain) -> bool:
    try:
        stage_of(chain, 0, chain.layer_count, Backend(), "fp32", SeededStart(1))
    except UserError:
        return False
    return True


def _isolates(family: str) -> bool:
    """Do records packed into two sequences give the loss and gradients of a sequence for each?"""
    keys = tiny_keys(family)
    if "index_topk" in keys:
        keys["index_topk"] = 4  # an indexer that chooses all tokens of a record shows nothing
    chain = TransformersChain(_config({**keys, "tie_word_embeddings": False}))
    with tempfile.TemporaryDirectory() as directory:
        _whole_model(chain.config, directory)
        stages = _stages(chain, FileStart(ModelFiles(directory), chain), 2, 4)
        tokens, targets = _batch()
        count = int((targets != IGNORED).sum())
        places = [torch.cat([torch.arange(n) for n in lengths]) for lengths in _RECORDS]
        packed = trained_once(stages, MicroBatch(0, 0, 0, count, torch.stack(places)), tokens, targets)
        found = {name: p.grad.clone() for stage in stages for name, p in stage.parameters.items() if p.grad is not None}
        for stage in stages:
            for parameter in stage.parameters.values():
                parameter.grad = None
        apart = 0.0
        for row, lengths in enumerate(_RECORDS):
            for own, targets_of in zip(tokens[row].split(lengths), targets[row].split(lengths), strict=True):
                apart += trained_once(stages, MicroBatch(0, 0, 0, count), own[None], targets_of[None])
    expected = {name: p.grad for stage in stages for name, p in stage.parameters.items() if p.grad is not None}
    alike = [(found[name] - expected[name]).norm() <= ISOLATION_LIMIT * expected[name].norm() for name in expected]
    return set(found) == set(expected) and all(alike) and abs(packed - apart) <= LIMIT * apart


def _compare_by_length(family: str, kind: str) -> bool:
    """Records and padding side by side against transformers' own model that sees each record alone. False: there is no such kind.

    A long and a short record are in one micro-batch; where records do not see each other, some are in one sequence, too.
    """
    keys = _keys_by_length(family, kind)
    if keys is None or family in PADDING_FAMILIES:
        return False
    chain = TransformersChain(_config({**keys, "tie_word_embeddings": False}))
    tokens, targets = _batch()
    count = int((targets != IGNORED).sum())
    records = ([24], [9, 15]) if family in LEAKING_FAMILIES else _RECORDS
    with tempfile.TemporaryDirectory() as directory:
        whole = _whole_model(chain.config, directory)
        stages = _stages(chain, FileStart(ModelFiles(directory), chain), 2, 4)
    places = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in records])
    together = trained_once(stages, MicroBatch(0, 0, 0, count, places), tokens, targets)
    alone = 0.0
    for row, lengths in enumerate(records):
        for own, targets_of in zip(tokens[row].split(lengths), targets[row].split(lengths), strict=True):
            fresh = copy.deepcopy(whole)  # a rotary table of an earlier text may be kept
            logits = fresh(input_ids=own[None], use_cache=False).logits.float()[0]
            loss = F.cross_entropy(logits, targets_of, ignore_index=IGNORED, reduction="sum") / count
            if loss.isfinite() and loss > 0:
                loss.backward()
                alone += float(loss)
                for mine, its in zip(whole.parameters(), fresh.parameters(), strict=True):
                    if its.grad is not None:
                        mine.grad = its.grad if mine.grad is None else mine.grad + its.grad
    found = {name: p.grad for stage in stages for name, p in stage.parameters.items() if p.grad is not None}
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    unlike = [
        name for name in expected if (found[name] - expected[name]).norm() > ISOLATION_LIMIT * expected[name].norm()
    ]
    if set(found) != set(expected) or unlike or abs(together - alone) > LIMIT * alone:
        raise Different(
            f"{kind}: loss {together} instead of {alone}, which each record has alone; gradients: {unlike[:3]}"
        )
    return True


def _keys_by_length(family: str, kind: str) -> dict[str, object] | None:
    """A configuration of the family under which lengths matter; None: it knows no such kind, or transformers cannot compute it."""
    keys = tiny_keys(family)
    if kind == "windowed":
        return keys if any("sliding_window" in key for key in keys) else None
    model = build_on_meta(_config(keys))
    rope = getattr(model.config, "rope_parameters", None)
    rotary = next((one for one in model.modules() if hasattr(one, "rope_type")), None)
    if not rope or rotary is None:
        return None

    def changed(known: dict[str, object], prefix: str = "") -> dict[str, object]:
        numbers = len(getattr(rotary, f"{prefix}inv_freq"))
        longer = [1.0 + 3.0 * number for number in range(numbers)]
        factors = {"short_factor": [1.0] * numbers, "long_factor": longer, "original_max_position_embeddings": _LIMIT}
        return {**known, "rope_type": kind, "factor": 4.0, **(factors if kind == "longrope" else {})}

    of_kinds = {name: changed(known, f"{name}_") for name, known in rope.items() if isinstance(known, dict)}
    keys |= {"rope_parameters": of_kinds or changed(rope)}
    keys |= {"max_position_embeddings": _LIMIT} if kind == "dynamic" else {}
    keys |= {"original_max_position_embeddings": _LIMIT} if "original_max_position_embeddings" in keys else {}
    try:
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(_config(keys), dtype=torch.float32)(input_ids=_batch()[0], use_cache=False)
    except Exception:  # a family need not know every rule of rotary tables
        return None
    return keys


def _router_loss(family: str) -> bool:
    """Compare the loss of routers, with and without an adapter. False: transformers has none, or another; it is refused."""
    keys = {
        **tiny_keys(family),
        "tie_word_embeddings": False,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    }
    if family not in ROUTER_LOSS_FAMILIES:
        return False
    chain = TransformersChain(_config(keys))
    with tempfile.TemporaryDirectory() as directory:
        whole = _whole_model(chain.config, directory)
        start = FileStart(ModelFiles(directory), chain)
        _compare(chain, whole, start)
        _compare_adapter(chain, whole, start, _adapter(chain))
    return True


def document(proven: list[str]) -> str:
    """docs/models.md with the tables and counts of this trial; ``proven``: the rows of families that passed."""
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = {"LoRA": proven, "class": [row(family, None) for family in sorted(REFUSED_FAMILIES)]}
    for second_column, rows in tables.items():
        head = rf"(^\| model_type \| {second_column} .*\n\| --- .*\n)(?:\|.*\n)+"
        text = re.sub(head, r"\1" + "\n".join(rows) + "\n", text, flags=re.M)
    counts = f"{len(PROVEN_FAMILIES)} of the {len(families())} causal-LM families for which transformers "
    text = re.sub(
        r"^\d+ of the \d+ causal-LM families for which transformers \S+",
        counts + transformers.__version__,
        text,
        flags=re.M,
    )
    return re.sub(r"(?<=Padding tokens count in )[^;]+", ", ".join(PADDING_FAMILIES), text)


def main() -> None:
    """Try the families named, or all and write docs/models.md."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    proven = []
    for family in sys.argv[1:] or families():
        try:
            line = row(family, try_family(family))
            proven.append(line)
        except Exception as error:  # any exception is the answer for this family
            line = f"| {family} | {type(error).__name__}: {str(error)[:200]} |"
        print(line, flush=True)
    if not sys.argv[1:]:
        DOCUMENT.write_text(document(proven), encoding="utf-8")


if __name__ == "__main__":
    main()
