"""Validation of a PEFT adapter's ``adapter_config.json``: supported settings are checked, all others are rejected.

Supported keys are typed fields. Any other key must be empty or known not to affect the adapter's computation. New keys of later
peft versions are therefore rejected, never silently ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero_mpi.job.rules import as_toml
from hetero_mpi.job.training_tables import NotNegative, Pattern
from hetero_mpi.model.files.model_files import read_json
from hetero_mpi.model.tuning import reaches
from hetero_mpi.util.errors import UserError

CONFIG = "adapter_config.json"
_IGNORED_KEYS = {
    *("auto_mapping", "inference_mode", "peft_version", "task_type"),
    *("lora_dropout", "eva_config", "corda_config", "lora_ga_config", "loftq_config"),
    *("megatron_core", "qalora_group_size", "runtime_config"),
}
"""Keys that do not affect an adapter's computation: those used only for training (``init_lora_weights`` tells whether the base
weights changed), and options of features that other keys enable."""
_EMPTY_VALUES: tuple[Any, ...] = (None, False, "", [], {})
_SUPPORTED_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights unchanged. Other methods (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change
the base weights, and the adapter is only valid with the changed weights."""

Number = Annotated[float, Field(gt=0)]


class PeftConfig(BaseModel):
    """Keys that affect an adapter's computation, under peft's names; ``model_extra`` holds all other keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Number
    use_rslora: bool | None = False
    use_dora: bool | None = False
    target_modules: Pattern | list[str] | None = None
    exclude_modules: Pattern | list[str] | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[Pattern, Number] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Pattern] | Pattern | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[NotNegative] | dict[str, list[NotNegative]] | None = None
    ensure_weight_tying: bool | None = False
    bias: Literal["none"] = "none"
    init_lora_weights: Any = True
    base_model_name_or_path: str | None = None
    revision: Literal["main", ""] | None = None

    @property
    def layers(self) -> list[int] | None:
        """The blocks in ``layers_to_transform`` as a list; None for all blocks."""
        blocks = self.layers_to_transform
        return ([blocks] if isinstance(blocks, int) else sorted(set(blocks))) if blocks not in (None, []) else None

    def reaches(self, module: str) -> bool:
        """Return whether peft would adapt the module with this name."""
        return reaches(module, self.target_modules or [], self.layers, self.layers_pattern, self.exclude_modules)


def read_peft_config(directory: Path) -> PeftConfig:
    """Read and check the configuration in an adapter directory.

    Raises:
        UserError: The file is missing, damaged or not that of a LoRA adapter, or a setting is invalid or unsupported.
    """
    path = directory / CONFIG
    keys = read_json(path, f"Without it {directory} is not a PEFT adapter directory.")
    try:
        config = PeftConfig.model_validate(keys)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        value = as_toml(keys[key]) if key in keys else "missing"
        raise UserError(
            "adapter.config_value",
            f"{path}: {key} is {value}: {first['msg']}. hetero_mpi reads LoRA adapters saved by peft; correct the value, or save "
            f"the adapter again",
        ) from None
    for key, value in (config.model_extra or {}).items():
        if key not in _IGNORED_KEYS and not any(
            value == empty and type(value) is type(empty) for empty in _EMPTY_VALUES
        ):
            raise UserError("adapter.unsupported", f"{path}: {key} = {as_toml(value)}, {UNKNOWN}")
    start = config.init_lora_weights
    if not any(start == supported and type(start) is type(supported) for supported in _SUPPORTED_STARTS):
        raise UserError(
            "adapter.unsupported",
            f"{path}: init_lora_weights = {as_toml(start)} may have changed the base weights, which the adapter then needs in that "
            f"form, {UNKNOWN}, or let peft convert it (save_pretrained with path_initial_model_for_weight_conversion)",
        )
    return config


UNKNOWN = "which hetero_mpi does not support; merge the adapter into its base with peft (merge_and_unload)"
