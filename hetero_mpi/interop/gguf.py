"""``export --gguf``: convert an exported directory to GGUF with llama.cpp's converter, and write a Modelfile for Ollama.

* llama.cpp scales every layer by a single ``lora_alpha`` divided by the layer's rank. The converter is given the alpha for which
  this equals the adapter's own scale in all layers; adapters for which there is none are rejected.
* A Modelfile has the model's path, a chat template in Go, stop strings and sampling parameters. Ollama cannot run every Jinja
  template, so the Go template is built from the text that the chat template adds around known messages. It is used only if it
  renders all test conversations in the same way as the chat template.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hetero_mpi.data.answers import ChatTemplate
from hetero_mpi.data.record_shapes import BadRecord
from hetero_mpi.data.template_process import rendered_prompt
from hetero_mpi.data.tokenizer import load_tokenizer
from hetero_mpi.model.adapters.adapter_files import adapter_of
from hetero_mpi.model.adapters.peft_config import CONFIG
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_files import GENERATION, read_json
from hetero_mpi.model.transformers.generation import end_tokens, read_generation
from hetero_mpi.model.tuning import of_pattern, scale_of
from hetero_mpi.util.errors import UserError

_SYSTEM, _USERS, _ANSWERS = "Qsysq", ("Quaq", "Qubq", "Qucq"), ("Qaaq", "Qabq")
_LAST = "eq (len (slice $.Messages $i)) 1"
_PARAMETERS = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p")},
    "repetition_penalty": "repeat_penalty",
}
"""Maps keys of ``generation_config.json`` to Ollama's parameter names."""


_CONVERTER_TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
"""Types that llama.cpp's converters write; ``llama-quantize`` makes the other ones from a 16-bit file."""
_OLLAMA_TYPES = {"q4_k_s": " -q q4_K_S", "q4_k_m": " -q q4_K_M", "q8_0": " -q q8_0"}
"""Types to which ``ollama create`` quantises, with its option."""
_PLACES = "neither on the PATH nor in $LLAMA_CPP nor in ~/llama.cpp"


def announce_gguf(directory: Path, kind: str, is_adapter: bool) -> list[str]:
    """Return what to print before the export to ``directory``: which program of llama.cpp is missing, and what to run later.

    Raises UserError if ``kind`` is not a type of adapters.
    """
    if is_adapter and kind not in _CONVERTER_TYPES:
        types = ", ".join(_CONVERTER_TYPES)
        raise UserError(
            "gguf.adapter_type", f"--gguf {kind}: adapters are not quantised: choose one of {types}, or add --merge"
        )
    script = f"convert_{'lora' if is_adapter else 'hf'}_to_gguf.py"
    if _program(script) is None:
        ollama = "" if is_adapter else f" Ollama imports it: {_ollama(directory, kind)}"
        return [f"llama.cpp's {script} is {_PLACES}: {directory} will have a Modelfile but no GGUF file.{ollama}"]
    if kind not in _CONVERTER_TYPES and _program("llama-quantize") is None:
        return [
            f"llama-quantize is {_PLACES}: the GGUF file will be in 16 bits. Then run: {_remaining(directory, kind)}"
        ]
    return []


def _program(name: str) -> Path | None:
    """Return the path of a program of llama.cpp, or None if it is not found."""
    folders = [Path(folder) for folder in (os.environ.get("LLAMA_CPP"), Path.home() / "llama.cpp") if folder]
    paths = [
        Path(shutil.which(name) or ""),
        *(folder / part / name for folder in folders for part in ("", "build/bin")),
    ]
    return next((path for path in paths if path.is_file()), None)


def _files(directory: Path, kind: str) -> tuple[Path, Path]:
    """Return the paths of the converter's file and of the quantised file."""
    name = directory.resolve().name
    return directory / f"{name}.gguf", directory / f"{name}-{kind.upper()}.gguf"


def _ollama(directory: Path, kind: str = "") -> str:
    name, file = shlex.quote(directory.resolve().name), shlex.quote(str(directory / "Modelfile"))
    return f"ollama create {name}{_OLLAMA_TYPES.get(kind, '')} -f {file}"


def _remaining(directory: Path, kind: str) -> str:
    """Return the command that quantises the 16-bit file."""
    words = ["llama-quantize", *map(str, _files(directory, kind)), kind.upper()]
    return _ollama(directory, kind) if kind in _OLLAMA_TYPES else shlex.join(words)


