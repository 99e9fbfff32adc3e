"""The command-line parser. It names each command's function without importing it; ``commands.plug_ins`` adds commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_mpi import __version__
from hetero_mpi.commands.parsing import Key, Parser
from hetero_mpi.util.plug_ins import plug_in, plug_in_names

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

Add = Callable[..., argparse.Action]
"""The method ``add_argument`` of a command's parser."""

PLUG_INS = "hetero_mpi.commands.plug_ins"
HEARTBEAT_TIMEOUT_S = 14.0
"""Silence after which a machine is considered lost. Outages of up to 12 s are tolerated, and their end is seen within 1.75 s."""
PROBE_TIMEOUT_S = 10.0
"""Maximum time to wait for hosts to answer before a start."""
MAX_RESTARTS = 10

ORDER_OF_USE = """\
order of use: doctor, init, train --dry-run, train, report, export or serve
examples:
  hetero-mpi init quickstart
  hetero-mpi launch -np 3 -- train jobs/quickstart.toml
options of a command: hetero-mpi COMMAND --help
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser. The namespace that it returns has ``run`` (``MODULE:FUNCTION``) and the arguments of that function."""
    description = "Train and fine-tune language models on mixed GPUs, CPUs and machines in one MPI job."
    root = Parser(prog="hetero-mpi", description=description, epilog=ORDER_OF_USE)
    root.add_argument("--version", action="version", version=f"hetero_mpi {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")

    text = "copy an example job and its data; without a name, list the examples"
    add = _command(commands, "init", "interop.init:init", text).add_argument
    add("name", nargs="?", metavar="NAME", help="name of an example job, such as quickstart")
    where = "write the job to DIR/jobs (default: the working directory)"
    add("directory", nargs="?", type=Path, default=Path(), metavar="DIR", help=where)
    tools = "convert an axolotl, LLaMA-Factory or TRL config (docs/coming-from.md): init --from FILE [DIR or JOB.toml]"
    add("--from", dest="source", type=Path, metavar="FILE", help=tools)
    add("--gpus", type=int, metavar="N", help="with --from: GPUs used with the other tool (sets the batch)")

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

    text = "export a run or checkpoint as a Hugging Face or PEFT directory"
    add = _command(commands, "export", "cli:export", text).add_argument
    add("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory or checkpoint file")
    add("target", type=Path, metavar="OUT", help="directory to write")
    add("--merge", action="store_true", help="merge the adapter into its base weights")
    add("--best", action="store_true", help="export the run's checkpoint with the lowest evaluation loss")
    types = "auto f32 f16 bf16 q8_0 q2_k q3_k_s q3_k_m q3_k_l q4_0 q4_1 q4_k_s q4_k_m q5_0 q5_1 q5_k_s q5_k_m q6_k iq4_nl iq4_xs"
    gguf = "also write a Modelfile for Ollama and, with llama.cpp's converter and llama-quantize, a GGUF file of TYPE: "
    gguf += types.replace(" ", ", ")
    add("--gguf", nargs="?", const="auto", type=_gguf_type, choices=types.split(), metavar="TYPE", help=gguf)
    add("--push", metavar="ORG/NAME", help="also upload OUT to the Hugging Face Hub as a private model")

    for name in plug_in_names(PLUG_INS):
        module = plug_in(PLUG_INS, name)
        module.add_options(_command(commands, name, f"commands.plug_ins.{name}:run", module.ABOUT).add_argument)

    text = "print a job file that documents every key; or the reference pages"
    form = _command(commands, "reference", "commands.reference_pages:reference", text).add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="all keys of job files as Markdown (docs/job.md)")
    form.add_argument("--commands", action="store_true", help="all commands and options as Markdown (docs/commands.md)")

    text = "print a shell completion script; docs/installing.md shows how to install it"
    add = _command(commands, "completion", "commands.reference_pages:completion", text).add_argument
    add("shell", choices=("bash", "zsh", "fish"))
    return root


def _command(commands: Commands, name: str, run: str, text: str) -> argparse.ArgumentParser:
    """Declare a command that calls ``run``, and return its parser. ``text`` is a summary, with any details after a ``;``."""
    command = commands.add_parser(name, help=text.partition(";")[0], description=text)
    command.set_defaults(run=run)
    return command


def _gguf_type(text: str) -> str:
    """Accept the spellings of a dtype that people know from other places, such as ``bfloat16`` and ``fp16``."""
    return text.lower().replace("float", "f").replace("fp", "f").removeprefix("torch.").replace("half", "f16")


