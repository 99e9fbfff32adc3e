"""``export --gguf``: llama.cpp's converter makes a GGUF file of an exported directory, and a Modelfile for Ollama lies beside it.

The converter knows one ``lora_alpha``, which llama.cpp divides by each layer's rank: it is handed the one that gives the adapter's
own factors. What cannot be said so is refused.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hetero_mpi.commands.modelfile import write_modelfile
from hetero_mpi.errors import UserError
from hetero_mpi.model.adapter_files import adapter_of
from hetero_mpi.model.adapter_targets import of_pattern
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import read_json
from hetero_mpi.model.peft_config import CONFIG
from hetero_mpi.model.tuning import scale_of


def write_gguf(directory: Path, kind: str, again: str) -> str:
    """Write ``directory``/NAME.gguf by llama.cpp's own converter, and a ``Modelfile`` beside it; returns a sentence about them.

    The converter is looked for on the PATH, in ``$LLAMA_CPP`` and in ``~/llama.cpp``. The Modelfile is written without it, too.

    Args:
        kind: the converter's type.
        again: the command that calls this.

    :raises UserError: an adapter that llama.cpp cannot compute, no converter (with the two commands that mend it), or it fails.
    """
    name = directory.resolve().name
    target = directory / f"{name}.gguf"
    if (directory / CONFIG).exists():
        script, (alpha, base) = "convert_lora_to_gguf.py", _alpha_and_base(directory)
    else:
        script, alpha, base = "convert_hf_to_gguf.py", None, None
    target.unlink(missing_ok=True)  # of another export
    notes = write_modelfile(directory, target, base)
    places = [Path(shutil.which(script) or "")]
    places += [Path(folder) / script for folder in (os.environ.get("LLAMA_CPP"), Path.home() / "llama.cpp") if folder]
    converter = next((place for place in places if place.is_file()), None)
    if converter is None:
        raise UserError(
            f"{directory} is written, with a Modelfile, but no GGUF file: llama.cpp's {script} is neither on the PATH nor in "
            f"$LLAMA_CPP nor in ~/llama.cpp. These two commands make it:\n  git clone https://github.com/ggml-org/llama.cpp\n"
            f"  LLAMA_CPP=llama.cpp {again}"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = directory if alpha is None else _with_alpha(directory, Path(folder) / name, alpha)
        arguments = [str(source), "--outfile", str(target), "--outtype", kind]
        if base is not None:
            files = hub.directory_of(base)
            arguments += ["--base", str(files)] if files.is_dir() else ["--base-model-id", base]
        command = [sys.executable, str(converter), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not target.is_file():
        last = "\n".join(done.stderr.splitlines()[-8:])
        raise UserError(
            f"{directory} is written, but no GGUF file: {converter} ended with {done.returncode}:\n{last}\n"
            f"Mend what it names (its own packages are in the requirements of llama.cpp), and run this again: {again}"
        )
    notes = write_modelfile(directory, target, base)
    ollama = f"ollama create {shlex.quote(name)} -f {shlex.quote(str(directory / 'Modelfile'))}"
    return "; ".join([f"{target}, by {converter}", f"for Ollama: {ollama}", *notes])


def _alpha_and_base(directory: Path) -> tuple[float, str]:
    """The ``lora_alpha`` with which alpha / rank, llama.cpp's factor, is the adapter's own in every layer; and the base model."""
    adapter, base = adapter_of(directory)
    reason = None
    ranks = {name: of_pattern(adapter.rank_pattern or {}, name, adapter.rank) for name in adapter.targets}
    alphas = {
        float(f"{scale_of(adapter, name) * rank:.12g}") for name, rank in ranks.items()
    }  # equal ones are so when rounded
    if adapter.dora:
        reason = "llama.cpp has no DoRA"
    elif adapter.parameters:
        reason = "llama.cpp's converter takes no adapters of fused experts (target_parameters)"
    elif len(alphas) > 1:
        reason = "llama.cpp has one alpha for all layers, and alpha_pattern or rank_pattern give this adapter several"
    elif base is None:
        reason = "its base weights are in no file (base_model_name_or_path is empty)"
    if reason is not None:
        raise UserError(
            f"{directory} is written, but no GGUF file: {reason}; export with --merge --gguf makes a file of the whole model"
        )
    assert base is not None
    return alphas.pop(), base


def _with_alpha(directory: Path, copy: Path, alpha: float) -> Path:
    """The adapter again, as plain LoRA with this ``lora_alpha``."""
    copy.mkdir()
    for path in directory.iterdir():
        if path.name != CONFIG:
            (copy / path.name).symlink_to(path.absolute())
    keys = read_json(directory / CONFIG, "") | {"lora_alpha": alpha, "use_rslora": False}
    keys |= {"rank_pattern": {}, "alpha_pattern": {}}
    (copy / CONFIG).write_text(json.dumps(keys), encoding="utf-8")
    return copy
