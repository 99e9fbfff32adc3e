"""The command line's commands and options; further commands are modules of ``commands.plug_ins``. Each command names its
function, which is not imported here.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_mpi import __version__
from hetero_mpi.util.plug_ins import plug_in, plug_in_names
from hetero_mpi.util.terminal import fold_line

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]

Add = Callable[..., argparse.Action]
"""``add_argument`` of a command's parser."""

PLUG_INS = "hetero_mpi.commands.plug_ins"
HEARTBEAT_TIMEOUT_S = 14.0
"""Silence after which a machine counts as dead. An outage of 12 s is survived, and its end is seen within 1.75 s."""
PROBE_TIMEOUT_S = 10.0
"""Longest wait for hosts to answer before a start."""
MAX_RESTARTS = 10

ORDER_OF_USE = """\
order of use: doctor, init, train --dry-run, train, report, export or serve
examples:
  hetero-mpi init quickstart
  hetero-mpi launch -np 3 -- train jobs/quickstart.toml
options of a command: hetero-mpi COMMAND --help
"""


class _Help(argparse.HelpFormatter):
    """Breaks lines between words only, and gives each command a line."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += 2  # argparse forgets that commands are indented

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fold_line(" ".join(text.split()), width, indent="")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(line for part in text.splitlines() for line in fold_line(part, width, indent, indent))


class _Parser(argparse.ArgumentParser):
    """Names the nearest word for a mistyped command or option. Its sub-commands' parsers are of this class too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "formatter_class": _Help})

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        namespace, rest = super().parse_known_args(*arguments, **named)
        for word in rest:
            if word.startswith("-"):
                self.error(f"unknown option: {word}{_nearest(word.partition('=')[0], self._option_string_actions)}")
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + _nearest(str(value), action.choices or ())) from None


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


class _Key(argparse._AppendAction):
    """An option that is short for a key of the job."""

    def __init__(self, key: str, **named: Any) -> None:
        super().__init__(**{**named, "dest": "overrides", "default": argparse.SUPPRESS})
        self._key = key

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        super().__call__(parser, namespace, f"{self._key}={'true' if value is True else value}", option)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it parses has ``run``, ``MODULE:FUNCTION`` of the package, and the function's arguments."""
    about = "Train language models over whatever mixed machines you have, in one MPI job."
    top = _Parser(prog="hetero-mpi", description=about, epilog=ORDER_OF_USE)
    top.add_argument("--version", action="version", version=f"hetero_mpi {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    text = "copy a job and its data to start from; without a name: what there is"
    add = _command(commands, "init", "interop.init:init", text).add_argument
    add("name", nargs="?", metavar="NAME", help="of a job that comes with the program, such as quickstart")
    where = "the job goes into DIR/jobs (default: here)"
    add("directory", nargs="?", type=Path, default=Path(), metavar="DIR", help=where)
    tools = "a job made of this file of axolotl, LLaMA-Factory or TRL (docs/coming-from.md): init --from FILE [DIR or JOB.toml]"
    add("--from", dest="source", type=Path, metavar="FILE", help=tools)
    add("--gpus", type=int, metavar="N", help="with --from: how many the other tool ran on, for the size of the batch")

    _add_train(commands)
    _add_generate(commands)
    _add_serve(commands)
    _add_evaluate(commands)
    text = "start ranks with the launcher of the loaded MPI library"
    add_launch_options(_command(commands, "launch", "cli:launch", text))
    _add_doctor(commands)
    _add_mesh(commands)
    _add_offline_commands(commands)
    _add_looking_back(commands)

    text = "make a Hugging Face or PEFT directory of a run or checkpoint"
    add = _command(commands, "export", "cli:export", text).add_argument
    add("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory or checkpoint file")
    add("target", type=Path, metavar="OUT", help="directory to write")
    add("--merge", action="store_true", help="add the adapter to its base weights: a whole model")
    add("--best", action="store_true", help="of a run, the checkpoint with the lowest held-out loss, not the newest")
    types, gguf = (
        ("auto", "f32", "f16", "bf16", "q8_0"),
        "write a Modelfile for Ollama, too, and by llama.cpp's converter a GGUF file",
    )
    add("--gguf", nargs="?", const="auto", choices=types, help=gguf)
    add("--push", metavar="ORG/NAME", help="upload OUT to the Hugging Face hub, too, as a private model")

    for name in plug_in_names(PLUG_INS):
        module = plug_in(PLUG_INS, name)
        module.add_options(_command(commands, name, f"commands.plug_ins.{name}:run", module.ABOUT).add_argument)

    text = "print a job file that documents every key; or the pages of reference"
    form = _command(commands, "reference", "commands.reference_pages:reference", text).add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the same as Markdown, which is docs/job.md")
    form.add_argument("--commands", action="store_true", help="all commands and options as Markdown: docs/commands.md")

    text = "print what makes a shell complete words; docs/installing.md says where it belongs"
    add = _command(commands, "completion", "commands.reference_pages:completion", text).add_argument
    add("shell", choices=("bash", "zsh", "fish"))
    return top


def _command(commands: Commands, name: str, run: str, text: str) -> argparse.ArgumentParser:
    """Declare a command, which ``run`` runs; returns its parser. ``text``: its line among all commands, and more behind a ``;``."""
    command = commands.add_parser(name, help=text.partition(";")[0], description=text)
    command.set_defaults(run=run)
    return command


def _add_set(add: Add) -> None:
    text = "override a key of the job; may be repeated"
    add("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE", help=text)


def _add_schedule(add: Add) -> None:
    from hetero_mpi.planning.orders import SCHEDULES

    text = f"instead of [plan] schedule: {', '.join(SCHEDULES)}"
    add("--schedule", action=_Key, key="plan.schedule", choices=list(SCHEDULES), metavar="NAME", help=text)


def _add_train(commands: Commands) -> None:
    text = "train a model; mpirun -np 3 python -m hetero_mpi train job.toml"
    add = _command(commands, "train", "cli:train", text).add_argument
    add("job", type=Path, metavar="JOB", help="job file (TOML); jobs/reference.toml documents every key")
    _add_set(add)
    add("--run-dir", metavar="DIR", help="run directory, instead of [output] run_dir")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="latest|any|PATH",
        help="continue from a checkpoint; any: from the beginning where there is none",
    )
    plan = "use this plan (edited by hand, say), or that of a run, instead of planning"
    add("--plan", type=Path, metavar="FILE|RUN", help=plan)
    profile = "use this profile, that of a run, or the shipped one so called; do not measure"
    add("--profile", type=Path, metavar="FILE|NAME|RUN", help=profile)
    add("--reprofile", action="store_true", help="measure anew, whatever was measured before")
    add("--dry-run", action="store_true", help="validate, profile, plan and predict, then stop")
    add("--verbose", action="store_true", help="show the whole profile and plan, with the reasons")
    page = "serve a page on rank 0's machine that shows the run (behind the job file; default: port 8642)"
    add("--watch", action=_Key, key="report.watch", nargs="?", const=True, type=int, metavar="PORT", help=page)
    _add_schedule(add)


