"""Convert the arguments of transformers', TRL's and peft's trainers to job keys.

The tables are those of config files (``interop.other_tools``). A non-default argument without a counterpart is rejected, or only
reported if it affects nothing but speed, memory or output.
"""

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

from transformers import training_args

from hetero_mpi.interop.job_draft import TABLE
from hetero_mpi.util.errors import UserError

OBJECTIVES = {"TrainingArguments": "sft"} | {f"{name.upper()}Config": name for name in ("sft", "dpo", "kto", "orpo")}
"""Maps the class of the arguments to TRL's name for the objective."""
_METRICS = "evaluations measure loss, token accuracy and rewards; compute other metrics with the saved model"
_OPTIMIZER = "set optim, learning_rate and lr_scheduler_type in args"
_PEFT, _SCRIPT = TABLE["peft"], TABLE["trl"]["keys"]
_LORA_KEYS = {key.partition(".")[2]: ours for key, ours in _SCRIPT.items() if key.startswith("LoraConfig.")}
_LORA_KEYS |= _PEFT["keys"]
"""Maps arguments of peft's ``LoraConfig`` to job keys."""
_UNSUPPORTED = {
    "compute_metrics": _METRICS,
    "preprocess_logits_for_metrics": _METRICS,
    "compute_loss_func": "only the losses of the trainers are supported: remove it",
    "optimizers": _OPTIMIZER,
    "optimizer_cls_and_kwargs": _OPTIMIZER,
    "model_init": "pass the model itself",
    "ref_model": "the reference model is the model before the first step: remove it",
}
"""Maps parameters of other trainers to the reason why they are not supported."""
_ROWS = "rank 0 reads and orders the rows: pass train_dataset as it is to be trained on, with a seed in args"
_MEMBERS = {
    "*dataloader|*_sampler|get_batch_samples|num_examples|num_tokens": _ROWS,
    "compute_loss*|training_step|label_smoother": _UNSUPPORTED["compute_loss_func"],
    "predict*|evaluation_loop|compute_metrics": _METRICS,
    "create_optimizer*|create_scheduler|get_optimizer*|get_decay_*|get_learning_rates|optimizer|lr_scheduler": _OPTIMIZER,
    "_save*|_inner_training_loop|_prepare_inputs": "use callbacks, or the loop `for step in trainer.steps()`",
    "model_wrapped|get_num_*|call_model_init|floating_point_ops": "no rank has all of the model; trainer.model has the result",
    "hyperparameter_search": "train once for each choice, each with its output_dir",
}
"""Maps patterns of members of other trainers to the reason why they are not supported."""
_SETTINGS: dict[str, Any] = {"output_dir": "trainer_output", "dataset_text_field": "text", "eval_strategy": "no"}
_SETTINGS |= {"logging_strategy": "steps", "logging_steps": 10}
_NONE = "eval_steps logging_first_step load_best_model_at_end metric_for_best_model greater_is_better push_to_hub hub_model_id"
_SETTINGS |= dict.fromkeys([*_NONE.split(), "hub_token", "hub_private_repo", "quantization_config", "eos_token"])
"""Arguments that the trainer itself implements, with their defaults."""


def take_settings(values: dict[str, Any], changed: set[str]) -> SimpleNamespace:
    """Remove and return the arguments that the trainer itself implements. Adds ``model_init_kwargs`` to the others."""
    arguments = dict(values.pop("model_init_kwargs", None) or {})
    init = {name: value for name, value in arguments.items() if value not in (None, False, "main")}
    values |= init
    changed.update(init)
    settings = {name: values.pop(name, None) for name in _SETTINGS} | {"model_init_kwargs": init}
    return SimpleNamespace(**{name: _SETTINGS[name] if value is None else value for name, value in settings.items()})


def rows_per_step(values: Mapping[str, Any]) -> int:
    """Return the number of rows per step."""
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    sizes = [values.get(key, default) for key, default in keys.items()]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError("trainer.value", f"{' and '.join(keys)}: must be whole numbers above 0")
    return math.prod(sizes)


