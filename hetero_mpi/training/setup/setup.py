"""Set up a run before any weight is read: job, devices, data, and the model's structure. ``train`` and ``profile`` begin here.

The setup also tests that the job's optimizer can take a step on each rank.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import hetero_mpi
from hetero_mpi.comm.ranks.mpi_start import check_versions
from hetero_mpi.comm.ranks.versions import own_versions
from hetero_mpi.comm.ranks.world import World
from hetero_mpi.comm.transport import Transport
from hetero_mpi.data.batch import steps_per_epoch
from hetero_mpi.data.dataset import Samples
from hetero_mpi.device.accelerators import BACKENDS, best_dtype, open_backend, visible_devices
from hetero_mpi.device.backend import HOST, Backend
from hetero_mpi.device.choice import Cores, VisibleDevices, cores_of, device_spec, gpu_of
from hetero_mpi.device.operators import product_on
from hetero_mpi.device.products import is_faster_in_bf16, widen_products
from hetero_mpi.device.self_test import SelfTest
from hetero_mpi.job.load import LoadedJob, job_from_dict, job_to_dict, load_job, run_directory
from hetero_mpi.job.rules import EIGHT_BIT, as_toml
from hetero_mpi.job.schema import ClusterTable, TokenizerTable
from hetero_mpi.job.training_tables import AdapterTable, TrainTable
from hetero_mpi.model.adapters.adapter_files import with_patterns_of
from hetero_mpi.model.adapters.adapter_tuning import tuning_of
from hetero_mpi.model.layer.interface import LayerChain
from hetero_mpi.model.library_optimizers import LibraryOptimizers
from hetero_mpi.model.optimizer import steps_of
from hetero_mpi.model.transformers.chain import TransformersChain
from hetero_mpi.model.transformers.families import read_config
from hetero_mpi.planning.types.moments import OF_OPTIMIZER
from hetero_mpi.rundir.logs import say, setup_logging
from hetero_mpi.rundir.run_directory import claim, refuse_links
from hetero_mpi.training.setup.compile_mode import settle_compile_mode
from hetero_mpi.training.setup.context import RunContext, TrainOptions
from hetero_mpi.training.setup.custom_model import custom_chain
from hetero_mpi.training.setup.data_setup import prepare
from hetero_mpi.util import units
from hetero_mpi.util.errors import UserError
from hetero_mpi.util.host_limits import allowed_cores, core_quota


def look_around(world: World, run_dir: Path | None = None, waits: bool = False) -> None:
    """Set up logging and check versions. Collective. ``run_dir``: directory for logs, or None. ``waits``: see ``setup_logging``."""
    setup_logging(run_dir, world.rank, world.size, waits)
    transformers_logging.disable_progress_bar()  # only rank 0 reports progress
    check_versions(world, own_versions(world.library))


def read_job(world: World, options: TrainOptions) -> tuple[LoadedJob, Path]:
    """Read the job and the run directory on rank 0, which alone needs the file, and broadcast them. Collective."""
    shared: list[Any] | None = None
    with world.on_leader("reading the job"):
        if world.rank == 0:
            job = options.job
            loaded = job if isinstance(job, LoadedJob) else load_job(job, options.overrides)
            places = str(loaded.path), loaded.name, str(loaded.directory), str(run_directory(loaded, options.run_dir))
            shared = [job_to_dict(loaded.job), *places]
    tables, path, name, directory, run_dir = world.broadcast_json(shared)
    return LoadedJob(job_from_dict(tables), Path(path), name, Path(directory)), Path(run_dir)


@contextlib.contextmanager
def lock_run_directory(world: World, run_dir: Path) -> Iterator[None]:
    """Lock the run directory on rank 0 within a context. If another run holds the lock, all ranks raise an error. Collective."""
    with contextlib.ExitStack() as stack:
        with world.on_leader("claiming the run directory"):
            if world.rank == 0:
                stack.enter_context(claim(run_dir))
        with world.collective_errors("checking the run directory"):
            refuse_links(run_dir)
        yield


def set_up(world: World, transport: Transport, loaded: LoadedJob, run_dir: Path) -> RunContext:
    """Open the devices, read the data (rank 0) and build the model's chain without weights. Collective."""
    job, material = loaded.job, None
    backend, cores, threads = open_rank(world, job.cluster)
    rows = world.all_gather_json([world.host, backend.name, backend.description(), threads])
    say(f"hetero_mpi {hetero_mpi.__version__}, {world.library}, {world.size} rank{'s' if world.size > 1 else ''}")
    alike: dict[str, list[int]] = {}
    for rank, (host, name, description, count) in enumerate(rows):
        alike.setdefault(f"{host}, {name} ({description}), {units.plural(count, 'thread')}", []).append(rank)
    say(*(f"  {units.ranks(ranks)}: {text}{' each' if len(ranks) > 1 else ''}" for text, ranks in alike.items()))
    loaded = _with_dtype(world, loaded, backend)
    job = loaded.job
    with world.on_leader("preparing the data"):
        if world.rank == 0:
            material = prepare(loaded)
    loaded = _with_adapter(world, loaded, material.tokenizer if material is not None else None)
    # Epochs and relative intervals become numbers of steps.
    samples = world.broadcast_json(len(material.dataset.train) if material is not None else None)
    train, checkpoint = loaded.job.train, loaded.job.checkpoint
    per_epoch = steps_per_epoch(samples, train.global_batch, train.last_batch == "smaller")
    steps = train.steps if train.epochs is None else math.ceil(train.epochs * per_epoch)
    tables = {
        "train": train.model_copy(update={"steps": steps, "evaluate_every": steps_of(train.evaluate_every, steps)}),
        "checkpoint": checkpoint.model_copy(update={"every": steps_of(checkpoint.every, steps)}),
    }
    loaded = replace(loaded, job=loaded.job.model_copy(update=tables))
    job = loaded.job
    keys = world.broadcast_json(material.config if material is not None else None)
    chain: LayerChain
    if job.model.factory is not None:
        dataset_of_rank = material.dataset if material is not None else None
        chain = custom_chain(world, loaded, keys, dataset_of_rank if isinstance(dataset_of_rank, Samples) else None)
    else:
        with world.collective_errors("reading the model's configuration"):
            chain = TransformersChain(read_config(keys), job.train.dropout)
    with world.collective_errors("reading the model's configuration"):
        tuning = tuning_of(job, chain)
        if job.train.optimizer != "adamw":
            check_optimizer(job.train, backend, f"rank {world.rank} ({world.host})")
    if material is not None:
        dataset = material.dataset
        say(*material.notes)
        smaller, row = job.train.last_batch == "smaller", units.row(job.data.sequence_length)
        say(
            f"data: {len(dataset.train):,} training and {len(dataset.held_out):,} evaluation "
            f"{units.rows_of(job.data.sequence_length)}; "
            f"{units.plural(job.train.steps, 'step')} of {units.plural(job.train.global_batch, row)} "
            f"{'is' if job.train.steps == 1 else 'are'} {steps / per_epoch:.3g} epochs"
        )
        if job.train.global_batch > len(dataset.train) and not smaller:
            say(
                f"the batch is larger than the training data: each {row} occurs in every step "
                f"{job.train.global_batch / len(dataset.train):.3g} times. Lower train.global_batch, or add data"
            )
    parameters = sum(spec.count for spec in chain.parameters.values())
    weights = ", weights in nf4" if job.model.quantization == "nf4" else ""
    say(f"model: {chain.summary}, {parameters:,} parameters, {job.train.dtype}{weights}")
    if tuning.adapter is not None:
        say(tuning.summary(chain))
    context = RunContext(world, transport, loaded, run_dir, material, chain, tuning, backend, cores, threads, per_epoch)
    return settle_compile_mode(context)


