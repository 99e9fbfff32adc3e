"""Read a Python script that trains with TRL: parse it without running it, and collect the literal arguments of its calls."""

import ast
from collections.abc import Iterator
from typing import Any

_LORA_RANKS = {"LoraConfig": 8, "get_peft_model": 16}
"""Calls that set up LoRA (of peft and Unsloth), and the default of their rank and alpha."""
_OBJECTS = ("args", "data_collator", "model", "peft_config", "processing_class", "ref_model", "tokenizer")
"""Arguments of a trainer whose values are objects."""
TRAINER = ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
_WITH_REFERENCE = ("model", "ref_model", *TRAINER[1:])
SIGNATURES = {
    "train_test_split": ("test_size", "train_size", "shuffle", "stratify_by_column", "seed"),
    "load_dataset": ("path", "name", "data_dir", "data_files", "split"),
    "LoraConfig": ("task_type", "peft_type", "auto_mapping"),
    "get_peft_model": ("model", "peft_config"),
    "BitsAndBytesConfig": ("load_in_8bit", "load_in_4bit"),
    "EarlyStoppingCallback": ("early_stopping_patience", "early_stopping_threshold"),
    "from_pretrained": ("pretrained_model_name_or_path",),
    "DPOTrainer": _WITH_REFERENCE,
    "KTOTrainer": _WITH_REFERENCE,
}
"""Maps a function to the names of its first parameters; trainers and their configs have common ones."""
_RUN_INSTEAD = "run the script with its trainer imported from hetero_mpi (docs/python.md), or convert its command line"
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
                targets, right = target.elts if isinstance(target, ast.Tuple) else [target], node.value
                elements = right.elts if targets[1:] and isinstance(right, ast.Tuple) else [right] * len(targets)
                for variable, element in zip(targets, elements, strict=False):
                    assigned.setdefault(ast.unparse(variable), []).append(element)
        elif isinstance(node, ast.AugAssign):
            assigned.setdefault(ast.unparse(node.target), []).append(ast.BinOp(node.target, node.op, node.value))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    arguments: dict[str, ast.expr] = {}
    values: dict[str, Any] = {}
    trainers = [call for call in calls if _name(call).endswith("Trainer")]
    inputs = _arguments(trainers[-1]) if trainers else {}
    for call in calls:
        name, words = _name(call), _arguments(call) | _attributes(call, assigned)
        if name == "TrainingArguments" or (name.endswith("Config") and f"{name[:-6]}Trainer" in map(_name, trainers)):
            values |= {"learning_rate": 5e-5, "bf16": False} if name == "TrainingArguments" else {}
            arguments |= words
        elif name in _LORA_RANKS and (name == "LoraConfig" or "r" in words):
            defaults = dict.fromkeys(("r", "lora_alpha"), _LORA_RANKS[name]) | {"lora_dropout": 0.0}
            values |= {"use_peft": True} | {f"LoraConfig.{key}": value for key, value in defaults.items()}
            arguments |= {f"LoraConfig.{key}": value for key, value in words.items() if key != "model"}
        elif name == "BitsAndBytesConfig":
            off = ast.Constant(False)
            arguments["load_in_4bit"] = words.get("load_in_4bit", off)
            arguments["use_bnb_nested_quant"] = words.get("bnb_4bit_use_double_quant", off)
        elif name == "from_pretrained" and "Model" in (owner := ast.unparse(call.func).rpartition(".")[0]):
            names = [words[key] for key in ("model_name", "pretrained_model_name_or_path") if key in words]
            values["model_class"] = owner
            arguments |= {"model_name_or_path": names[0]} if names else {}
            arguments |= {key: words[key] for key in ("load_in_4bit", "max_seq_length") if key in words}
        elif name == "EarlyStoppingCallback":
            arguments |= {"early_stopping_patience": ast.Constant(1), **words}
        elif call in trainers:
            values["trainer"] = _objective(name)
            model = _value(words["model"], assigned) if "model" in words else None
            values |= {"model_name_or_path": model} if isinstance(model, str) else {}
            if isinstance(listed := words.get("callbacks"), ast.List):
                words["callbacks"] = ast.List([part for part in listed.elts if "EarlyStop" not in ast.unparse(part)])
            arguments |= {key: value for key, value in words.items() if key not in _OBJECTS and "dataset" not in key}
            for key, ours in (("train_dataset", "datasets"), ("eval_dataset", "eval_dataset")):
                values |= _datasets(words[key], ours, assigned) if key in words else {}
    for key, node in arguments.items():
        value = _value(node, assigned)
        if isinstance(value, ast.expr) and key in ("bf16", "fp16"):  # what the device supports
            key, value = "bf16", "auto"
        values |= {f"(computed) {key}": ast.unparse(value)} if isinstance(value, ast.expr) else {key: value}
    inputs |= {"model": arguments["model_name_or_path"]} if "model_name_or_path" in arguments else {}
    problems = ["transformers' Trainer is not converted"] if values.get("trainer") == "Trainer" else []
    for name, key in (("model", "model_name_or_path"), ("train_dataset", "datasets")):
        if not values.get(key):
            code = _value(inputs[name], assigned) if name in inputs else None
            where = f" (line {code.lineno}: {ast.unparse(code):.60})" if isinstance(code, ast.expr) else ""
            problems.append(f"{name} is not a literal{where}")
    if problems:
        raise ValueError(f"{', '.join(problems)}; {_RUN_INSTEAD}")
    return values


