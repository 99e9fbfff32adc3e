"""What ``export`` makes of the directory it has written: a GGUF file with an Ollama Modelfile, an upload to the hub."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from hetero_mpi.errors import UserError
from hetero_mpi.model.files.model_files import read_json

_ADAPTER = "adapter_config.json"


def write_gguf(directory: Path, kind: str) -> str:
    """Write ``directory``/NAME.gguf by llama.cpp's own converter, and a ``Modelfile`` beside it; returns a sentence about them.

    The converter is looked for on the PATH, in ``$LLAMA_CPP`` and in ``~/llama.cpp``. ``kind``: the converter's type.

    :raises UserError: it is not there (with the two commands that make the file), or it fails.
    """
    target = directory / f"{directory.resolve().name}.gguf"
    is_adapter = (directory / _ADAPTER).exists()
    script = "convert_lora_to_gguf.py" if is_adapter else "convert_hf_to_gguf.py"
    arguments = [str(directory), "--outfile", str(target), "--outtype", kind]
    base = str(read_json(directory / _ADAPTER, "")["base_model_name_or_path"]) if is_adapter else None
    if base is not None:
        arguments += ["--base" if Path(base).is_dir() else "--base-model-id", base]
    converter = _find(script)
    if converter is None:
        command = shlex.join(["python", f"llama.cpp/{script}", *arguments])
        raise UserError(
            f"{directory} is written, but no GGUF file: llama.cpp's {script} is neither on the PATH nor in $LLAMA_CPP nor in "
            f"~/llama.cpp. These two commands make it:\n  git clone https://github.com/ggml-org/llama.cpp\n  {command}"
        )
    done = subprocess.run(
        [sys.executable, str(converter), *arguments], capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0 or not target.is_file():
        last = "\n".join(done.stderr.splitlines()[-8:])
        raise UserError(
            f"{directory} is written, but no GGUF file: {converter} ended with {done.returncode}:\n{last}\n"
            f"Mend what it names (its own packages are in the requirements of llama.cpp), and run it again: "
            f"{shlex.join([sys.executable, str(converter), *arguments])}"
        )
    lines = [f"FROM ./{target.name}"] if base is None else [f"FROM {base}", f"ADAPTER ./{target.name}"]
    (directory / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    name = shlex.quote(directory.resolve().name)
    return f"{target}, by {converter}; for Ollama: ollama create {name} -f {shlex.quote(str(directory / 'Modelfile'))}"


def _find(script: str) -> Path | None:
    on_path = shutil.which(script)
    places = [os.environ.get("LLAMA_CPP"), Path.home() / "llama.cpp"]
    found = [Path(on_path)] if on_path is not None else []
    found += [Path(place) / script for place in places if place]
    return next((path for path in found if path.is_file()), None)


def push(directory: Path, name: str) -> str:
    """Upload a directory to the Hugging Face hub as the model ``name`` ("org/name"), which is made, private, if it is not there.

    :raises UserError: no network, no right to write, or no such name.
    """
    import huggingface_hub
    from huggingface_hub import constants

    rule = None
    if constants.HF_HUB_OFFLINE:
        rule = "HF_HUB_OFFLINE is set"
    else:
        try:
            api = huggingface_hub.HfApi()
            api.create_repo(name, private=True, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=directory)
        except Exception as error:  # network libraries raise many kinds; none of them is a defect of this program
            rule = (str(error) or type(error).__name__).strip().splitlines()[0]
    if rule is not None:
        raise UserError(
            f"{directory} is written, but not pushed to {constants.ENDPOINT}/{name}: {rule}. With a network, and a token that may "
            f"write (`hf auth login`, or HF_TOKEN): hf upload {shlex.quote(name)} {shlex.quote(str(directory))}"
        )
    return f"{constants.ENDPOINT}/{name}"
