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
from itertools import zip_longest
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
_PARAMETERS = {k: k for k in ("temperature", "top_k", "top_p", "min_p")} | {"repetition_penalty": "repeat_penalty"}
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
        rule = f"adapters are not quantised: choose one of {', '.join(_CONVERTER_TYPES)}, or add --merge"
        raise UserError("gguf.adapter_type", f"--gguf {kind}: {rule}")
    if _program(script := _converter_name(is_adapter)) is None:
        return [f"llama.cpp's {script} is {_PLACES}: {directory} will have a Modelfile but no GGUF file"]
    if kind not in _CONVERTER_TYPES and _program("llama-quantize") is None:
        later = _remaining(directory, kind)
        return [f"llama-quantize is {_PLACES}: the GGUF file will be in 16 bits. Then run: {later}"]
    return []


def _converter_name(is_adapter: bool) -> str:
    return f"convert_{'lora' if is_adapter else 'hf'}_to_gguf.py"


def _program(name: str) -> Path | None:
    """Return the path of a program of llama.cpp, or None if it is not found."""
    folders = [Path(folder) for folder in (os.environ.get("LLAMA_CPP"), Path.home() / "llama.cpp") if folder]
    paths = [folder / part / name for folder in folders for part in ("", "build/bin")]
    return next((path for path in (Path(shutil.which(name) or ""), *paths) if path.is_file()), None)


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

    ``command`` is the user's command line, to quote in messages. Raises UserError if the adapter is not supported, or if the
    converter is missing or fails.
    """
    alpha, base = _alpha_and_base(directory) if (directory / CONFIG).exists() else (None, None)
    target, quantized = _files(directory, kind)
    for path in (target, quantized):
        path.unlink(missing_ok=True)  # of another export
    is_quantized, notes = kind not in _CONVERTER_TYPES, list[str]()
    converter = _program(script := _converter_name(base is not None))
    quantizer = _program("llama-quantize") if is_quantized else None
    try:
        if converter is None:
            raise UserError(
                "gguf.unsupported",
                f"{directory} is written, with a Modelfile, but no GGUF file: llama.cpp's {script} is {_PLACES}. These "
                f"commands create it:\n  git clone https://github.com/ggml-org/llama.cpp\n"
                + "  cmake -S llama.cpp -B llama.cpp/build && cmake --build llama.cpp/build --target llama-quantize\n"
                * is_quantized
                + f"  LLAMA_CPP=llama.cpp {command}",
            )
        with tempfile.TemporaryDirectory() as folder:
            source = directory
            words = [sys.executable, str(converter), "--outfile", str(target)]
            words += ["--outtype", "auto" if is_quantized else kind]
            if alpha is not None and base is not None:
                source, files = _with_alpha(directory, Path(folder), alpha), hub.directory_of(base)
                words += ["--base", str(files)] if files.is_dir() else ["--base-model-id", base]
            _run([*words, str(source)], directory, target, command)
        if quantizer is not None:
            output = _run([str(quantizer), str(target), str(quantized), kind.upper()], directory, quantized, command)
            target.unlink()
            target = quantized
            if wide := re.search(r"(\d+ of \d+) tensor\(s\) required fallback", output):
                notes.append(f"{wide[1]} tensors have a wider type, as rows are no multiple of its block")
        elif is_quantized:
            notes.append(f"in 16 bits: to quantise, run: {_remaining(directory, kind)}")
    finally:
        notes += write_modelfile(directory, target, base)
    by = " and ".join(str(program) for program in (converter, quantizer) if program is not None)
    return "; ".join([f"{target}, by {by}", f"for Ollama: {_ollama(directory)}", *notes])


def _run(words: list[str], directory: Path, result: Path, command: str) -> str:
    """Run a program of llama.cpp that writes ``result``, and return its output. Raises UserError if the program fails."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not result.is_file():
        result.unlink(missing_ok=True)
        last = "\n".join((done.stderr or done.stdout).splitlines()[-8:])
        raise UserError(
            "gguf.unsupported",
            f"{directory} is written, but not {result.name}: {shlex.join(words[:2])} ended with {done.returncode}:\n{last}\n"
            f"Fix the reported error (llama.cpp's requirements list the converter's packages), and run this again: {command}",
        )
    return done.stdout + done.stderr