def trainers_in(text: str) -> set[str]:
    """Return TRL's names for the trainers that a script calls. Raises SyntaxError if ``text`` is no Python."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {_objective(_name(call)) for call in calls if _name(call).endswith("Trainer")}


def _objective(trainer: str) -> str:
    return trainer.removesuffix("Trainer").replace("Unsloth", "sft").lower() or "Trainer"


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _arguments(call: ast.Call) -> dict[str, ast.expr]:
    """Map the parameters of a call to its arguments; names of unknown parameters are positions."""
    name = _name(call)
    names = SIGNATURES.get(name, TRAINER if name.endswith("Trainer") else ("output_dir",))
    arguments = {names[at] if at < len(names) else f"{name}({at})": value for at, value in enumerate(call.args)}
    return arguments | {word.arg or f"**{ast.unparse(word.value)}": word.value for word in call.keywords}


def _attributes(call: ast.Call, assigned: dict[str, list[ast.expr]]) -> dict[str, ast.expr]:
    """Map the attributes that a script sets on the result of a call, as in ``args.seed = 1``, to their values."""
    names = {name for name, nodes in assigned.items() if call in nodes}
    attributes = {key.rpartition(".")[2]: nodes for key, nodes in assigned.items() if key.rpartition(".")[0] in names}
    return {key: nodes[0] if len(nodes) == 1 else ast.Name("several values") for key, nodes in attributes.items()}


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
    slices = [_value(part.slice, {}) for part in parts if isinstance(part, ast.Subscript)]
    splits = [name for name in slices if isinstance(name, str)]
    for call in (call for call in calls if _name(call) == "load_dataset"):
        entry = {word: _value(value, assigned) for word, value in _arguments(call).items()}
        entry = {name: value for name, value in entry.items() if not isinstance(value, ast.expr)}
        if isinstance(names := entry.get("split"), list):  # the call returns a dataset for each
            entry["split"] = names[-1 if key == "eval_dataset" else 0]
        entries.append({"split": splits[0] if splits else "train", **entry})
    changes = {_name(call): ast.unparse(call) for call in calls if _name(call) in _CHANGES}
    divisions = [_arguments(call) for call in calls if _name(call) == "train_test_split"]
    values: dict[str, Any] = {f"(computed) {key}.{name}": code for name, code in changes.items()}
    if not divisions:
        return values | {key: entries}
    if key == "eval_dataset":  # the rest of the training set
        return values
    words = {word: value for word, node in divisions[0].items() if (value := _value(node, assigned)) is not None}
    size = words.get("test_size", words.get("train_size", 0.25))
    if "test_size" not in words and "train_size" in words and isinstance(size, float):
        size = round(1 - size, 12)
    division = {"(computed) test_size": ast.unparse(size)} if isinstance(size, ast.expr) else {"test_size": size}
    return values | {key: entries} | division