def open_rank(world: World, cluster: ClusterTable) -> tuple[Backend, float, int]:
    """Open this rank's device; returns it with the rank's number of CPU cores and of compute threads. Collective."""
    backend = open_device(world, cluster.device)
    everyone = world.all_gather_json([world.host, allowed_cores(), core_quota(), backend.name == "cpu"])
    cores = cores_of(world.rank, [Cores(host, tuple(allowed), *more) for host, allowed, *more in everyone])
    threads = cluster.threads if isinstance(cluster.threads, int) else default_threads(cores)
    torch.set_num_threads(threads)  # the bits of a matrix product may depend on their number
    return backend, cores, threads


def _with_adapter(world: World, loaded: LoadedJob, tokenizer: PreTrainedTokenizerFast | None) -> LoadedJob:
    """Complete ``[adapter]`` from the initial adapter on rank 0, and resolve its tokens to ids. Collective."""
    adapter = loaded.job.adapter
    if adapter.method == "none":
        return loaded
    fields: dict[str, Any] | None = None
    with world.on_leader("reading the adapter"):
        if world.rank == 0:
            table = adapter if adapter.path is None else with_patterns_of(loaded.resolve(adapter.path), adapter)
            tokens = _token_ids(table, loaded.job.tokenizer, tokenizer)
            fields = table.model_copy(update={"tokens": tokens}).model_dump()
    table = AdapterTable(**world.broadcast_json(fields))
    return replace(loaded, job=loaded.job.model_copy(update={"adapter": table}))


def _token_ids(
    adapter: AdapterTable, table: TokenizerTable, tokenizer: PreTrainedTokenizerFast | None
) -> list[int] | None:
    """Return the ascending ids of ``adapter.tokens``, by default the tokens added to the tokenizer; None if there are none."""
    tokens = [*table.add, *table.add_special] if adapter.tokens is None else adapter.tokens
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    unknown = [token for token in tokens if isinstance(token, str) and token not in vocabulary]
    if unknown:
        raise UserError(
            "adapter.tokens",
            f"[adapter] tokens: {as_toml(unknown[0])} is not a token of the tokenizer: correct it, or add it with [tokenizer] add",
        )
    return sorted({token if isinstance(token, int) else vocabulary[token] for token in tokens}) or None