def _alpha_and_base(directory: Path) -> tuple[float, str]:
    """Return the ``lora_alpha`` whose ratio to the rank, llama.cpp's scale, is right for every layer, and the base model."""
    adapter, base = adapter_of(directory)
    ranks = {name: of_pattern(adapter.rank_pattern or {}, name, adapter.rank) for name in adapter.targets}
    alphas = {f"{scale_of(adapter, name) * rank:.12g}" for name, rank in ranks.items()}  # without rounding errors
    is_more, is_uneven = bool(adapter.modules_to_save or adapter.tokens), len(alphas) > 1
    unsupported = {
        "llama.cpp does not support DoRA": adapter.dora,
        "llama.cpp's converter does not support adapters of fused experts (target_parameters)": adapter.parameters,
        "llama.cpp's converter does not support modules_to_save or trained tokens": is_more,
        "llama.cpp uses one alpha for all layers, but alpha_pattern or rank_pattern give this adapter several": is_uneven,
        "the base model is unknown (base_model_name_or_path is empty)": base is None,
    }
    reasons = [reason for reason, applies in unsupported.items() if applies]
    if base is None or reasons:
        raise UserError(
            "gguf.adapter_unsupported",
            f"{directory} is written, but no GGUF file: {reasons[0]}; to convert the merged model, export with --merge --gguf",
        )
    return float(alphas.pop()), base


