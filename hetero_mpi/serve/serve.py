"""The command ``serve``: rank 0 answers HTTP, all ranks with a stage write the texts, round by round.

Rank 0 tells the others before each round which texts begin and which end. While there is none they sleep, and look for a word
from rank 0 twenty times a second.
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
from hetero_mpi.serve.scheduler import KEPT_FREE, CacheRoom, Scheduler
from hetero_mpi.serve.served_models import ServedModel, served_models
from hetero_mpi.serve.service import Service, context_of, ending_error
from hetero_mpi.serve.web.server import LOCAL, Names, bound_socket
from hetero_mpi.training.setup.setup import look_around
from hetero_mpi.training.signals import StopRequest
from hetero_mpi.util.errors import ExitCode, UserError

TOKEN_VARIABLE = "HETERO_MPI_TOKEN"
_OF_TOKEN = "token"
"""The name of that client in numbers and lines."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LAST_WORDS_S = 1.0
"""Time for telling clients that the service ends."""


@dataclass(frozen=True)
class ServeOptions:
    """The command line of ``serve``."""

    source: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    keys: Path | None = None
    """A file with a name and a key in each line."""
    adapters: Sequence[str] = ()
    """``NAME=DIR``, or a directory whose name it bears: adapters beside what is served."""
    context: int | None = None
    parallel: int = 8
    allow_host: Sequence[str] = ()
    """Names under which the server may be asked, beside its own."""

    def known_token(self) -> str | None:
        """The key that clients must show; from the environment where the command line names none."""
        return (self.token or "").strip() or os.environ.get(TOKEN_VARIABLE, "").strip() or None

    def known_keys(self) -> dict[str, str]:
        """Name -> key of every client; none: anybody may ask. Raises UserError: a key cannot be one."""
        token = self.known_token()
        keys = {} if token is None else {_OF_TOKEN: token}
        where = dict.fromkeys(keys, f"--token or {TOKEN_VARIABLE}")
        for number, line in enumerate(_lines(self.keys), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            name, *rest = line.split(maxsplit=1)
            place = f"{self.keys}, line {number}"
            if not _NAME.fullmatch(name) or not rest or name in keys or rest[0].strip() in keys.values():
                raise UserError(
                    "serve.keys",
                    f"{place}: must be a name (letters, digits, . _ -) and a key, both of no other line, with a space between",
                )
            keys[name], where[name] = rest[0].strip(), place
        if self.keys is not None and len(keys) == (token is not None):
            raise UserError(
                "serve.keys", f"--keys {self.keys}: has no name and key in any line; leave it out, and anybody may ask"
            )
        for name, key in keys.items():
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise UserError(
                    "serve.keys",
                    f"{where[name]}: must be printable ASCII without spaces, as it travels in an HTTP header",
                )
        return keys


def _lines(path: Path | None) -> list[str]:
    try:
        return path.expanduser().read_text(encoding="utf-8").splitlines() if path is not None else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "serve.keys", f"--keys {path} cannot be read: {error}; it has a name and a key in each line"
        ) from None


class Client(Protocol):
    """A program that asks the service, which ends with it."""

    def begin(self, server: ApiServer) -> None:
        """The service can be asked."""

    def ended(self) -> bool:
        """Has it ended by itself?"""

    def close(self) -> None:
        """The service ends."""


def serve(world: World, options: ServeOptions, client: Client | None = None) -> int:
    """Answer requests until a signal asks for the end, or a ``client`` (on rank 0) has ended. Collective; returns the exit code.
    Raises UserError: an error the user can correct, or a rank has died; the same on all ranks.
    """
    look_around(world)
    models: list[ServedModel] = []
    keys: dict[str, str] = {}
    bound: socket.socket | None = None
    servers: list[ApiServer] = []
    with StopRequest() as stop, stop.noting(), _telling_clients(servers):
        with world.on_leader("reading the model's directory"):
            if world.rank == 0:
                keys = check_options(options)
                bound = bound_socket(options.host, options.port)
                models = served_models(options.source, options.adapters)
        setup = set_up(world, models[0].opened if models else None)

        def work(members: World, writer: Writer) -> None:
            members.current_action = "measuring the memory of a text"
            room = cache_room(members, setup.memory, writer)
            members.current_action = "serving"
            if not models or bound is None:
                for _ in writer.written(partial(_follows, world, members, stop)):
                    pass
                return
            scheduler = Scheduler(room, options.parallel)
            context = context_of(models[0].opened, options.context, room)
            names = Names.of(options.host, options.allow_host)
            service = Service(models, context, scheduler, stop)
            servers.append(ApiServer(bound, keys, service, names, client is not None))
            if client is None:
                _say_address(servers[0], options)
            else:
                client.begin(servers[0])
            ended = lambda: stop() or (client is not None and client.ended())  # noqa: E731
            for found in writer.written(partial(_leads, world, members, ended, scheduler)):
                scheduler.hand_out(found)
            if stop():
                say("Serving ends: a signal asked for it")

        try:
            with contextlib.closing(client) if client is not None else contextlib.nullcontext():
                with_writer(setup, work, stop)
        except RankLost as error:
            gone = ", ".join(f"rank {rank} on {host}" for rank, host in shrink_to_survivors(world).gone)
            problem = CollectiveUserError(
                "serve.rank_lost",
                f"{gone} died, and with it a part of the model: start again",
                exit_code=ExitCode.FAILED,
            )
            _stop(servers, str(problem))
            all_ranks_succeeded(
                world, True
            )  # the launcher ends all ranks when the first one leaves: not before clients are told
            raise problem from error
    return ExitCode.DONE


