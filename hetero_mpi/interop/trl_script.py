"""Read a Python script that trains with TRL: parse it without running it, and collect the literal arguments of its calls."""

import ast
from collections.abc import Iterator
from typing import Any

_LORA_RANKS = {"LoraConfig": 8, "get_peft_model": 16}
"""Calls that set up LoRA (of peft and Unsloth), and the default of their rank and alpha."""
_OBJECTS = ("args", "data_collator", "model", "peft_config", "processing_class", "ref_model", "tokenizer")
"""Arguments of a trainer whose values are objects."""
_CHANGES = ("concatenate_datasets", "filter", "from_dict", "from_generator", "from_list", "map", "select")
"""Functions that change the records of a dataset."""


def read_script(text: str) -> dict[str, Any]:
    """Return the arguments of the trainer, its config, LoRA, quantisation, model and datasets by TRL's names.

    Names of arguments that are not literals begin with "(computed) ". Raises SyntaxError or ValueError if ``text`` is no
    Python, or if model or dataset is not a literal.
    """
    nodes = list(ast.walk(ast.parse(text)))
    assigned: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(ast.unparse(target), []).append(node.value)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    arguments: dict[str, ast.expr] = {}
    values: dict[str, Any] = {}
    trainers = [call for call in calls if _name(call).endswith("Trainer")]
    for call in calls:
        name, words = _name(call), {word.arg: word.value for word in call.keywords if word.arg is not None}
        if name == "TrainingArguments" or (name.endswith("Config") and f"{name[:-6]}Trainer" in map(_name, trainers)):
            values |= {"learning_rate": 5e-5, "bf16": False} if name == "TrainingArguments" else {}
            arguments |= ({"output_dir": call.args[0]} if call.args else {}) | words
        elif name in _LORA_RANKS and (name == "LoraConfig" or "r" in words):
            defaults = dict.fromkeys(("r", "lora_alpha"), _LORA_RANKS[name]) | {"lora_dropout": 0.0}
            values |= {"use_peft": True} | {f"LoraConfig.{key}": value for key, value in defaults.items()}
            arguments |= {f"LoraConfig.{key}": value for key, value in words.items()}
        elif name == "BitsAndBytesConfig":
            off = ast.Constant(False)
            arguments["load_in_4bit"] = words.get("load_in_4bit", off)
            arguments["use_bnb_nested_quant"] = words.get("bnb_4bit_use_double_quant", off)
        elif name == "from_pretrained" and "Model" in (owner := ast.unparse(call.func).rpartition(".")[0]):
            names = [words[key] for key in ("model_name", "pretrained_model_name_or_path") if key in words]
            values["model_class"] = owner
            arguments["model_name_or_path"] = [*call.args[:1], *names, ast.Constant(None)][0]
            arguments |= {key: words[key] for key in ("load_in_4bit", "max_seq_length") if key in words}
        elif call in trainers:
            values["trainer"] = name.removesuffix("Trainer").replace("Unsloth", "sft").lower() or "Trainer"
            models = [_value(node, assigned) for node in (*call.args[:1], words.get("model")) if node is not None]
            values |= {"model_name_or_path": models[0]} if models and isinstance(models[0], str) else {}
            arguments |= {key: value for key, value in words.items() if key not in _OBJECTS and "dataset" not in key}
            for key, ours in (("train_dataset", "datasets"), ("eval_dataset", "eval_dataset")):
                values |= _datasets(words[key], ours, assigned) if key in words else {}
    for key, node in arguments.items():
        value = _value(node, assigned)
        if isinstance(value, ast.expr) and key in ("bf16", "fp16"):  # what the device supports
            key, value = "bf16", "auto"
        values |= {f"(computed) {key}": ast.unparse(value)} if isinstance(value, ast.expr) else {key: value}
    if "model_name_or_path" not in values or not values.get("datasets"):
        raise ValueError("its model or dataset is not a literal; for scripts with options, convert their command line")
    return values


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _value(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> Any:
    """Return the literal value of an expression or of the variable that it names, or the expression if there is none."""
    if isinstance(node, ast.Name) and len(assigned.get(node.id, ())) == 1:
        node = assigned[node.id][0]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def _nodes(node: ast.expr, assigned: dict[str, list[ast.expr]], visited: set[str]) -> Iterator[ast.AST]:
    """Yield the parts of an expression, and of the variables in it."""
    for part in ast.walk(node):
        yield part
        if isinstance(part, ast.Name) and part.id not in visited:
            visited.add(part.id)
            for value in assigned.get(part.id, ()):
                yield from _nodes(value, assigned, visited)


def _datasets(node: ast.expr, key: str, assigned: dict[str, list[ast.expr]]) -> dict[str, Any]:
    """Return the datasets that an expression loads, as ``key``, and how the script changes or divides them."""
    parts = list(_nodes(node, assigned, set()))
    calls, entries = [part for part in parts if isinstance(part, ast.Call)], list[dict[str, Any]]()
    splits = [part.slice for part in parts if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant)]
    for call in (call for call in calls if _name(call) == "load_dataset"):
        words: dict[str | None, ast.expr] = dict(zip(("path", "name"), call.args, strict=False))
        words |= {word.arg: word.value for word in call.keywords}
        entry = {str(name): _value(value, assigned) for name, value in words.items()}
        entry = {name: value for name, value in entry.items() if not isinstance(value, ast.expr)}
        entries.append({"split": str(_value(splits[0], {})) if splits else "train", **entry})
    changes = {_name(call): ast.unparse(call) for call in calls if _name(call) in _CHANGES}
    divisions = [word.value for call in calls if _name(call) == "train_test_split" for word in call.keywords]
    values: dict[str, Any] = {f"(computed) {key}.{name}": code for name, code in changes.items()}
    if divisions:
        return values | ({"test_size": _value(divisions[0], assigned), key: entries} if key == "datasets" else {})
    return values | {key: entries}
