"""The command ``serve``: rank 0 answers HTTP requests, and all ranks with a stage generate text, round by round.

Before each round, rank 0 tells the other ranks which sequences start and end. While there are none, the other ranks sleep and poll
every 50 ms for a message from rank 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hetero_mpi.comm.ranks.mpi_start import all_ranks_succeeded, shrink_to_survivors
from hetero_mpi.comm.ranks.ulfm import RankLost
from hetero_mpi.comm.ranks.world import RELEASE_POLL_S, CollectiveUserError, World
from hetero_mpi.inference.layer_split import set_up, with_writer
from hetero_mpi.inference.writer import Task, TextChanges, Writer
from hetero_mpi.planning.types.plan import RankMemory
from hetero_mpi.rundir.logs import say
from hetero_mpi.serve.api_requests import SamplingDefaults
from hetero_mpi.serve.api_server import ApiServer
from hetero_mpi.serve.scheduler import MEMORY_RESERVE_RATIO, CacheBudget, Scheduler
from hetero_mpi.serve.served_models import ServedModel, served_models
from hetero_mpi.serve.service import Service, context_of, ending_error
from hetero_mpi.serve.web.server import LOCAL, Names, bound_socket
from hetero_mpi.training.setup.setup import look_around
from hetero_mpi.training.signals import StopRequest
from hetero_mpi.util.errors import ExitCode, UserError

TOKEN_VARIABLE = "HETERO_MPI_TOKEN"
_TOKEN_CLIENT = "token"
"""Client name that metrics and logs show for the API key from --token."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STOP_TIMEOUT_S = 1.0
"""Time allowed for notifying clients that the service is ending."""


@dataclass(frozen=True)
class ServeOptions:
    source: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    keys: Path | None = None
    """File with a client name and an API key on each line."""
    adapters: Sequence[str] = ()
    """Additional adapters, each as ``NAME=DIR`` or DIR. The default name is that of the directory."""
    context: int | None = None
    parallel: int = 8
    allow_host: Sequence[str] = ()
    """Additional host names that clients may use for the server."""

    def known_keys(self) -> dict[str, str]:
        """Map each client's name to its API key; empty if access is open to all. Raises UserError for an invalid key."""
        token = (self.token or "").strip() or os.environ.get(TOKEN_VARIABLE, "").strip()
        keys = {_TOKEN_CLIENT: token} if token else {}
        source_by_name = dict.fromkeys(keys, f"--token or {TOKEN_VARIABLE}")
        for number, line in enumerate(_lines(self.keys), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            name, *rest = line.split(maxsplit=1)
            location = f"{self.keys}, line {number}"
            if not _NAME.fullmatch(name) or not rest or name in keys or rest[0].strip() in keys.values():
                raise UserError(
                    "serve.keys",
                    f"{location}: must be a unique name (letters, digits, . _ -) and a unique key, separated by a space",
                )
            keys[name], source_by_name[name] = rest[0].strip(), location
        if self.keys is not None and len(keys) == bool(token):
            raise UserError(
                "serve.keys", f"--keys {self.keys}: no line has a name and a key; omit the option to serve all clients"
            )
        for name, key in keys.items():
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise UserError(
                    "serve.keys",
                    f"{source_by_name[name]}: must be printable ASCII without spaces, as it travels in an HTTP header",
                )
        return keys


def _lines(path: Path | None) -> list[str]:
    try:
        return path.expanduser().read_text(encoding="utf-8").splitlines() if path is not None else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "serve.keys", f"--keys {path} cannot be read: {error}; each line must have a name and a key"
        ) from None


class Client(Protocol):
    """A program on rank 0 that uses the service. When the program ends, the service ends as well."""

    def on_ready(self, server: ApiServer) -> None:
        """Called when the service is ready."""

    def has_ended(self) -> bool:
        """Return whether the program has ended."""

    def close(self) -> None:
        """Called when the service ends."""


def serve(world: World, options: ServeOptions, client: Client | None = None) -> int:
    """Answer requests until a signal arrives or ``client`` (on rank 0) ends; return the exit code. Collective.

    Raises the same UserError on all ranks for an error that the user can fix or a lost rank.
    """
    look_around(world)
    models: list[ServedModel] = []
    keys: dict[str, str] = {}
    bound: socket.socket | None = None
    servers: list[ApiServer] = []
    with StopRequest() as stop, stop.noting(), _stopping_servers(servers):
        with world.on_leader("reading the model's directory"):
            if world.rank == 0:
                keys = check_options(options)
                bound = bound_socket(options.host, options.port)
                models = served_models(options.source, options.adapters)
        setup = set_up(world, models[0].opened if models else None)

        def work(members: World, writer: Writer) -> None:
            members.current_action = "measuring the memory that a sequence needs"
            room = cache_budgets(members, setup.memory, writer)
            writer.settle_width(members, int(members.broadcast_json(options.parallel)))
            members.current_action = "serving"
            if not models or bound is None:
                for _ in writer.written(partial(_follow_round, world, members, stop)):
                    pass
                return
            scheduler = Scheduler(room, options.parallel)
            context = context_of(models[0].opened, options.context, room)
            names = Names.for_address(options.host, options.allow_host)
            service = Service(models, context, scheduler, stop)
            servers.append(ApiServer(bound, keys, service, names, client is not None))
            if client is None:
                _print_address(servers[0], options, writer.batches)
            else:
                client.on_ready(servers[0])
            should_stop = lambda: stop() or (client is not None and client.has_ended())  # noqa: E731
            for results in writer.written(partial(_lead_round, world, members, should_stop, scheduler)):
                scheduler.distribute(results)
            if stop():
                say("Serving ended: stopped by a signal")

        try:
            with contextlib.closing(client) if client is not None else contextlib.nullcontext():
                with_writer(setup, work, stop)
        except RankLost as error:
            lost = ", ".join(f"rank {rank} on {host}" for rank, host in shrink_to_survivors(world).gone)
            problem = CollectiveUserError(
                "serve.rank_lost",
                f"{lost} lost, with its part of the model: restart the service",
                exit_code=ExitCode.FAILED,
            )
            _stop(servers, str(problem))
            all_ranks_succeeded(world, True)  # the launcher ends all ranks with the first exit: notify clients before
            raise problem from error
    return ExitCode.DONE