@contextlib.contextmanager
def _telling_clients(servers: list[ApiServer]) -> Iterator[None]:
    """A block at whose end the servers that it has begun stop; clients that still wait are told why."""
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
        servers.pop().stop(_LAST_WORDS_S)


def check_options(options: ServeOptions) -> dict[str, str]:
    """Refuse what cannot be served; returns the clients' keys. Raises UserError: names the option, its value and the rule."""
    keys = options.known_keys()
    if not keys and options.host not in LOCAL:
        raise UserError(
            "serve.open_address",
            f"--host {options.host}: whoever can reach this address could use the model; name a secret that clients must show, by "
            f"--keys, --token or the environment variable {TOKEN_VARIABLE} (on rank 0), or serve on 127.0.0.1",
        )
    for name, value in (("--context", options.context), ("--parallel", options.parallel)):
        if value is not None and value < 1:
            raise UserError("options.value", f"{name} {value}: must be 1 or more")
    return keys


def _leads(
    world: World, members: World, stop: Callable[[], bool], scheduler: Scheduler, idle: bool
) -> TextChanges | None:
    """Rank 0's changes before a round, told to the other ranks with a stage: what ``Writer.written`` takes."""
    change: TextChanges | None = None
    while not (stop() or world.asked()):
        change = scheduler.next_changes(RELEASE_POLL_S if idle else 0.0)
        if change.begin or not idle:
            break
    else:
        change = None
    word = asdict(change) if change is not None else None
    if idle:
        world.release([rank for rank in members.numbers if rank != 0], None, word)
    else:
        members.broadcast_json(word)
    return change


def _follows(world: World, members: World, stop: StopRequest, idle: bool) -> TextChanges | None:
    """The same changes on another rank: what ``Writer.written`` takes."""
    word: dict[str, Any] | None
    if idle:
        word = world.sleep_until_released(stop)
    else:
        if stop():
            world.ask()
        word = members.broadcast_json(None)
    if word is None:
        return None
    begin = {int(number): Task.from_dict(task) for number, task in word["begin"].items()}
    return TextChanges(begin, word["end"], word["rest"])


def cache_room(members: World, memory: tuple[RankMemory, ...], writer: Writer) -> list[CacheRoom]:
    """The memory that texts need and may take on each rank with a stage, in a text's measured bytes. Collective."""
    needs = dict(zip(members.numbers, members.all_gather_json(writer.cache_bytes()), strict=True))
    room = []
    for one in memory:
        per_text, per_token = needs[one.rank]
        free = int((1 - KEPT_FREE) * (one.usable_bytes - one.peak_bytes))
        room.append(CacheRoom(one.rank, per_text, per_token, free))
    return room


def _default_sampling(defaults: SamplingDefaults) -> str:
    """How an answer is chosen where the request does not say it, in words."""
    given = {"temperature": defaults.temperature, **defaults.given}
    values = ", ".join(f"{name} {value:g}" for name, value in given.items())
    source = (
        f"the model's generation_config.json sets {', '.join(defaults.given)}"
        if defaults.given
        else "the model's generation_config.json sets none of this"
    )
    return f"a request that does not say otherwise is answered at {values} ({source}); temperature 0 is greedy"


def _say_address(server: ApiServer, options: ServeOptions) -> None:
    service, context = server.service, server.service.context
    say(
        f"a request may have {context.tokens:,} tokens: {context.reason}",
        f"{options.parallel} are written side by side",
        _default_sampling(service.model.defaults),
    )
    variable = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE, "").strip() in server.keys.values() else "TOKEN"
    key = f' -H "Authorization: Bearer ${variable}"' if server.keys else ""  # the shell puts the value in
    path, body = "/v1/completions", '{"prompt": "Once", "max_tokens": 20}'
    if service.chats:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    say(f"Serving {', '.join(service.models)} on {server.url}/v1; open {server.url} in a browser, or try:")
    say("  " + shlex.join(["curl", server.url + path, "-H", "Content-Type: application/json", "-d", body]) + key)