def _port(text: str) -> int:
    """Parse the port of ``--watch``, which takes the word after it, such as the job."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: write --watch after the job, as in `train JOB --watch`")


def _add_set(add: Add) -> None:
    text = "override a key of the job; may be repeated"
    add("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE", help=text)


def _add_schedule(add: Add) -> None:
    from hetero_mpi.planning.orders import SCHEDULES

    text = f"pipeline schedule: {', '.join(SCHEDULES)}"
    add("--schedule", action=Key, key="plan.schedule", choices=list(SCHEDULES), metavar="NAME", help=text)


def _add_train(commands: Commands) -> None:
    text = "train a model; on three ranks: launch -np 3 -- train job.toml"
    add = _command(commands, "train", "cli:train", text).add_argument
    add("job", type=Path, metavar="JOB", help="job file (TOML); jobs/reference.toml documents every key")
    _add_set(add)
    add("--run-dir", metavar="DIR", help="run directory, instead of [output] run_dir")
    resume = "resume from a checkpoint; any: start from the beginning if there is none"
    add("--resume", nargs="?", const="latest", metavar="latest|any|PATH", help=resume)
    plan = "plan file, or run whose plan to use, instead of planning"
    add("--plan", type=Path, metavar="FILE|RUN", help=plan)
    profile = "profile file, shipped profile, or run whose profile to use, instead of measuring"
    add("--profile", type=Path, metavar="FILE|NAME|RUN", help=profile)
    add("--reprofile", action="store_true", help="ignore earlier measurements")
    add("--dry-run", action="store_true", help="validate, profile, plan and predict, then stop")
    add("--verbose", action="store_true", help="show the full profile and plan, with reasons")
    page = "serve a live page of the run on rank 0's machine (put after JOB; default port: 8642)"
    add("--watch", action=Key, key="report.watch", nargs="?", const=True, type=_port, metavar="PORT", help=page)
    _add_schedule(add)


def _add_generate(commands: Commands) -> None:
    text = "generate text from a prompt; under mpirun the model is split over the ranks"
    add = _command(commands, "generate", "cli:generate", text).add_argument
    _add_source(add)
    add("--prompt", required=True, metavar="TEXT")
    most = "maximum number of new tokens (default: 128, or the model's context length)"
    add("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy decoding")
    fewest = "nucleus sampling: sample from the fewest tokens whose probabilities sum to at least P"
    add("--top-p", type=float, default=1.0, metavar="P", help=fewest)
    add("--seed", type=int, default=0, metavar="N", help="random seed for sampling (default 0)")
    add("--raw", action="store_true", help="do not apply the chat template to the prompt")


def _add_source(add: Add) -> None:
    source = "run directory, Hugging Face model directory or PEFT adapter directory"
    add("source", type=Path, metavar="RUN_OR_DIR", help=source)


def _add_serve(commands: Commands) -> None:
    text = "serve a model over an OpenAI-compatible API; under mpirun the model is split over the ranks"
    add = _command(commands, "serve", "cli:serve", text).add_argument
    _add_source(add)
    add("--port", type=int, default=8000, metavar="N", help="port of rank 0 (default %(default)s; 0: any free port)")
    token = "API key of clients; required unless the address is local (or set HETERO_MPI_TOKEN)"
    _add_listening(add, "address of rank 0 to listen on (default %(default)s)", token)
    add("--keys", type=Path, metavar="FILE", help="file with additional API keys: a client name and a key per line")
    adapter = "also serve an adapter of the same base model as the model NAME; may be repeated"
    add("--adapter", dest="adapters", action="append", default=[], metavar="NAME=RUN_OR_DIR", help=adapter)
    context = "maximum tokens in a request and its answer (default: the model's context length if memory allows)"
    add("--context", type=int, metavar="N", help=context)
    parallel = "maximum number of concurrent requests (default %(default)s)"
    add("--parallel", type=int, default=8, metavar="N", help=parallel)


def _add_evaluate(commands: Commands) -> None:
    text = "evaluate a trained model; on data, or on tasks of lm-evaluation-harness"
    add = _command(commands, "evaluate", "cli:evaluate", text).add_argument
    _add_source(add)
    data = "evaluation files, in the format of the job's data; may be repeated (default: the run's evaluation set)"
    add("--data", action="append", default=[], metavar="NAME=FILES", help=data)
    add("--tasks", metavar="A,B", help="tasks of lm-evaluation-harness (pip install 'lm-eval[api]')")
    limit = "maximum number of sequences per set (default 1000), or of examples per task"
    add("--limit", type=int, metavar="N", help=limit)
    add("-o", "--output", type=Path, metavar="DIR", help="directory for the results (default: the run directory)")
    parallel = "maximum number of sequences evaluated concurrently (default %(default)s)"
    add("--parallel", type=int, default=8, metavar="N", help=parallel)
    harness_options = 'additional options for lm-evaluation-harness, e.g. --lm-eval-args="--num_fewshot 5"'
    add("--lm-eval-args", default="", metavar="TEXT", help=harness_options)


def _add_listening(add: Add, address: str, token: str) -> None:
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=address)
    add("--token", metavar="TEXT", help=token)
    allowed = "also accept requests for this host name, for example behind a proxy; may be repeated"
    add("--allow-host", action="append", default=[], metavar="NAME", help=allowed)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``launch``. Every rank parses them too, so this function does not import the launcher."""
    add = parser.add_argument
    add("-np", "-n", dest="ranks", type=int, metavar="N", help="number of ranks (--hosts: all slots; SLURM: all tasks)")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hostfile", metavar="FILE", help="machines, one per line: `name slots=2` or `name:2`")
    hosts_toml = "hosts file (TOML) for mixed machines, each with its own Python, device and directory"
    hosts.add_argument("--hosts", metavar="FILE", help=hosts_toml)
    add("--print", dest="print_only", action="store_true", help="print the command line without running it")
    add("--verbose", action="store_true", help="show the command line, and the reasons for its options")
    mpirun_options = 'additional options for the launcher, e.g. --mpirun-args="--tag-output"'
    add("--mpirun-args", default="", metavar="TEXT", help=mpirun_options)
    python = "heterogeneous SLURM job: Python of its first, second, ... component; may be repeated (docs/slurm.md)"
    add("--slurm-python", action="append", default=[], metavar="PYTHON", help=python)
    recover = "after losing a rank, continue with the others in the same processes (Open MPI 5; docs/recovery.md)"
    add("--recover", action="store_true", help=recover)
    add("program", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command to run, e.g. `-- train job.toml`")
    group = parser.add_argument_group("recovery from lost machines (docs/recovery.md)")
    elastic = "elastic restart: after losing a machine or a rank, restart on the remaining machines"
    group.add_argument("--elastic", action="store_true", help=elastic)
    heartbeat = "silence after which a machine counts as lost"
    for field, option, default, metavar, text in (
        ("max_restarts", "--max-restarts", MAX_RESTARTS, "N", "maximum number of restarts"),
        ("min_ranks", "--min-ranks", 1, "N", "minimum number of ranks for a restart"),
        ("heartbeat_timeout_s", "--heartbeat-timeout", HEARTBEAT_TIMEOUT_S, "SECONDS", heartbeat),
        ("probe_timeout_s", "--probe-timeout", PROBE_TIMEOUT_S, "SECONDS", "longest wait for machines before a start"),
    ):
        help_text = f"{text} (default %(default)g)"
        group.add_argument(option, dest=field, type=type(default), default=default, metavar=metavar, help=help_text)


def _add_doctor(commands: Commands) -> None:
    text = "check that everything is ready for a run; exit code 0: no problems, 1: a run would or might fail"
    doctor = _command(commands, "doctor", "cli:doctor", text)
    files = doctor.add_mutually_exclusive_group()
    files.add_argument("--hostfile", metavar="FILE", help="also check these hosts, as for launch")
    files.add_argument("--hosts", metavar="FILE", help="check the machines of this hosts.toml, as for launch")
    add = doctor.add_argument
    add("--json", action="store_true", help="print one JSON object")
    test = "test every GPU (or the CPU): compute and copy, and compare the results with the CPU"
    add("--selftest", dest="self_test", action="store_true", help=test)
    add("--run-dir", default="runs", metavar="DIR", help="parent directory of runs (default %(default)s)")
    add("--mpirun-args", default="", metavar="TEXT", help="as for launch; may set a launch agent")


def _add_mesh(commands: Commands) -> None:
    mesh = commands.add_parser("mesh", help="WireGuard mesh between hosts (docs/wireguard.md)")
    actions = mesh.add_subparsers(title="actions", required=True, metavar="ACTION")
    text = "write keys and WireGuard configurations for the machines of a hosts.toml"
    add = _command(actions, "init", "launch.hosts.mesh:init", text).add_argument
    add("path", type=Path, metavar="HOSTS", help="hosts.toml with the addresses outside the mesh")
    where = "output directory (default %(default)s)"
    add("-o", "--output", dest="directory", type=Path, default=Path("mesh"), metavar="DIR", help=where)
    text = "under a launcher, check that MPI messages use the mesh; exit code 1: they do not"
    add = _command(actions, "verify", "cli:mesh_verify", text).add_argument
    add("hosts", type=Path, metavar="HOSTS", help="the hosts.toml that `mesh init` wrote")


def _add_offline_commands(commands: Commands) -> None:
    """Declare ``profile``, and the commands that use a profile without needing the cluster: ``inspect``, ``plan``, ``simulate``."""
    text = "measure ranks and links: launch -np 3 -- profile JOB -o FILE"
    add = _command(commands, "profile", "cli:profile", text).add_argument
    add("job", type=Path, metavar="JOB", help="job file (TOML)")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="profile to write (TOML)")
    add("--reprofile", action="store_true", help="ignore earlier measurements")
    _add_set(add)

    text = "show a profile, a plan or a checkpoint"
    add = _command(commands, "inspect", "commands.plan_commands:inspect", text).add_argument
    file = "profile, plan or checkpoint file, the name of a shipped profile, or a run directory"
    add("file", type=Path, metavar="FILE|NAME|RUN", help=file)
    add("-o", "--output", type=Path, metavar="PNG", help="picture of a profile (default: next to FILE; NAME.png here)")
    add("--all", dest="every", action="store_true", help="show every rank, host and link of a large cluster")

    text = "plan a job for the cluster of a profile; needs no cluster"
    add = _command(commands, "plan", "commands.plan_commands:plan", text).add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="write the plan to a file, for editing and train --plan")
    add("--explain", action="store_true", help="also answer what-if questions by planning again")
    add("--json", dest="as_json", action="store_true", help="print one JSON object instead of tables")
    _add_question(add)

    text = "simulate a step: timeline, trace, causes of idle time; needs no cluster"
    add = _command(commands, "simulate", "commands.plan_commands:simulation", text).add_argument
    where = "directory for pictures and trace (default: RUN_DIR/simulation)"
    add("-o", "--output", type=Path, metavar="DIR", help=where)
    add("--shared-nic", action="store_true", help="simulate one NIC per host, shared by all its messages")
    _add_question(add)


