"""The command ``export``: convert a checkpoint to a Hugging Face or PEFT directory, and upload it. One process, without MPI.

Tensors are converted layer by layer, so models larger than memory can be exported. The model card is safe to publish, since host
names are replaced by numbers and paths by their last component.
"""

import contextlib
import html
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from hetero_mpi.data.tokenizer import is_trained_here, load_tokenizer, save_tokenizer
from hetero_mpi.device.backend import DTYPES
from hetero_mpi.interop.gguf import announce_gguf
from hetero_mpi.job.load import stored_job
from hetero_mpi.job.schema import JobConfig
from hetero_mpi.job.training_tables import AdapterTable
from hetero_mpi.model.adapters.adapter_files import adapter_directory, write_adapter
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from hetero_mpi.model.files import hub
from hetero_mpi.model.files.model_directory import ModelDirectoryWriter
from hetero_mpi.model.files.model_files import ModelFiles
from hetero_mpi.model.layer.interface import PassThrough
from hetero_mpi.model.transformers.chain import TransformersChain, build_on_meta
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.model.transformers.weights import FileStart
from hetero_mpi.model.tuning import MAGNITUDE, ROWS, Tuning, began_with, scale_of
from hetero_mpi.planning.types.plan import PlanReport
from hetero_mpi.planning.types.toml_files import plan_from_dict, profile_from_dict
from hetero_mpi.report.past_run import PastRun, anonymous
from hetero_mpi.report.plan_text import plan_title, stage_table
from hetero_mpi.report.run_text import job_rows, loss_lines
from hetero_mpi.rundir.line_files import METRICS_NAME
from hetero_mpi.rundir.logs import write_line
from hetero_mpi.rundir.metrics import Metrics, read_metrics
from hetero_mpi.state.directory import lowest_held_out, newest_good
from hetero_mpi.state.reader import CheckpointReader
from hetero_mpi.state.resume_checks import check_tensors
from hetero_mpi.util.background import warn_on_failure
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.terminal import printable

_RESULTS = ("model", "adapter")


@dataclass(frozen=True)
class ExportSource:
    """An open checkpoint, with the job, model and adapter that it belongs to."""

    reader: CheckpointReader
    path: Path
    job: JobConfig
    chain: TransformersChain
    tuning: Tuning
    base: Path | None
    """Local directory of the base weights; None if the model was trained from scratch."""


def export(source: Path, target: Path, merge: bool, best: bool = False, gguf: str | None = None) -> str:
    """Export a run directory or checkpoint file to the directory ``target``, and return a summary.

    Args:
        merge: merge the adapter into its base weights and write a full model.
        best: export the checkpoint of the run with the lowest evaluation loss.
        gguf: type of the GGUF file to be made of the export; models that cannot be converted to GGUF are rejected.

    Raises:
        UserError: If there is no complete checkpoint, no adapter to merge, no base weights, or no GGUF support.
    """
    transformers_logging.disable_progress_bar()  # a bar per layer has no use
    path = _checkpoint(source, best)
    with CheckpointReader(path) as reader:
        opened = _open(reader, path)
        tokenizer = _tokenizer(opened) if gguf is not None else None
        if gguf and (opened.job.tokenizer.train_vocab_size or (tokenizer and is_trained_here(tokenizer))):
            raise UserError(
                "gguf.trained_tokenizer",
                f"{path}: a job trained its tokenizer ([tokenizer] train_vocab_size), and llama.cpp's converter supports only "
                "published tokenizers: omit --gguf, or train a published model, or with its tokenizer ([tokenizer] path)",
            )
        if merge and opened.tuning.full:
            raise UserError("export.nothing_to_merge", f"{path} is a full model without an adapter: leave out --merge")
        if merge and (opened.base is None or not opened.base.is_dir()):
            text = f"merging needs the base weights, which are not at {opened.base}: export without --merge"
            raise UserError("export.base_missing", text)
        for line in announce_gguf(target, gguf, not (opened.tuning.full or merge)) if gguf is not None else ():
            write_line(line)
        if opened.tuning.full or merge:
            layers = _trained_layers(opened) if opened.tuning.full else _merged_layers(opened)
            what = _write_model(opened, target, layers)
        else:
            state = {name: _read(opened, name) for name in (*opened.tuning.trainable, *opened.tuning.constants)}
            base = opened.reader.required("base_model")
            with adapter_directory(target) as output:
                write_adapter(output.path, opened.tuning, state, base)
                what = f"a PEFT adapter{_complete(opened, output.path, target, 'adapter')}"
    return f"{target}: {what}, from {path}"