@contextlib.contextmanager
def _stopping_servers(servers: list[ApiServer]) -> Iterator[None]:
    """Stop the ``servers`` that the block has started when it ends, and send waiting clients the reason."""
    reason = ""
    try:
        yield
    except BaseException as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        _stop(servers, reason)


def _stop(servers: list[ApiServer], reason: str) -> None:
    while servers:
        servers[-1].service.scheduler.close(ending_error(reason))
        servers.pop().stop(_STOP_TIMEOUT_S)


def check_options(options: ServeOptions) -> dict[str, str]:
    """Check the options and return the clients' API keys. Raises UserError naming the invalid option, its value and the rule."""
    keys = options.known_keys()
    if not keys and options.host not in LOCAL:
        raise UserError(
            "serve.open_address",
            f"--host {options.host}: anyone who can reach this address can use the model; set an API key with --keys, --token "
            f"or the environment variable {TOKEN_VARIABLE} (on rank 0), or serve on 127.0.0.1",
        )
    for name, value in (("--context", options.context), ("--parallel", options.parallel)):
        if value is not None and value < 1:
            raise UserError("options.value", f"{name} {value}: must be 1 or more")
    return keys


def _lead_round(
    world: World, members: World, stop: Callable[[], bool], scheduler: Scheduler, idle: bool
) -> TextChanges | None:
    """Choose the changes for the next round and send them to the other ranks with a stage. Rank 0's callback of a Writer."""
    change: TextChanges | None = None
    while not (stop() or world.asked()):
        change = scheduler.next_changes(RELEASE_POLL_S if idle else 0.0)
        if change.begin or not idle:
            break
    else:
        change = None
    message = asdict(change) if change is not None else None
    if idle:
        world.release([rank for rank in members.numbers if rank != 0], None, message)
    else:
        members.broadcast_json(message)
    return change


def _follow_round(world: World, members: World, stop: StopRequest, idle: bool) -> TextChanges | None:
    """Receive the changes for the next round from rank 0. The other ranks' callback of a Writer."""
    message: dict[str, Any] | None
    if idle:
        message = world.sleep_until_released(stop)
    else:
        if stop():
            world.ask()
        message = members.broadcast_json(None)
    if message is None:
        return None
    begin = {int(number): Task.from_dict(task) for number, task in message["begin"].items()}
    return TextChanges(begin, message["end"], message["rest"])


def cache_budgets(members: World, memory: tuple[RankMemory, ...], writer: Writer) -> list[CacheBudget]:
    """Return the KV cache budget of each rank with a stage, from the measured bytes per sequence and per token. Collective."""
    bytes_by_rank = dict(zip(members.numbers, members.all_gather_json(writer.cache_bytes()), strict=True))
    budgets = []
    for rank_memory in memory:
        per_text, per_token = bytes_by_rank[rank_memory.rank]
        free_bytes = int((1 - MEMORY_RESERVE_RATIO) * (rank_memory.usable_bytes - rank_memory.peak_bytes))
        budgets.append(CacheBudget(rank_memory.rank, per_text, per_token, free_bytes))
    return budgets


def _default_sampling(defaults: SamplingDefaults) -> str:
    """Describe the default sampling parameters and where they come from."""
    shown_values = {"temperature": defaults.temperature, **defaults.given}
    values = ", ".join(f"{name} {value:g}" for name, value in shown_values.items())
    source = f"the model's generation_config.json sets {', '.join(defaults.given) or 'none of these'}"
    return f"default sampling: {values} ({source}); temperature 0 is greedy"


def _print_address(server: ApiServer, options: ServeOptions, batches: str) -> None:
    service, context = server.service, server.service.context
    say(
        f"a request may have up to {context.tokens:,} tokens: {context.reason}",
        f"up to {options.parallel} answers are generated concurrently, {batches}",
        _default_sampling(service.model.defaults),
    )
    variable = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE, "").strip() in server.keys.values() else "TOKEN"
    key = f' -H "Authorization: Bearer ${variable}"' if server.keys else ""  # expanded by the shell
    path, body = "/v1/completions", '{"prompt": "Once", "max_tokens": 20}'
    if service.chats:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    say(f"Serving {', '.join(service.models)} on {server.url}/v1; open {server.url} in a browser, or try:")
    say("  " + shlex.join(["curl", server.url + path, "-H", "Content-Type: application/json", "-d", body]) + key)