def steps_per_epoch(values: Mapping[str, Any], rows: int) -> int:
    """Return the number of steps per epoch. Raises UserError with packing, which makes the number unknown in advance."""
    if values.get("packing"):
        text = "with packing, steps per epoch are unknown in advance: set save_strategy and eval_strategy to steps"
        raise UserError("trainer.steps_per_epoch", text)
    return math.ceil(rows / rows_per_step(values))


def keep_arguments_local() -> None:
    """Allow bf16 and tf32 in transformers' arguments on ranks without them, and prevent accelerate from connecting the ranks."""
    supported = dict.fromkeys(("is_torch_bf16_gpu_available", "is_torch_tf32_available"), lambda: True)
    vars(training_args).update(supported, enable_tf32=lambda enable: None)
    if any(os.environ.get(name, "1") != "1" for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        from accelerate import state  # type: ignore[import-untyped]

        vars(state).update(get_int_from_env=lambda names, default: default)


def unsupported_options(options: dict[str, Any], model: Any) -> list[tuple[str, str]]:
    """Remove the unsupported parameters of other trainers, and return those that were set, with reasons."""
    if (reference := options.get("ref_model")) is not None and _is_same_model(reference, model):
        del options["ref_model"]
    values = {name: options.pop(name, None) for name in _UNSUPPORTED}
    return [(name, _UNSUPPORTED[name]) for name, value in values.items() if value not in (None, (None, None))]


def unsupported_members(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return those of ``names`` that are unsupported members of other trainers, with reasons."""
    listed = [(pattern, reason) for patterns, reason in _MEMBERS.items() for pattern in patterns.split("|")]
    return [(name, reason) for name in names for pattern, reason in listed if fnmatch(name, pattern)]


def _is_same_model(reference: Any, model: Any) -> bool:
    """Whether two models are equal: two names, or two loaded models with the same weights."""
    if isinstance(reference, (str, os.PathLike)) or isinstance(model, (str, os.PathLike)):
        return str(reference) == str(model)
    states = [each.state_dict() for each in (reference, model)]
    return states[0].keys() == states[1].keys() and all(bool((states[1][k] == v).all()) for k, v in states[0].items())


def arguments_of(args: Any, trainer: str, objective: str | None) -> tuple[dict[str, Any], set[str], str]:
    """Return the values of the arguments by name, the names of non-default arguments, and the name of their class.

    ``objective``: TRL's name for the objective of the class ``trainer``, or None if the class of the arguments decides.
    """
    if args is None or isinstance(args, Mapping):
        named = dict(args or {})
        if odd := [key for key in named if not isinstance(key, str)]:
            raise UserError("trainer.argument", f"args: argument name {odd[0]!r} must be a string")
        changed = {key for key, value in named.items() if value not in (None, False, "no", "none", [], {})}
        return named | ({"trainer": objective} if objective is not None else {}), changed, "args"
    names = [kind.__name__ for kind in type(args).__mro__]
    title = next((name for name in names if name == "TrainingArguments" or name.endswith("Config")), names[0])
    objective = objective or OBJECTIVES.get(title)
    allowed = [name for name, kind in OBJECTIVES.items() if name == "TrainingArguments" or objective in (None, kind)]
    if title not in allowed:
        rule = f"is not supported; use {', '.join(allowed)}, or a dict of their arguments"
        raise UserError("trainer.argument", f"{trainer}(args=...): {title} {rule}")
    basics = {key: getattr(args, key) for key in ("output_dir", "use_cpu", "bf16", "fp16")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arguments that the user did not set
        values, defaults = args.to_dict(), type(args)(**basics).to_dict()
    changed = {key for key, value in values.items() if value != defaults.get(key)} - {"do_eval", "do_train"}
    changed -= {"save_strategy"} if values["save_strategy"] == "no" else set()
    hidden = {name: getattr(args, name, None) for name in ("hub_token", "eos_token")}  # to_dict returns no tokens
    return values | hidden | {"trainer": objective}, changed, title


def convert_quantization(values: dict[str, Any], config: Any) -> list[tuple[str, str]]:
    """Add the arguments for a ``BitsAndBytesConfig`` to ``values``, and return it with a reason if it is unsupported."""
    if config is None:
        return []
    keys = config if isinstance(config, Mapping) else config.to_dict()
    if not keys.get("load_in_4bit") or keys.get("bnb_4bit_quant_type") != "nf4":
        return [("quantization_config", 'use BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")')]
    values |= {"load_in_4bit": True, "use_bnb_nested_quant": bool(keys.get("bnb_4bit_use_double_quant"))}
    return []


def convert_lora(values: dict[str, Any], model_config: Mapping[str, Any], config: Any) -> list[tuple[str, str]]:
    """Add the job keys for peft's arguments to ``values``, and return the unsupported arguments with reasons."""
    if config is None:
        return []
    if type(config).__name__ != "LoraConfig":
        return [(f"peft_config: {type(config).__name__}", "only LoRA is supported: pass a LoraConfig")]
    lora, defaults = config.to_dict(), type(config)().to_dict()
    targets, layers = lora["target_modules"], lora["layers_to_transform"]
    if isinstance(targets, str) and targets != "all-linear":
        return [("target_modules", 'patterns are not supported: list layer names, or use "all-linear"')]
    lora["target_modules"] = sorted(targets) if isinstance(targets, (list, set)) else targets or "family"
    if values.get("train.dropout") is False:
        lora["lora_dropout"] = 0.0
    lora["layers_to_transform"] = [layers] if isinstance(layers, int) else layers
    refused = _convert_extras(values, model_config, lora)
    values |= {ours: lora[key] for key, ours in _LORA_KEYS.items() if lora[key] not in (None, {})}
    changed = {key for key, value in lora.items() if value != defaults.get(key)} - _LORA_KEYS.keys()
    return refused + [(f"peft_config.{key}", _PEFT["reason"]) for key in sorted(changed - set(_PEFT["aside"]))]


_TOKEN_MODULES = {"embed_tokens": "embedding", "lm_head": "head"}
"""Maps a module in ``trainable_token_indices`` to the value of ``adapter.tokens_in``."""


def _convert_extras(values: dict[str, Any], config: Mapping[str, Any], lora: dict[str, Any]) -> list[tuple[str, str]]:
    """Convert peft's ``init_lora_weights``, ``modules_to_save`` and ``trainable_token_indices``; return unsupported arguments."""
    refused = []
    start, saved, rows = (lora[key] for key in ("init_lora_weights", "modules_to_save", "trainable_token_indices"))
    lora["init_lora_weights"] = start if isinstance(start, str) else None
    if start is not True and not str(start).startswith(("pissa", "olora")):
        refused.append(("peft_config.init_lora_weights", 'must be True, "pissa", "pissa_niter_4" or "olora"'))
    lora["modules_to_save"] = sorted(saved) if saved else None
    untied = saved and config.get("tie_word_embeddings") and not lora["ensure_weight_tying"]
    if untied and any(name.endswith(tuple(_TOKEN_MODULES)) for name in saved):
        reason = "must be True, as this model ties embedding and LM head"
        refused.append(("peft_config.ensure_weight_tying", reason))
    by_end = rows if isinstance(rows, dict) else {"embed_tokens": rows}
    ends = {_TOKEN_MODULES.get(name.rpartition(".")[2]) for name in by_end}
    lora["trainable_token_indices"] = next(iter(by_end.values()), None) or None
    if None in ends or len({tuple(sorted(indices or ())) for indices in by_end.values()}) > 1:
        reason = "must list the same rows for embed_tokens and lm_head, or rows for only one of them"
        refused.append(("peft_config.trainable_token_indices", reason))
    elif rows:
        values["adapter.tokens_in"] = "both" if len(ends) == 2 else ends.pop()
    return refused