def _checkpoint(source: Path, best: bool) -> Path:
    if source.is_file() and source.suffix != ".toml":
        if not best:
            return source
        text = f"--best needs a run directory, and {source} is a checkpoint: leave out --best"
        raise UserError("export.best_of_file", text)
    directory = source / "checkpoints"
    if not directory.is_dir():
        text = f"{source} is neither a checkpoint file nor a run directory (it has no checkpoints/)"
        if any((source / name).is_file() for name in ("adapter_config.json", "config.json")):
            text = f"{source} has the result of a run without its checkpoints: pass the run's directory (a trainer's output_dir)"
            raise UserError("export.result", text)
        text = text if source.exists() else f"{source} does not exist; pass a run directory or a checkpoint file"
        raise UserError("export.source", text)
    if best:
        if lowest := lowest_held_out(directory):
            return lowest[0]
        raise UserError(
            "export.no_evaluated_checkpoint",
            f"{directory}: no checkpoint has an evaluation loss; set [checkpoint] every to a multiple of [train] evaluate_every, "
            "or set [train] early_stopping_patience",
        )
    path, skipped = newest_good(directory)
    if path is None:
        reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped) or "it is empty"
        raise UserError("export.no_checkpoint", f"{directory}: no complete checkpoint ({reasons})")
    return path


def _open(reader: CheckpointReader, path: Path) -> ExportSource:
    try:
        job = stored_job(reader.required("job"), path.stem, path.parent).job
    except UserError as error:
        text = f"{path}: its job is not valid in this version: {error}; export with the version that wrote it"
        raise UserError("export.job_version", text) from error
    if job.model.factory is not None:
        raise UserError(
            "export.custom_model",
            f"{path} belongs to a custom model ({job.model.factory}), which has no Hugging Face format: its run wrote "
            f"model/model.safetensors, and docs/checkpoint.md shows how to read the checkpoint itself",
        )
    chain = TransformersChain(read_config(reader.required("model_config")))
    name, tuning = reader.required("base_model"), tuning_of(job, chain)
    check_tensors(reader, path, tuning)
    base = hub.directory_of(name) if name else None
    return ExportSource(reader, path, job, chain, tuning, base)


def _write_model(source: ExportSource, target: Path, layers: Iterator[dict[str, torch.Tensor]]) -> str:
    generation = source.reader.required("generation_config") or None
    with ModelDirectoryWriter(source.chain.model, target, source.job.output.shard_bytes, generation) as writer:
        for state in layers:
            writer.add(state)
        tokenizer_note = _complete(source, writer.path, target, "model" if source.tuning.full else "merged")
    base = source.reader.required("base_model")
    added = "" if source.tuning.full else f": the weights of {base}, not quantised, with the adapter merged"
    return f"a model in {ModelFiles(target).config['dtype']}{added}{tokenizer_note}"


def _trained_layers(source: ExportSource) -> Iterator[dict[str, torch.Tensor]]:
    chain, dtype = source.chain, DTYPES[source.job.train.dtype]
    for layer in range(chain.layer_count):
        specs = (*chain.specs(layer, layer + 1), *chain.constant_specs(layer, layer + 1))
        yield {spec.name: _read(source, spec.name).to(chain.dtype_of(spec.name, dtype)) for spec in specs}