def _add_question(add: Add) -> None:
    """Declare the options of ``plan`` and ``simulate``: job, profile and planning options."""
    add("job", type=Path, nargs="?", metavar="JOB", help="job file; default: the run's, or one for the profile's model")
    profile = "profile file, shipped profile, or run whose profile to use (default: list the profiles)"
    add("--profile", type=Path, metavar="FILE|NAME|RUN", help=profile)
    plan = "plan file, or run whose plan to use, instead of planning"
    add("--plan", dest="plan_source", type=Path, metavar="FILE|RUN", help=plan)
    _add_schedule(add)
    _add_set(add)


def _add_looking_back(commands: Commands) -> None:
    """Declare the commands that read runs: ``report``, ``watch``, ``compare`` and ``baseline``."""
    text = "write the HTML report of a run; train also writes it at the end"
    add = _command(commands, "report", "commands.run_commands:report", text).add_argument
    add("run_dir", type=Path, metavar="RUN", help="run directory")
    add("-o", "--output", type=Path, metavar="FILE", help="(default: RUN/report.html)")
    share = "omit host names, user names and absolute paths, for sharing (RUN/report-shared.html)"
    add("--share", action="store_true", help=share)

    text = "show a running or finished run in the browser"
    add = _command(commands, "watch", "serve.live_page:watch", text).add_argument
    add("run_dir", type=Path, metavar="RUN", help="run directory")
    add("--port", type=int, metavar="N", help="port (default: 8642, or a free port if it is in use; 0: any free port)")
    token = "access token (default: a random token, part of the printed address)"
    _add_listening(add, "address to listen on (default %(default)s)", token)

    text = "compare runs side by side; jobs, plans, speed, loss after the same number of tokens"
    add = _command(commands, "compare", "commands.run_commands:compare", text).add_argument
    add("runs", type=Path, nargs="+", metavar="RUN|DIR", help="run directories, or directories that contain runs")
    add("-o", "--output", type=Path, metavar="FILE", help="also write an HTML page with the curves of all runs")

    text = "compare all devices with the best single device; for the same number of tokens"
    add = _command(commands, "baseline", "commands.run_commands:baseline", text).add_argument
    job = "job file; default: the run's, or one for the profile's model"
    add("job", type=Path, nargs="?", metavar="JOB", help=job)
    profile = "profile, or run, whose measured times are then used (default: list the profiles)"
    add("--profile", type=Path, metavar="FILE|NAME|RUN", help=profile)
    _add_set(add)