def _add_generate(commands: Commands) -> None:
    text = "continue a prompt; under mpirun the model is split over the ranks"
    add = _command(commands, "generate", "cli:generate", text).add_argument
    _add_source(add)
    add("--prompt", required=True, metavar="TEXT")
    most = "at most so many (by default 128, or what the model's positions allow)"
    add("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token")
    fewest = "draw from the fewest tokens that together have probability P"
    add("--top-p", type=float, default=1.0, metavar="P", help=fewest)
    add("--seed", type=int, default=0, metavar="N", help="seed of the draws (default 0)")
    add("--raw", action="store_true", help="continue the prompt as it is, without a chat template")


def _add_source(add: Add) -> None:
    source = "run directory, Hugging Face model directory or PEFT adapter directory"
    add("source", type=Path, metavar="RUN_OR_DIR", help=source)


def _add_serve(commands: Commands) -> None:
    text = "answer over HTTP as OpenAI's API does; under mpirun the model is split over the ranks"
    add = _command(commands, "serve", "cli:serve", text).add_argument
    _add_source(add)
    add("--port", type=int, default=8000, metavar="N", help="(default %(default)s; 0: any free one)")
    token = "clients must show it; needed for other addresses than this machine's own (or HETERO_MPI_TOKEN)"
    _add_listening(add, "of rank 0 to listen on (default %(default)s)", token)
    add("--keys", type=Path, metavar="FILE", help="a name and a key in each line: of clients that may ask, too")
    beside = "an adapter of the same base, which answers to requests for the model NAME; may be repeated"
    add("--adapter", dest="adapters", action="append", default=[], metavar="NAME=RUN_OR_DIR", help=beside)
    most = "tokens of a request with its answer (default: what the model's positions and the memory allow)"
    add("--context", type=int, metavar="N", help=most)
    side = "so many answers are written side by side at most (default %(default)s)"
    add("--parallel", type=int, default=8, metavar="N", help=side)


