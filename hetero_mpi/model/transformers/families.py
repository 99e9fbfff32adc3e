"""Which model families can be trained, and why others are rejected.

A family is supported only if tests have shown that its split run equals the unsplit model (``model/transformers/supported.py``,
docs/models.md). Untested families are rejected by name, and so are settings that would change a supported family's results.
"""

import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hetero_mpi.job.other_names import read_names
from hetero_mpi.model.files.model_files import read_json
from hetero_mpi.model.transformers.supported import PROVEN_FAMILIES, REFUSED_FAMILIES, ROUTER_LOSS_FAMILIES
from hetero_mpi.planning.types.sizes import BLOCK_KEYS
from hetero_mpi.util.errors import UserError

_WELL_KNOWN = (
    "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3",
)  # fmt: skip

_SIZES = (BLOCK_KEYS[0], "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Keys that determine a model's size with ``hidden_size``. ``vocab_size`` follows from the tokenizer."""
_GENERAL_KEYS = ("model_type", "transformers_version", "architectures", "torch_dtype")


def read_config(source: dict[str, Any] | str | Path) -> PreTrainedConfig:
    """Read the configuration of a causal language model. ``source`` is a ``config.json`` path or its keys.

    Raises UserError for an unreadable file, an unknown or untested ``model_type``, or an invalid or unsupported value.
    """
    remedy = "Give a config.json or its keys inline as [model.config]."
    keys = source if isinstance(source, dict) else read_json(Path(source), remedy)
    family = keys.get("model_type")
    if not isinstance(family, str):
        raise UserError(
            "model.family_missing",
            f"a model configuration must name its family in `model_type`; found {family!r}. Supported: {_names()}",
        )
    require_proven(family)
    arguments = {name: value for name, value in keys.items() if name not in ("model_type", "transformers_version")}
    if arguments.get("dtype") == "auto":
        del arguments["dtype"]  # that of the weights
    scheme = arguments.get("quantization_config")
    if family == "gpt_oss" and isinstance(scheme, dict) and scheme.get("quant_method") == "mxfp4":
        del arguments["quantization_config"]  # of experts in OCP Microscaling (4 bits), which ``weights.py`` unpacks
    try:
        config = AutoConfig.for_model(family, **arguments)
    except Exception as error:  # transformers raises many kinds, all of them about the values given
        raise UserError(
            "model.configuration", f"transformers rejects this {family} configuration: {error}; correct that value"
        ) from error
    _refuse_settings(config)
    config.use_cache = False
    return config


def block_key(config: PreTrainedConfig, blocks: int) -> str:
    """Return the ``config`` key that holds the number of blocks; ``num_hidden_layers`` may count half blocks instead."""
    return next((key for key in BLOCK_KEYS if getattr(config, key, None) == blocks), BLOCK_KEYS[0])


def check_keys(keys: Mapping[str, Any]) -> None:
    """Reject unknown keys, which transformers would silently ignore. The UserError suggests the nearest valid key."""
    family = str(keys.get("model_type"))
    if family not in CONFIG_MAPPING:
        return  # ``read_config`` rejects the family
    default_config = CONFIG_MAPPING[family]()
    # What a model reads with a default need not be a key of its configuration (head_dim of qwen3_moe).
    code = Path(inspect.getfile(AutoModelForCausalLM._model_mapping[type(default_config)])).read_text(encoding="utf-8")
    for key in keys:
        if key not in _GENERAL_KEYS and not hasattr(default_config, key) and f'getattr(config, "{key}"' not in code:
            usual = read_names()["model_config"].get(key.lower(), "")
            valid_keys = [*default_config.to_dict(), *default_config.attribute_map]
            near = [usual] if hasattr(default_config, usual) else difflib.get_close_matches(key, valid_keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                "model.configuration_key", f"[model.config] {key}: not a configuration key of the {family} family{hint}"
            )


def default_sizes(keys: Mapping[str, Any], config: PreTrainedConfig) -> tuple[str, ...]:
    """Return a note if ``keys`` give the width, but leave other sizes of ``config`` to the family's default, a large model."""
    names, default_config = config.attribute_map, CONFIG_MAPPING[str(config.model_type)]()
    given_keys = {names.get(key, key).removeprefix("moe_") for key in keys}
    sizes = {key: getattr(config, key, None) for key in _SIZES if names.get(key, key) not in given_keys}
    # Sizes that follow from others differ from the default, or are None.
    texts = [f"{key} {size:,}" for key, size in sizes.items() if size and size == getattr(default_config, key)]
    text = f"[model.config] leaves the {config.model_type} family's default: {', '.join(texts)}"
    return (text,) if texts and names.get("hidden_size", "hidden_size") in given_keys else ()


def require_proven(family: str) -> None:
    """Raise ``UserError`` unless the family is in ``PROVEN_FAMILIES`` and the installed transformers has it."""
    if family in PROVEN_FAMILIES and family in CONFIG_MAPPING:
        return
    if family in PROVEN_FAMILIES:
        raise UserError(
            "model.family_unknown",
            f"model_type {family!r} is supported, but the installed transformers {transformers.__version__} does not have it: "
            f"install a later version (docs/models.md names the version used in tests)",
        )
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(family, PROVEN_FAMILIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UserError(
            "model.family_unknown",
            f"model_type {family!r} is not a causal language model type in transformers{hint} Supported: {_names()}",
        )
    if family not in REFUSED_FAMILIES and getattr(CONFIG_MAPPING[family], "base_model_pp_plan", None):
        raise UserError(
            "model.family_untried",
            f"model_type {family!r} is untested: transformers {transformers.__version__} has a pipeline plan for it, but its "
            f"split run has not been compared with the whole model. Test it in a checkout of hetero_mpi with `OMP_NUM_THREADS=1 "
            f"python -m tests.family_trial {family}`, and open an issue with the line that it prints; or use a supported family: "
            f"{_names()}",
        )
    reason = (
        f"it {REFUSED_FAMILIES[family]}" if family in REFUSED_FAMILIES else "transformers has no pipeline plan for it"
    )
    raise UserError(
        "model.family_refused",
        f"model_type {family!r} is not supported, because splitting it over ranks may change its results ({reason}). Supported: "
        f"{_names()}",
    )


def _refuse_settings(config: PreTrainedConfig) -> None:
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        scheme = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            "model.stored_quantized",
            f"the model's weights are stored quantised ({scheme}); hetero_mpi quantises weights itself, identically on every "
            f'device: use the unquantised model, and [model] quantization = "nf4" for 4 bits',
        )
    if getattr(config, "output_router_logits", False) and config.model_type not in ROUTER_LOSS_FAMILIES:
        raise UserError(
            "model.router_loss",
            f"output_router_logits = true requests a router loss, which is supported for {', '.join(ROUTER_LOSS_FAMILIES)}, but "
            f"not for {config.model_type} (docs/models.md): set it to false",
        )
    outputs = getattr(config, "output_vocab_size", None)
    if outputs is not None:
        raise UserError(
            "model.output_vocabulary",
            f"output_vocab_size = {outputs}: the output projection has rows for the first {outputs} of {config.vocab_size} tokens "
            f"only, but hetero_mpi needs one for each: remove the key, or use weights with all rows",
        )
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if shared > 0:
        raise UserError(
            "model.shared_keys",
            f"num_kv_shared_layers = {shared}: the last {shared} blocks reuse keys and values of earlier blocks, which other "
            f"ranks may hold; only {config.model_type} models without shared keys and values can be split",
        )


def _names() -> str:
    return f"{len(PROVEN_FAMILIES)} families (docs/models.md), among them {', '.join(_WELL_KNOWN)}"