def _with_alpha(directory: Path, folder: Path, alpha: float) -> Path:
    """Copy the adapter to ``folder``, with a config of plain LoRA with this ``lora_alpha`` and links to its other files."""
    copy = folder / directory.resolve().name
    copy.mkdir()
    for path in directory.iterdir():
        if path.name != CONFIG:
            (copy / path.name).symlink_to(path.absolute())
    plain = {"lora_alpha": alpha, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    (copy / CONFIG).write_text(json.dumps(read_json(directory / CONFIG, "") | plain), encoding="utf-8")
    return copy


def write_modelfile(directory: Path, gguf: Path, base: str | None) -> list[str]:
    """Write ``directory``/Modelfile, and return notes on parts that it lacks. ``base`` is an adapter's base model, else None.

    Raises UserError if the tokenizer or ``generation_config.json`` cannot be read.
    """
    lines, notes = [f"FROM ./{gguf.name}" if gguf.is_file() else "FROM ."], []
    if base is not None:
        note = f"# {base} is a Hugging Face Hub name: replace it with Ollama's name of the model, or its GGUF file"
        lines = [*([] if os.path.isabs(base) else [note]), f"FROM {base}", f"ADAPTER ./{gguf.name}"]
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
        stops = _stops(tokenizer, layout, end_tokens(settings, GENERATION))
        lines += [f"PARAMETER stop {_quoted(text)}" for text in stops]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(settings)]
    (directory / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return notes


@dataclass(frozen=True)
class Layout:
    """The text that a chat template adds around messages.

    A conversation is ``head`` or, with a system message, ``system_head`` SYSTEM ``system_end``; then ``user`` USER ``answer``
    ANSWER ``end`` per turn; then ``user`` USER ``last`` for the answer to generate. If ``folded``, SYSTEM ``system_end`` stands
    directly before the first USER instead. ``system_head`` is None if the template does not support system messages.
    """

    head: str
    system_head: str | None
    system_end: str
    folded: bool
    user: str
    answer: str
    last: str
    end: str

    def render(self, system: str | None, turns: Sequence[Mapping[str, str]]) -> str:
        """Render turns that begin and end with a user message, after a system message if there is one."""
        text, system_text = self.head, ""
        if system is not None:
            text, system_text = self.system_head or "", system + self.system_end
        before_first = self.user + system_text if self.folded else system_text + self.user
        for index, turn in enumerate(turns):
            if turn["role"] == "user":
                before = before_first if index == 0 else self.user
                text += before + turn["content"] + (self.last if index == len(turns) - 1 else self.answer)
            else:
                text += turn["content"] + self.end
        return text

    @property
    def template(self) -> str:
        """The layout as a Go template that uses Ollama's variables."""
        head, system_end, inner = _literal(self.head), _literal(self.system_end), ""
        if self.system_head is not None:
            system = "" if self.folded else "{{ .System }}" + system_end
            head = _choice(".System", _literal(self.system_head) + system, head)
        if self.folded:
            inner = _choice("and $.System (eq $i 1)", "{{ $.System }}" + system_end)
        suffix = _choice(_LAST, _literal(self.last), _literal(self.answer))
        return (
            f"{head}{{{{ range $i, $_ := .Messages }}}}"
            f'{{{{ if eq .Role "user" }}}}{_literal(self.user)}{inner}{{{{ .Content }}}}{suffix}'
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{_choice(f"not ({_LAST})", _literal(self.end))}'
            "{{ end }}{{ end }}"
        )


def _choice(condition: str, text: str, otherwise: str = "") -> str:
    """Return a Go template that renders ``text`` if the condition holds, else ``otherwise``."""
    alternative = f"{{{{ else }}}}{otherwise}" if otherwise else ""
    return text if text == otherwise else f"{{{{ if {condition} }}}}{text}{alternative}{{{{ end }}}}"


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
    short, long = _render(tokenizer, None, 1), _render(tokenizer, None, 2)
    head, end = _between(long, None, _USERS[0]), _between(long, _ANSWERS[0], _USERS[1])
    user = next(head[first:] for first in range(len(head) + 1) if end.endswith(head[first:]))
    answer, last = _between(long, _USERS[0], _ANSWERS[0]), _between(short, _USERS[0], None)
    system_head, system_end, folded = _system(tokenizer, user)
    texts = Layout(head.removesuffix(user), system_head, system_end, folded, user, answer, last, end.removesuffix(user))
    for system in (None, _SYSTEM) if system_head is not None else (None,):
        for count in (1, 2, 3):
            if texts.render(system, _turns(count)) != _render(tokenizer, system, count):
                raise ValueError("text around a message depends on more than its role")
    if '"""' in texts.template:
        raise ValueError('it contains """')
    return texts


def _system(tokenizer: PreTrainedTokenizerFast, user: str) -> tuple[str | None, str, bool]:
    """Return ``system_head``, ``system_end`` and ``folded`` of the layout."""
    try:
        text = _render(tokenizer, _SYSTEM, 1)
        before, behind = _between(text, None, _SYSTEM), _between(text, _SYSTEM, _USERS[0])
    except ValueError:  # refused, or left out
        return None, "", False
    if behind.endswith(user):
        return before, behind.removesuffix(user), False
    if before.endswith(user):
        return before.removesuffix(user), behind, True
    raise ValueError("the position of the system message depends on more than the text before it")


def _turns(count: int) -> list[dict[str, str]]:
    """Return ``count`` user messages, with answers between them."""
    users = [{"role": "user", "content": text} for text in _USERS[:count]]
    answers = [{"role": "assistant", "content": text} for text in _ANSWERS[: count - 1]]
    return [message for pair in zip_longest(users, answers) for message in pair if message is not None]


def _render(tokenizer: PreTrainedTokenizerFast, system: str | None, count: int) -> str:
    """Render ``count`` turns with the chat template, without a BOS token that the tokenizer adds too, as Ollama does."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    begin = str(tokenizer.bos_token) if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else ""
    template = ChatTemplate("chat", str(tokenizer.chat_template), None, tokenizer.special_tokens_map)
    try:
        return rendered_prompt(template, messages + _turns(count)).removeprefix(begin)
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
    values = {key: settings[key] for key in _PARAMETERS if settings.get(key) is not None}
    for key, value in values.items():
        if not math.isfinite(value):
            text = f"{GENERATION}: {key} = {value!r} is not a number; correct or remove it"
            raise UserError("generation.value", text)
    return [(_PARAMETERS[key], value) for key, value in values.items()]