def _add_evaluate(commands: Commands) -> None:
    text = "tell how good a finished model is; on data, or in tasks of lm-evaluation-harness"
    add = _command(commands, "evaluate", "cli:evaluate", text).add_argument
    _add_source(add)
    data = "files to evaluate on, as the job's evaluation data are; may be repeated (default: what the run held out)"
    add("--data", action="append", default=[], metavar="NAME=FILES", help=data)
    add(
        "--tasks",
        metavar="A,B",
        help="tasks of lm-evaluation-harness (pip install 'lm-eval[api]'), which asks these ranks",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help="at most so many sequences of a set (default 1000), or examples of a task",
    )
    add("-o", "--output", type=Path, metavar="DIR", help="directory for the results (default: that of the run)")
    side = "so many texts pass side by side at most (default %(default)s)"
    add("--parallel", type=int, default=8, metavar="N", help=side)
    further = 'further options for lm-evaluation-harness, e.g. --lm-eval-args="--num_fewshot 5"'
    add("--lm-eval-args", default="", metavar="TEXT", help=further)


def _add_listening(add: Add, address: str, token: str) -> None:
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=address)
    add("--token", metavar="TEXT", help=token)
    other = "a name under which it may be asked beside this machine's own, as behind a proxy; may be repeated"
    add("--allow-host", action="append", default=[], metavar="NAME", help=other)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``launch``. Every rank parses them too, so nothing of the launcher is imported here."""
    add = parser.add_argument
    add("-np", "-n", dest="ranks", type=int, metavar="N", help="ranks (--hosts: all slots; SLURM: all tasks)")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hostfile", metavar="FILE", help="machines, one per line: `name slots=2` or `name:2`")
    unlike = "unlike machines (TOML): each with its own Python, device, directory"
    hosts.add_argument("--hosts", metavar="FILE", help=unlike)
    add("--print", dest="print_only", action="store_true", help="print the command line, run nothing")
    add("--verbose", action="store_true", help="show the command line, and the reasons for its options")
    further = 'further options for the launcher, e.g. --mpirun-args="--tag-output"'
    add("--mpirun-args", default="", metavar="TEXT", help=further)
    python = (
        "in a heterogeneous SLURM job: the Python of its first, second, ... component; may be repeated (docs/slurm.md)"
    )
    add("--slurm-python", action="append", default=[], metavar="PYTHON", help=python)
    recover = "when a rank dies, the others go on in the same processes (Open MPI 5; docs/recovery.md)"
    add("--recover", action="store_true", help=recover)
    _add_elastic(parser)
    add("program", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run, e.g. `-- train job.toml`")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("surviving lost machines (docs/recovery.md)")
    stay = "stay beside the job: when a machine or a rank dies, start again on the machines that are left"
    group.add_argument("--elastic", action="store_true", help=stay)
    for field, option, default, metavar, text in (
        ("max_restarts", "--max-restarts", MAX_RESTARTS, "N", "start again so often"),
        ("min_ranks", "--min-ranks", 1, "N", "do not go on with fewer ranks"),
        ("heartbeat_timeout_s", "--heartbeat-timeout", HEARTBEAT_TIMEOUT_S, "SECONDS", "silence of a lost machine"),
        ("probe_timeout_s", "--probe-timeout", PROBE_TIMEOUT_S, "SECONDS", "longest wait for machines before a start"),
    ):
        help_text = f"{text} (default %(default)g)"
        group.add_argument(option, dest=field, type=type(default), default=default, metavar=metavar, help=help_text)


def _add_doctor(commands: Commands) -> None:
    text = "tell what is not in place for a run; exit code 0: nothing, 1: a run would, or may, fail"
    doctor = _command(commands, "doctor", "cli:doctor", text)
    files = doctor.add_mutually_exclusive_group()
    files.add_argument("--hostfile", metavar="FILE", help="look at these hosts too, as for launch")
    files.add_argument("--hosts", metavar="FILE", help="look at the entries of this hosts.toml, as for launch")
    add = doctor.add_argument
    add("--json", action="store_true", help="print one JSON object")
    test = "let every GPU (or the CPU) compute and copy, and compare with the CPU"
    add("--selftest", dest="self_test", action="store_true", help=test)
    add("--run-dir", default="runs", metavar="DIR", help="where runs will go (default %(default)s)")
    add("--mpirun-args", default="", metavar="TEXT", help="as for launch: may name a launch agent")


def _add_mesh(commands: Commands) -> None:
    mesh = commands.add_parser("mesh", help="private links between hosts, by WireGuard (docs/wireguard.md)")
    actions = mesh.add_subparsers(title="actions", required=True, metavar="ACTION")
    text = "write keys and WireGuard configurations for the machines of a hosts.toml"
    add = _command(actions, "init", "launch.hosts.mesh:init", text).add_argument
    add("path", type=Path, metavar="HOSTS", help="hosts.toml with the addresses outside of the mesh")
    where = "where to (default %(default)s)"
    add("-o", "--output", dest="directory", type=Path, default=Path("mesh"), metavar="DIR", help=where)
    text = "under a launcher: do MPI's messages go through the mesh? Exit code 1: no"
    add = _command(actions, "verify", "cli:mesh_verify", text).add_argument
    add("hosts", type=Path, metavar="HOSTS", help="the hosts.toml that `mesh init` wrote")


def _add_offline_commands(commands: Commands) -> None:
    """``profile`` and what can be asked of its file without the cluster: ``inspect``, ``plan``, ``simulate``."""
    text = "measure these ranks and their links; mpirun -np 3 ... profile job.toml"
    add = _command(commands, "profile", "cli:profile", text).add_argument
    add("job", type=Path, metavar="JOB", help="job file (TOML)")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="profile to write (TOML)")
    add("--reprofile", action="store_true", help="measure anew, whatever was measured before")
    _add_set(add)

    add = _command(
        commands, "inspect", "commands.plan_commands:inspect", "show a profile, a plan or a checkpoint"
    ).add_argument
    file = "what it is, is seen by its content; a shipped profile's name; or a run: all three"
    add("file", type=Path, metavar="FILE|NAME|RUN", help=file)
    add("-o", "--output", type=Path, metavar="PNG", help="a profile's picture (default: beside it)")
    add("--all", dest="every", action="store_true", help="a row for each of many ranks, hosts and links")

    add = _command(
        commands, "plan", "commands.plan_commands:plan", "plan a job for the cluster of a profile; needs no cluster"
    ).add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="write the plan, to be edited and given to train")
    add("--explain", action="store_true", help="also answer what-if questions, by planning again")
    add("--json", dest="as_json", action="store_true", help="print one JSON object instead of tables")
    _add_question(add)

    text = "predict a step: timeline, trace, why ranks wait; needs no cluster"
    add = _command(commands, "simulate", "commands.plan_commands:simulation", text).add_argument
    where = "where pictures and trace go (default: RUN_DIR/simulation)"
    add("-o", "--output", type=Path, metavar="DIR", help=where)
    add("--shared-nic", action="store_true", help="as if all messages of a host passed through one NIC")
    _add_question(add)


def _add_question(add: Add) -> None:
    """Options of ``plan`` and ``simulate``: the job, the cluster, and how it is to be planned."""
    add("job", type=Path, nargs="?", metavar="JOB", help="job file (TOML); left out: the profile's own model")
    profile = "of the cluster, and the model: a file, a run, or the name of a shipped one"
    add("--profile", type=Path, required=True, metavar="FILE|NAME|RUN", help=profile)
    plan = "this plan, or that of a run, instead of the planner's"
    add("--plan", dest="given", type=Path, metavar="FILE|RUN", help=plan)
    _add_schedule(add)
    _add_set(add)


def _add_looking_back(commands: Commands) -> None:
    """``report``, ``compare`` and ``baseline``: what a run was like, and what it was good for."""
    text = "write a run's report: one HTML file; train does so at its end"
    add = _command(commands, "report", "commands.run_commands:report", text).add_argument
    add("run_dir", type=Path, metavar="RUN", help="run directory")
    add("-o", "--output", type=Path, metavar="FILE", help="(default: RUN/report.html)")
    share = "for others: without names of hosts and users, without absolute paths (RUN/report-shared.html)"
    add("--share", action="store_true", help=share)

    text = "show a run in a browser while it goes on, or when it is over"
    add = _command(commands, "watch", "serve.live_page:watch", text).add_argument
    add("run_dir", type=Path, metavar="RUN", help="run directory")
    add("--port", type=int, metavar="N", help="(default 8642, or where that is taken any; 0: any)")
    _add_listening(
        add, "to listen on (default %(default)s)", "(default: a random one, which is in the printed address)"
    )

    text = "show runs side by side; jobs, plans, speed, loss after equally many tokens"
    add = _command(commands, "compare", "commands.run_commands:compare", text).add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run directories")

    text = "tell whether adding the other devices was worth it; the best one alone, same tokens"
    add = _command(commands, "baseline", "commands.run_commands:baseline", text).add_argument
    job = "job file (TOML); left out: the run's, or the profile's own model"
    add("job", type=Path, nargs="?", metavar="JOB", help=job)
    profile = "a profile, or a run, whose measured times count"
    add("--profile", type=Path, required=True, metavar="FILE|NAME|RUN", help=profile)
    _add_set(add)