def _merged_layers(source: ExportSource) -> Iterator[dict[str, torch.Tensor]]:
    """Yield each layer's base weights, merged with the adapter in fp32 and converted to the dtypes of the base files."""
    chain, adapter = source.chain, source.tuning.adapter
    assert adapter is not None and source.base is not None
    start = FileStart(ModelFiles(source.base), chain)
    model = build_on_meta(chain.config)
    for layer in range(chain.layer_count):
        start.fill(chain, model, layer)
        specs = (*chain.specs(layer, layer + 1), *chain.constant_specs(layer, layer + 1))
        state = {spec.name: model.get_parameter(spec.name).detach() for spec in specs}
        for name, module in source.tuning.adapted_tensors(chain, layer, layer + 1).items():
            names = [f"{module}.lora_{side}.weight" for side in "AB"]
            a, b = (_read(source, lora_name) for lora_name in names)
            delta = expert_delta(model, name, a, b) if name in source.tuning.parameters else b @ a
            if source.tuning.constants:
                first_a, first_b = (_read(source, began_with(lora_name)) for lora_name in names)
                delta = delta - first_b @ first_a
            magnitude = _read(source, f"{module}{MAGNITUDE}") if adapter.dora else None
            state[name] = merged(adapter, name.removesuffix(".weight"), state[name], delta, magnitude)
        for spec in source.tuning.specs(layer, layer + 1):
            if spec.name in state:
                state[spec.name] = _read(source, spec.name)
            elif spec.name.endswith(ROWS):
                state[spec.name.removesuffix(ROWS) + ".weight"][source.tuning.tokens] = _read(source, spec.name)
        yield {name: tensor.to(start.dtypes[name]) for name, tensor in state.items()}
        for name in chain.module_names(layer):
            model.set_submodule(name, PassThrough())


def _read(source: ExportSource, name: str) -> torch.Tensor:
    return torch.from_numpy(source.reader.read("parameters", name)[0])


def _complete(source: ExportSource, folder: Path, target: Path, kind: str) -> str:
    """Write model card and tokenizer to ``folder``, which will be ``target``. Return a note if there is no tokenizer, or ""."""
    with warn_on_failure("writing the model card"):
        write_card(folder, target, source.path, source.reader.metadata, source.base, kind)
    tokenizer, run = _tokenizer(source), source.path.parent.parent
    if tokenizer is None:
        return f"; without a tokenizer, as neither {run} nor the base's directory has one: copy its files there"
    save_tokenizer(tokenizer, folder)
    return ""


def _tokenizer(source: ExportSource) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer from the result of the checkpoint's run, or from the base's directory."""
    folders = [*(source.path.parent.parent / name for name in _RESULTS), *([source.base] if source.base else [])]
    home = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return load_tokenizer(home) if home is not None else None


def push_obstacle(token: str | None) -> str:
    """Return what is known, without a network, to prevent an upload, or ""."""
    absent = "" if token or huggingface_hub.get_token() else "there is no write token (`hf auth login`, or HF_TOKEN)"
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else absent


def push_directory(
    directory: Path, name: str, private: bool = True, token: str | None = None, message: str | None = None
) -> str:
    """Upload a directory to the Hugging Face Hub as the model ``name`` ("org/name"), which is created if missing.

    Raises UserError if the upload fails, for example without a network or write access.
    """
    try:
        if obstacle := push_obstacle(token):
            raise OSError(obstacle)
        api = huggingface_hub.HfApi(token=token)
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=message)
    except Exception as error:  # network libraries raise many types; none is a defect of this program
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        owner = "" if "/" in name else " of the logged-in user"
        raise UserError(
            "export.push_failed",
            f"{directory} is written, but not pushed to {constants.ENDPOINT} as {name}{owner}: {reason}. With network access and a "
            f"write token (`hf auth login`, or HF_TOKEN), run: hf upload {shlex.quote(name)} {shlex.quote(str(directory))}",
        ) from None
    return f"{constants.ENDPOINT}/{name}"


def expert_delta(model: PreTrainedModel, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply an adapter's ``a`` (experts x r, in) and ``b`` (out, r x experts) for the fused experts ``name``, unscaled."""
    holder, _, _ = name.rpartition(".")
    experts = model.get_parameter(name).shape[0]
    first, second = a.view(experts, -1, a.shape[-1]), b.view(b.shape[0], -1, experts)
    transposed = getattr(model.get_submodule(holder), "is_transposed", False)
    return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", second, first)


def merged(
    adapter: AdapterTable, name: str, weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor | None
) -> torch.Tensor:
    """Merge ``delta``, the adapter's unscaled product B A (out, in), into a weight (out, in).

    ``name``: the adapted module or fused experts. ``magnitude``: that of DoRA (out), or None without DoRA.
    """
    summed = weight + scale_of(adapter, name) * delta
    return summed if magnitude is None else (magnitude / torch.linalg.norm(summed, dim=1)).unsqueeze(1) * summed