def write_gguf(directory: Path, kind: str, command: str) -> str:
    """Write ``directory``/NAME.gguf, or NAME-TYPE.gguf if quantised, with llama.cpp, and a ``Modelfile``. Return a summary.

    Args:
        kind: type of the file, in lower case.
        command: the user's command line, to quote in messages.

    Raises UserError if the adapter is not supported, or if the converter is missing or fails.
    """
    if (directory / CONFIG).exists():
        script, (alpha, base) = "convert_lora_to_gguf.py", _alpha_and_base(directory)
    else:
        script, alpha, base = "convert_hf_to_gguf.py", None, None
    programs, notes, is_quantized = [_program(script)], list[str](), kind not in _CONVERTER_TYPES
    target, quantized = _files(directory, kind)
    for path in (target, quantized):
        path.unlink(missing_ok=True)  # of another export
    problem = (
        f"{directory} is written, with a Modelfile, but no GGUF file: llama.cpp's {script} is {_PLACES}. "
        f"These two commands create it:\n  git clone https://github.com/ggml-org/llama.cpp\n  LLAMA_CPP=llama.cpp {command}"
    )
    if programs[0] is not None:
        problem = _convert(programs[0], directory, target, "auto" if is_quantized else kind, alpha, base)
        if is_quantized and not problem:
            programs.append(quantizer := _program("llama-quantize"))
            if quantizer is None:
                notes.append(f"in 16 bits: to quantise, run: {_remaining(directory, kind)}")
            else:
                output, problem = _run(
                    [str(quantizer), str(target), str(quantized), kind.upper()], directory, quantized
                )
                wide = re.search(r"(\d+ of \d+) tensor\(s\) required fallback", output)
                notes += [f"{wide[1]} tensors have a wider type, as rows are no multiple of its block"] if wide else []
                (quantized if problem else target).unlink(missing_ok=True)
                target = quantized
        problem = problem and f"{problem}, and run this again: {command}"
    notes += write_modelfile(directory, target, base)
    if problem:
        raise UserError("gguf.unsupported", problem)
    by = " and ".join(str(program) for program in programs if program is not None)
    return "; ".join([f"{target}, by {by}", f"for Ollama: {_ollama(directory)}", *notes])


def _convert(converter: Path, directory: Path, target: Path, kind: str, alpha: float | None, base: str | None) -> str:
    """Run the converter, and return an error message, or "" if it succeeds."""
    with tempfile.TemporaryDirectory() as folder:
        source = directory if alpha is None else _with_alpha(directory, Path(folder) / directory.resolve().name, alpha)
        arguments = [str(source), "--outfile", str(target), "--outtype", kind]
        if base is not None:
            files = hub.directory_of(base)
            arguments += ["--base", str(files)] if files.is_dir() else ["--base-model-id", base]
        return _run([sys.executable, str(converter), *arguments], directory, target)[1]


def _run(command: list[str], directory: Path, result: Path) -> tuple[str, str]:
    """Run a program of llama.cpp that writes ``result``. Return its output, and an error message, or "" if it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0 and result.is_file():
        return done.stdout + done.stderr, ""
    last = "\n".join((done.stderr or done.stdout).splitlines()[-8:])
    return "", (
        f"{directory} is written, but not {result.name}: {shlex.join(command[:2])} ended with {done.returncode}:\n{last}\n"
        "Fix the reported error (llama.cpp's requirements list the converter's packages)"
    )


def _alpha_and_base(directory: Path) -> tuple[float, str]:
    """Return the ``lora_alpha`` whose ratio to the rank, llama.cpp's scale, is right for every layer, and the base model."""
    adapter, base = adapter_of(directory)
    reason = None
    ranks = {name: of_pattern(adapter.rank_pattern or {}, name, adapter.rank) for name in adapter.targets}
    alphas = {
        float(f"{scale_of(adapter, name) * rank:.12g}") for name, rank in ranks.items()
    }  # equal ones are so when rounded
    if adapter.dora:
        reason = "llama.cpp does not support DoRA"
    elif adapter.parameters:
        reason = "llama.cpp's converter does not support adapters of fused experts (target_parameters)"
    elif adapter.modules_to_save or adapter.tokens:
        reason = "llama.cpp's converter does not support modules_to_save or trained tokens"
    elif len(alphas) > 1:
        reason = "llama.cpp uses one alpha for all layers, but alpha_pattern or rank_pattern give this adapter several"
    elif base is None:
        reason = "the base model is unknown (base_model_name_or_path is empty)"
    if reason is not None:
        raise UserError(
            "gguf.adapter_unsupported",
            f"{directory} is written, but no GGUF file: {reason}; to convert the merged model, export with --merge --gguf",
        )
    assert base is not None
    return alphas.pop(), base