def _with_dtype(world: World, loaded: LoadedJob, backend: Backend) -> LoadedJob:
    """Return the job with a resolved compute dtype, which is the same on all ranks. Collective."""
    ranks = [(name, dtypes) for name, dtypes in world.all_gather_json([backend.name, list(backend.dtypes())])]
    dtype: str = loaded.job.train.dtype
    if dtype == "auto":
        dtype, reason = best_dtype(ranks, all(world.all_gather_json(is_faster_in_bf16())))
        say(f"dtype {dtype}: {reason}")
    idle_ranks = [f"rank {rank} ({name})" for rank, (name, dtypes) in enumerate(ranks) if dtype not in dtypes]
    if idle_ranks:
        say(f"{', '.join(idle_ranks)} cannot compute in {dtype} and will idle")
    settle_products(world, backend, dtype)
    table = loaded.job.train.model_copy(update={"dtype": dtype})
    return replace(loaded, job=loaded.job.model_copy(update={"train": table}))


def settle_products(world: World, backend: Backend, dtype: str) -> None:
    """Compute matrix products in ``dtype``, or in fp32 on ranks whose hardware does not support it. Collective."""
    products = backend.products(dtype)
    if products != dtype:
        widen_products(dtype)
    fp32_ranks = [str(rank) for rank, used in enumerate(world.all_gather_json(products)) if used != dtype]
    if fp32_ranks:
        say(f"rank {', '.join(fp32_ranks)}: matrix products use fp32, because the CPU has no {dtype} kernels")


def open_device(world: World, job_device: str) -> Backend:
    """Open this rank's device; each rank of a host gets a different GPU. Collective.

    If a test product on a GPU is wrong, the rank uses the CPU instead, or raises UserError if the GPU was requested explicitly.
    ``job_device``: ``[cluster] device``.
    """
    with world.collective_errors("looking for the device"):
        requested_device = device_spec(job_device, os.environ)
        name, devices = visible_devices(requested_device.name)
        refused = BACKENDS[name].unusable()
    devices_by_rank = world.all_gather_json([world.host, name, list(devices.items()), requested_device.gpu])
    places = [
        VisibleDevices(host, backend, tuple((index, identity) for index, identity in devices), gpu)
        for host, backend, devices, gpu in devices_by_rank
    ]
    for host, reasons in dict(world.all_gather_json([world.host, list(refused.values())])).items():
        say(*(f"{host}: {reason}" for reason in reasons))
    index = gpu_of(world.rank, places)
    with world.collective_errors("opening the device"):
        backend = open_backend(requested_device.name, index)
        problem = _wrong_product(world, backend)
        if problem and requested_device.name != "auto":
            raise UserError("device.failed", f'{problem}; set device = "cpu", or "auto" to use the CPU instead')
        backend = open_backend("cpu") if problem else backend
        backend.free_unused()  # an earlier run of this process may have left its stage there
    for problem_text in filter(None, world.all_gather_json(problem)):
        say(f"{problem_text}; the rank computes on the CPU instead")
    return backend


def _wrong_product(world: World, backend: Backend) -> str:
    """Describe how a product on this rank's GPU differs from the CPU's, with a remedy; "" if they agree."""
    result = product_on(backend) if backend.device != HOST else None
    if result is None or not result.problem:
        return ""
    device = f"{backend.name}:{backend.index} of rank {world.rank} on {world.host} ({backend.description()})"
    remedy = SelfTest(backend.name, backend.index, results=(result,)).remedy()
    text = f"the results of {device} differ from the CPU's: {result.check}: {result.problem}. Remedy: {remedy}"
    return f"{text}. All checks: python -m hetero_mpi doctor --selftest"


def default_threads(cores: float) -> int:
    """Return the number of threads for "auto": the (first) value of ``OMP_NUM_THREADS`` if set, else one per full core."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(setting) if setting.isdigit() and int(setting) > 0 else max(1, int(cores))


def check_optimizer(train: TrainTable, backend: Backend, who: str) -> None:
    """Run a step of the job's optimizer on this rank's device. Raises UserError, which names the rank ``who``, if it fails."""
    tensor = Parameter(torch.zeros(64, 64, device=backend.device))
    tensor.grad = torch.ones_like(tensor)
    state_kind = OF_OPTIMIZER[train.optimizer][-1]
    try:
        LibraryOptimizers(train, False, [(tensor, False, state_kind, 1.0)]).step(1.0)
        stepped = bool((tensor < 0).all())
        reason = "its step changed nothing"
    except Exception as error:  # whatever it raises where it has no kernel, or where it is not installed
        stepped, reason = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not stepped:
        library = {EIGHT_BIT: "bitsandbytes>=0.50", "muon": "torch>=2.9"}.get(train.optimizer, "another transformers")
        raise UserError(
            "optimizer.unsupported",
            f'[train] optimizer = "{train.optimizer}" does not work on {who}, {backend.description()} ({reason}); install '
            f'{library} there, exclude that rank, or set optimizer = "adamw"',
        )