CARD = "README.md"
_MARK = "<!-- Written by `hetero_mpi export`, which replaces this file while this line is in it. -->"
_LICENCE_KEYS = ("license", "license_name", "license_link")
"""Keys that the model card copies from the base model's card."""


def write_card(
    target: Path, replaced: Path, checkpoint: Path, metadata: Mapping[str, Any], base: Path | None, kind: str
) -> None:
    """Write the model card to ``target``, unless ``replaced``, the directory to be replaced, has a card not written by ``export``.

    ``kind`` is ``model``, ``adapter`` or ``merged``. The run directory that contains ``checkpoint`` provides the losses.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if (replaced / CARD).is_file() and _MARK not in (replaced / CARD).read_text(encoding="utf-8", errors="replace"):
        return
    name, library = metadata["base_model"], "peft" if kind == "adapter" else "transformers"
    data: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["hetero_mpi"]}
    if name and hub.is_hub_id(name, Path(name)):
        data |= {"base_model": name, "base_model_relation": "adapter" if kind == "adapter" else "finetune"}
    licence = "unknown"
    if base is not None and (base / CARD).is_file():
        with contextlib.suppress(Exception):  # a foreign file of any form
            keys = ModelCard.load(base / CARD).data.to_dict()
            named = {key: keys[key] for key in _LICENCE_KEYS if keys.get(key)}
            data |= {key: value for key, value in named.items() if _is_text(value)}
            licence = "unrecognised: see the card of the base model" if "license" in named else licence
    if stated := data.get("license"):
        licence = ", ".join(stated) if isinstance(stated, list) else stated
    facts = {
        "base": data.get("base_model") or (Path(name).name if name else "none: trained from scratch"),
        "licence of the base": licence if name else "",
        "adapter": "added to the weights of the base" if kind == "merged" else "",
    }
    run = checkpoint.absolute().parent.parent
    title = run.name if replaced.absolute().parent == run else replaced.name  # its "best" may be copied elsewhere
    lines = [f"---\n{ModelCardData(**data).to_yaml()}\n---", _MARK, f"# {_cell(title)}"]
    ModelCard("\n\n".join([*lines, *_body(_run_of(checkpoint, metadata), facts)]) + "\n").save(target / CARD)


def _is_text(value: Any) -> bool:
    """Return whether a licence value is a printable string or a list of printable strings."""
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and printable(text) == text for text in texts)


def _run_of(checkpoint: Path, metadata: Mapping[str, Any]) -> PastRun:
    """Read the checkpoint's run, anonymised and without the steps after the checkpoint."""
    folder, step = checkpoint.absolute().parent.parent, metadata["step"]
    history = read_metrics(folder / METRICS_NAME)
    evaluations = tuple(entry for entry in history.evaluations if entry.step <= step)
    metrics = Metrics(tuple(entry for entry in history.steps if entry.step <= step), evaluations)
    report, profile = PlanReport(plan_from_dict(metadata["plan"]), 0.0, 0.0), profile_from_dict(metadata["profile"])
    return anonymous(PastRun(folder, "", metadata["job"], metadata["versions"], report, profile, metrics))


def _body(run: PastRun, facts: dict[str, str]) -> list[str]:
    """Return the paragraphs of the model card below its title."""
    assert run.report is not None
    job = {what: text for what, text in job_rows(run.job) if what != "model" or not facts["licence of the base"]}
    per = "per pair" if run.setting("train", "preference") != "none" else "nats per token"
    headings, stages = stage_table(run.report.plan, run.profile, ()).html()
    return [
        _table(("", ""), [row for row in (facts | job).items() if row[1]]),
        *(f"{_cell(line)}." for line in loss_lines(run.metrics.steps, run.metrics.evaluations, None, per)),
        f"{plan_title(run.report.plan, run.profile)}.",
        _table([name for name, _ in headings], stages),
        f"Versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}.",
    ]


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    first, *body = (f"| {' | '.join(map(_cell, row))} |" for row in ([*headings], *rows))
    return "\n".join([first, "|" + " --- |" * (first.count(" | ") + 1), *body])


def _cell(text: str) -> str:
    """Escape ``text`` for use in one line of Markdown."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