def _with_alpha(directory: Path, copy: Path, alpha: float) -> Path:
    """Copy the adapter to ``copy``, with a config of plain LoRA with this ``lora_alpha`` and links to its other files."""
    copy.mkdir()
    for path in directory.iterdir():
        if path.name != CONFIG:
            (copy / path.name).symlink_to(path.absolute())
    keys = read_json(directory / CONFIG, "") | {"lora_alpha": alpha, "use_rslora": False}
    keys |= {"rank_pattern": {}, "alpha_pattern": {}}
    (copy / CONFIG).write_text(json.dumps(keys), encoding="utf-8")
    return copy


def write_modelfile(directory: Path, gguf: Path, base: str | None) -> list[str]:
    """Write ``directory``/Modelfile, and return notes on parts that it lacks. ``base`` is an adapter's base model, else None.

    Raises UserError if the tokenizer or ``generation_config.json`` cannot be read.
    """
    lines, notes = _origin(gguf, base), []
    folders = [directory, *([hub.directory_of(base)] if base is not None else [])]
    home = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    tokenizer = load_tokenizer(home) if home is not None else None
    settings = next((generation for folder in folders if (generation := read_generation(folder)) is not None), {})
    layout = None
    if tokenizer is not None:
        try:
            layout = layout_of(tokenizer)
            lines += [f'TEMPLATE """{layout.template}"""'] if layout is not None else []
        except ValueError as error:
            notes.append(f"no TEMPLATE in the Modelfile, so Ollama guesses the chat template: {error}")
        lines += [
            f"PARAMETER stop {_quoted(text)}" for text in _stops(tokenizer, layout, end_tokens(settings, GENERATION))
        ]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(settings)]
    (directory / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return notes


def _origin(gguf: Path, base: str | None) -> list[str]:
    if base is None:
        return [f"FROM ./{gguf.name}" if gguf.is_file() else "FROM ."]
    note = f"# {base} is a Hugging Face Hub name: replace it with Ollama's name of the model, or its GGUF file"
    return [*([] if os.path.isabs(base) else [note]), f"FROM {base}", f"ADAPTER ./{gguf.name}"]


@dataclass(frozen=True)
class Layout:
    """The text that a chat template adds around messages."""

    head: str
    """Text before the first user turn if there is no system message."""
    system_head: str | None
    """Text before the system message; None if the template does not support system messages."""
    system_end: str
    """Text after the system message."""
    folded: bool
    """Whether the system message is part of the first user turn, before the user's message."""
    user: str
    """Text before a user message."""
    answer: str
    """Text between a user message and its answer."""
    last: str
    """Text between the last user message and the answer to generate."""
    end: str
    """Text after an answer that is followed by another turn."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation: an optional system message, then turns that begin and end with a user message."""
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = messages if system is None else messages[1:]
        text, folded = self.head, ""
        if system is not None:
            text = self.system_head or ""
            folded = system + self.system_end if self.folded else ""
            text += "" if self.folded else system + self.system_end
        for index, turn in enumerate(turns):
            if turn["role"] == "user":
                suffix = self.last if index == len(turns) - 1 else self.answer
                text += self.user + (folded if index == 0 else "") + turn["content"] + suffix
            else:
                text += turn["content"] + self.end
        return text

    @property
    def template(self) -> str:
        """The layout as a Go template that uses Ollama's variables."""
        system = "" if self.folded else "{{ .System }}" + _literal(self.system_end)
        head = _literal(self.head)
        if self.system_head is not None:
            alternative = f"{{{{ else }}}}{head}" if head else ""
            head = f"{{{{ if .System }}}}{_literal(self.system_head)}{system}{alternative}{{{{ end }}}}"
        inner = (
            f"{{{{ if and $.System (eq $i 1) }}}}{{{{ $.System }}}}{_literal(self.system_end)}{{{{ end }}}}"
            if self.folded
            else ""
        )
        suffix = _literal(self.last)
        if self.answer != self.last:
            suffix = f"{{{{ if {_LAST} }}}}{suffix}{{{{ else }}}}{_literal(self.answer)}{{{{ end }}}}"
        return (
            f"{head}{{{{ range $i, $_ := .Messages }}}}"
            f'{{{{ if eq .Role "user" }}}}{_literal(self.user)}{inner}{{{{ .Content }}}}{suffix}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{{{{ if not ({_LAST}) }}}}{_literal(self.end)}{{{{ end }}}}'
            f"{{{{ end }}}}{{{{ end }}}}"
        )


def layout_of(tokenizer: PreTrainedTokenizerFast) -> Layout | None:
    """Derive the layout of the tokenizer's chat template, or return None if it has none.

    Raises ValueError if a Modelfile cannot express the template.
    """
    source = tokenizer.chat_template
    if not source:
        return None
    if not isinstance(source, str):
        raise ValueError("there are several")
    if "strftime_now" in source:
        raise ValueError("it prints the date")
    short, long = _render(tokenizer, _conversation(1)), _render(tokenizer, _conversation(2))
    head, end = _between(long, None, _USERS[0]), _between(long, _ANSWERS[0], _USERS[1])
    user = next(head[first:] for first in range(len(head) + 1) if end.endswith(head[first:]))
    answer, last = _between(long, _USERS[0], _ANSWERS[0]), _between(short, _USERS[0], None)
    system_head, system_end, folded = _system(tokenizer, user)
    texts = Layout(head.removesuffix(user), system_head, system_end, folded, user, answer, last, end.removesuffix(user))
    for turns in (1, 2, 3):
        for system in (False, True) if system_head is not None else (False,):
            messages = _conversation(turns, system)
            if texts.render(messages) != _render(tokenizer, messages):
                raise ValueError("text around a message depends on more than its role")
    if '"""' in texts.template:
        raise ValueError('it contains """')
    return texts


def _system(tokenizer: PreTrainedTokenizerFast, user: str) -> tuple[str | None, str, bool]:
    """Return ``system_head``, ``system_end`` and ``folded`` of the layout."""
    try:
        text = _render(tokenizer, _conversation(1, True))
        before, behind = _between(text, None, _SYSTEM), _between(text, _SYSTEM, _USERS[0])
    except ValueError:  # refused, or left out
        return None, "", False
    if behind.endswith(user):
        return before, behind.removesuffix(user), False
    if before.endswith(user):
        return before.removesuffix(user), behind, True
    raise ValueError("the position of the system message depends on more than the text before it")


def _conversation(turns: int, system: bool = False) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": _SYSTEM}] if system else []
    for turn in range(turns):
        messages.append({"role": "user", "content": _USERS[turn]})
        messages += [{"role": "assistant", "content": _ANSWERS[turn]}] if turn < turns - 1 else []
    return messages


def _render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> str:
    """Render messages with the chat template, without a BOS token that the tokenizer adds too, as Ollama does."""
    begin = str(tokenizer.bos_token) if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else ""
    template = ChatTemplate("chat", str(tokenizer.chat_template), None, tokenizer.special_tokens_map)
    try:
        return rendered_prompt(template, messages).removeprefix(begin)
    except BadRecord as error:
        raise ValueError(f"it refuses a conversation ({str(error).splitlines()[0]})") from None


def _between(text: str, first: str | None, second: str | None) -> str:
    """Return the text between two markers that must each occur once. None stands for the start or end of ``text``."""
    if any(marker is not None and text.count(marker) != 1 for marker in (first, second)):
        raise ValueError("it omits a message")
    after = text.split(first)[1] if first is not None else text
    return after.split(second)[0] if second is not None else after


def _literal(text: str) -> str:
    return text.replace("{", '{{ "{" }}')


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'


def _stops(tokenizer: PreTrainedTokenizerFast, layout: Layout | None, ends: Sequence[int]) -> list[str]:
    """Return the stop strings: the end tokens, and the special token that ends an answer in the chat template."""
    ids = {end for end in ends if 0 <= end < len(tokenizer)}
    texts = [str(text) for text in tokenizer.convert_ids_to_tokens(sorted(ids | ({tokenizer.eos_token_id} - {None})))]
    behind = (layout.end + layout.user).lstrip() if layout is not None else ""
    texts += [token.content for token in tokenizer.added_tokens_decoder.values() if behind.startswith(token.content)]
    return list(dict.fromkeys(texts))


def _sampling(settings: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the sampling parameters in ``generation_config.json``, with Ollama's names."""
    if settings.get("do_sample") is False:
        return [("temperature", 0)]
    parameters = []
    for key, name in _PARAMETERS.items():
        value = settings.get(key)
        if value is None:
            continue
        if not math.isfinite(value):
            raise UserError(
                "generation.value", f"{GENERATION}: {key} = {value!r} is not a number; correct or remove it"
            )
        parameters.append((name, value))
    return parameters
