"""The documents say what is true: links lead somewhere, commands exist and run, keys are keys, and what the program writes
into them (``written_docs.py``) is what it writes today.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

from hetero_mpi import __version__
from hetero_mpi.cli import main, parser
from hetero_mpi.commands.reference_pages import COMMANDS_HEADER, ENVIRONMENT
from hetero_mpi.job.rules import broken_keys, field_metadata, rule_text
from hetero_mpi.job.schema import TABLES
from hetero_mpi.job.training_tables import Unit
from hetero_mpi.launch.hosts.hosts_toml import Host, read_hosts
from hetero_mpi.launch.hosts.mesh import read_mesh
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.types.request import PlanRequest
from hetero_mpi.planning.types.toml_files import save_profile
from hetero_mpi.util.errors import ExitCode
from tests import written_docs
from tests.support.mpi import ROOT
from tests.support.past_runs import WHOLE_JOB, make_run
from tests.support.planning_samples import JOB_TOML, make_model, make_profile

DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"]
    + [page for folder in ("docs", "jobs", "profiles") for page in (ROOT / folder).rglob("*.md")]
)
LOG = ROOT / "benchmarks" / "LOG.md"
"""Attempts of the past, which name commands and modules of their day: its links alone are looked at."""
WRITTEN_WHOLE = {"job.md", "commands.md"}
"""Pages whose code blocks are usages, not commands; they are compared with the program's own text instead."""
FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.S | re.M)
SPAN = re.compile(r"`([^`\n]+)`")
FOREIGN_OPTIONS = {
    "Open MPI": {"--mca", "--prtemca", "--prefix", "--host", "--wdir", "--with-ft", "--oversubscribe"},
    "SLURM": {
        "--gpus-per-task", "--gpus-per-node", "--gres", "--mem", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--requeue",
        "--account", "--open-mode", "--signal", "--time", "--mpi", "--het-group",
    },
    "Docker": {"--shm-size", "--ipc"},
    "uv, pip": {"--torch-backend", "--pip-args", "--constraint"},
    "WSL": {"--networking-mode", "--shutdown"},
}  # fmt: skip
"""Whose options the documents mention beside our own."""
BENCHMARK_OPTIONS = {
    option for path in (ROOT / "benchmarks").glob("*.py") for option in re.findall(r"\"(--[\w-]+)\"", path.read_text())
}
OFFLINE = {"plan", "simulate", "inspect", "baseline", "compare", "report", "reference"}
"""Commands that a test can run anywhere."""
SHIPPED_JOB, SHIPPED_PROFILE = ROOT / "jobs" / "llama8b_alpaca.toml", "homelab-5090-strix-halo"
"""A job and a profile that go together."""
SOURCES = [
    str(path.relative_to(ROOT))
    for folder in ("hetero_mpi", "tests", "benchmarks", "jobs")
    for path in (ROOT / folder).rglob("*.py")
]
FIGURE = re.compile(r"(?<![\w.-])(?:\d+\.\d+|\d[\d,]*(?= (?:%|times|tokens|[MG]B|m?s)\b))")
"""A figure with a fraction or a unit."""
LARGEST_PICTURE = 100_000
TOP_LEVEL = {
    "hetero_mpi", "jobs", "profiles", "tests", "benchmarks", "docs", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE",
    "setup.py", "MANIFEST.in", "SECURITY.md", "CONTRIBUTING.md", "CITATION.cff",
}  # fmt: skip
"""What stands at the top, beside dot files: other documents go to docs/."""


@dataclass(frozen=True)
class Command:
    """A ``python -m hetero_mpi ...`` of a document."""

    document: Path
    words: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {shlex.join(self.words)}"


def fenced(document: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the code blocks."""
    for found in FENCED.finditer(document.read_text(encoding="utf-8")):
        yield found["language"], found["text"]


def prose(document: Path) -> str:
    """The document without its code blocks."""
    return FENCED.sub("", document.read_text(encoding="utf-8"))


def spans(document: Path) -> list[str]:
    """Texts between single backquotes."""
    return SPAN.findall(prose(document).replace("``", ""))


def command_lines(document: Path) -> Iterator[tuple[str, ...]]:
    """Words of every command in the document's shell blocks, and of code spans that are whole commands of ours."""
    lines = [] if document.name in WRITTEN_WHOLE else [span for span in spans(document) if "hetero_mpi " in span]
    for language, text in fenced(document):
        if language in ("sh", "bash", "") and document.name not in WRITTEN_WHOLE:
            lines += text.replace("\\\n", " ").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError):  # a line of output with an apostrophe
            yield from simple_commands(line)


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a line, without redirections; programs of an environment by their names."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    part: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if part and not set(word) <= set("<>"):
                yield tuple(re.sub(r"^\S*/bin/(?=\w)", "", one) for one in part)
            part = part if set(word) <= set("<>") else []
            redirected = set(word) <= set("<>")
        elif not redirected:
            part.append(word)
        else:
            redirected = False


def commands(document: Path) -> list[Command]:
    found = []
    for words in command_lines(document):
        for marker in (("-m", "hetero_mpi"), ("hetero-mpi",)):
            for place in range(len(words)):
                whole = "..." not in words and "COMMAND" not in words  # else it is a form, not a command
                if whole and words[place : place + len(marker)] == marker:
                    found.append(Command(document, words[place + len(marker) :]))
    return found


def slugs(document: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(document), re.M):
        slug = slug_of(heading)
        number = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        found.add(f"{slug}-{number}" if number else slug)
    return found


def slug_of(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


@pytest.mark.parametrize("document", [*DOCUMENTS, LOG], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_anchors_and_named_files_exist(document: Path) -> None:
    text = SPAN.sub("", prose(document).replace("](", "]\0("))  # a link's own text may be a code span
    wrong = []
    for target in re.findall(r"\]\0\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in slugs(file)):
            wrong.append(target)
    for span in spans(document) if document != LOG else []:
        if re.fullmatch(r"[\w/.-]+\.py", span) and not any(f"/{source}".endswith(f"/{span}") for source in SOURCES):
            wrong.append(span)
        if re.match(r"(hetero_mpi|tests|benchmarks|jobs|profiles|docs)/[\w./-]+$", span) and not (ROOT / span).exists():
            wrong.append(span)
    assert not wrong


def test_pictures_are_used_and_small() -> None:
    linked = {
        (document.parent / target).resolve()
        for document in DOCUMENTS
        for target in re.findall(r"!\[[^\]]*\]\((?!https:)([^)]+)\)", prose(document))
    }
    pictures = {path.resolve() for path in (ROOT / "docs" / "images").iterdir()}
    assert pictures <= linked, "a picture that no document shows"
    for picture in linked:
        content = picture.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) <= LARGEST_PICTURE, picture
        width, height = struct.unpack(">II", content[16:24])
        assert 200 <= width <= 2400 and 100 <= height <= 4000, picture


# Commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(document):
        if not command.words:
            continue  # "what follows `python -m hetero_mpi`"
        try:
            namespace = parser().parse_args(command.words)
            inner = [word for word in getattr(namespace, "program", []) if word != "--"]
            own = list(command.words)[: len(command.words) - len(inner)]
            if inner:
                namespace = parser().parse_args(inner)
            for words in filter(None, (own, inner)):
                short = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
                assert short <= options_of(words[0]) | {"--version"}, f"{command.place}: not spelled out"
        except SystemExit as end:
            assert end.code == 0, f"{command.place}\n{capsys.readouterr().err}"
            continue
        job = getattr(namespace, "job", None)
        if job is not None and Path(job).parts[0] == "jobs":
            assert (ROOT / job).is_file(), command.place
        for override in getattr(namespace, "overrides", []):
            known_key(override.partition("=")[0], command.place)


def options_of(command: str) -> set[str]:
    """All option strings of a sub-command, those of its actions included."""
    found: set[str] = set()
    todo = [parser()._subparsers._group_actions[0].choices[command]]  # type: ignore[union-attr, index]
    while todo:
        one = todo.pop()
        for action in one._actions:
            found |= set(action.option_strings)
            todo += list(action.choices.values()) if isinstance(action.choices, dict) else []
    return found


NAMES = tuple(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_the_prose_exist(document: Path) -> None:
    ours = {option for name in NAMES for option in options_of(name)} | {"--version", "--help"}
    foreign = {option for options in FOREIGN_OPTIONS.values() for option in options} | BENCHMARK_OPTIONS
    wrong = []
    for span in spans(document):
        first = span.split()[0] if span.split() else ""
        own = span.split(" -- ")[0]
        options = [option.partition("=")[0] for option in re.findall(r"(?<![\w-])--\w[\w=-]*", own)]
        if first in NAMES:
            wrong += [f"{first} {option}" for option in options if option not in options_of(first)]
        elif first.startswith("--"):
            wrong += [option for option in options if option not in ours | foreign]
    assert not wrong


def test_the_top_level_stays_short() -> None:
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode != 0:
        pytest.skip(f"no git checkout: {git.stderr.strip()}")
    assert {Path(line).parts[0] for line in git.stdout.splitlines() if not line.startswith((".", '"'))} <= TOP_LEVEL


def test_the_readme_counts_the_profiles_and_its_badges_are_the_projects() -> None:
    text = (ROOT / "README.md").read_text()
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = [
        f"python-{project['requires-python'].removeprefix('>=')}%2B-",
        f"licence-{project['license'].replace('-', '--')}-",
    ]
    assert re.findall(r"img\.shields\.io/badge/", text) == ["img.shields.io/badge/"] * len(badges)
    assert [badge for badge in badges if f"shields.io/badge/{badge}" not in text] == []
    found = re.search(r"\((\w+) clusters are in \[profiles/\]", text)
    numbers = ["eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"]
    assert found is not None and numbers.index(found[1]) + 8 == len(list((ROOT / "profiles").glob("*.toml")))


def test_every_command_and_variable_has_its_place() -> None:
    assert [name for name in NAMES if f"`{name}" not in COMMANDS_HEADER] == []
    source = "\n".join(path.read_text() for path in (ROOT / "hetero_mpi").rglob("*.py"))
    read = set(re.findall(r"\"(HETERO_MPI_[A-Z]+)\"", source)) - {
        "HETERO_MPI_START",
        "HETERO_MPI_JOINED",
        "HETERO_MPI_UNWATCHED",
    }  # by launch
    assert read <= set(ENVIRONMENT)


def test_tables_of_options_and_keys_are_complete() -> None:
    commands = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in options_of("train") if name.startswith("--") and f"`{name}" not in commands] == []
    docs = ROOT / "docs"
    index, recovery = (docs / "README.md").read_text(), (docs / "recovery.md").read_text()
    assert [page for page in docs.rglob("*.md") if f"({page.relative_to(docs)})" not in index] == [docs / "README.md"]
    for code in ExitCode:
        assert f"| {code.value} | `{code.name}` |" in recovery, code
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("devices.md", "wireguard.md"))
    for key in Host.model_fields:
        assert f"| `{key}` |" in pages, f"[[host]] {key}"


def offline_lines(document: Path) -> list[str]:
    """What follows ``python -m hetero_mpi`` in the document's ``sh`` blocks, of commands that need no cluster."""
    lines = [line for language, text in fenced(document) if language == "sh" for line in text.splitlines()]
    found = [re.match(r"(?:\S*/)?python -m hetero_mpi (\w+.*)", line) for line in lines]
    return [one[1] for one in found if one and one[1].split()[0] in OFFLINE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if offline_lines(path) and path != written_docs.CONCEPTS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_offline_commands_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, where the files are that the page speaks of: made-up ones, but for those of ``profiles/``.

    Those of the concepts run below, as they print and draw.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    (tmp_path / "jobs").mkdir()
    shutil.copy(SHIPPED_JOB, tmp_path / "jobs" / SHIPPED_JOB.name)
    for name in ("job.toml", "jobs/quickstart.toml"):
        (tmp_path / name).write_text(JOB_TOML + "[plan]\npipelines = 1\n")
    profile = make_profile((1.0, 1.5, 12.0), make_model(6), latency_s=0.05, bytes_per_s=2e4)
    for name in ("cluster.toml", "inside.toml"):
        save_profile(profile, tmp_path / name)
    report = make_plan(profile, PlanRequest(8, 10, (1, 2)))
    for name in ("quickstart", "other", "first", "one-box", "two-boxes"):
        make_run(tmp_path / "runs" / name, report, profile, job=WHOLE_JOB)
    for line in offline_lines(document):
        if SHIPPED_PROFILE in line:
            line = line.replace(" job.toml ", f" jobs/{SHIPPED_JOB.name} ")
        assert written_docs.printed(line).strip(), line


@pytest.mark.slow
def test_shortened_blocks_and_marked_figures_are_printed() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        with written_docs.workplace(text):
            for block in written_docs.SHORTENED.finditer(text):
                lines = iter(written_docs.printed(block["command"]).splitlines())
                assert [line for line in block["text"].splitlines() if line not in lines] == [], "not in this order"
            for marked in written_docs.FIGURES.finditer(text):
                figures, output = FIGURE.findall(SPAN.sub("", marked["text"])), written_docs.printed(marked["command"])
                assert figures and [figure for figure in figures if figure not in output] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert written_docs.SHORTENED.search(readme) and written_docs.FIGURES.search(readme)


def test_figures_beside_a_link_to_the_results_stand_there() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    for line in "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS).splitlines():
        linked = "\n".join(section(results, anchor) for anchor in re.findall(r"RESULTS\.md#([\w-]+)", line))
        figures = FIGURE.findall(re.sub(r"\]\([^)]*\)", "]", SPAN.sub("", line))) if linked else []
        assert not [one for one in figures if not re.search(rf"(?<![\d.]){one}(?!\.?\d)", linked)], line


def section(text: str, anchor: str) -> str:
    """A heading and what is below it, down to the next heading of its level or a higher one."""
    found = next(one for one in re.finditer(r"^(#+) (.*)$", text, re.M) if slug_of(one[2]) == anchor)
    end = re.compile(rf"^#{{1,{len(found[1])}}} ", re.M).search(text, found.end())
    return text[found.start() : end.start() if end else None]


# Keys


def known_key(dotted: str, place: str) -> None:
    table, _, rest = dotted.partition(".")
    assert table in TABLES and rest.split(".")[0] in TABLES[table].model_fields, f"{place}: no key {dotted}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_keys_of_the_job_exist(document: Path) -> None:
    others = {"mesh"}  # of a hosts file
    for span in spans(document):
        for table, key in re.findall(r"(?<!\[)\[(\w+)\] (\w+)", span):
            if table not in others:
                known_key(f"{table}.{key}", document.name)
        dotted = re.fullmatch(r"(?:--set )?(\w+)\.(\w+)((?:\.\w+)*=.*)?", span)
        if dotted and dotted[1] in TABLES and dotted[2] in {"toml", "html", "json", "md", "py", "png", "h5"}:
            continue
        if dotted and dotted[1] in TABLES and not dotted[2][0].isupper():
            known_key(f"{dotted[1]}.{dotted[2]}", document.name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_toml_and_python_in_the_documents_are_valid(document: Path, tmp_path: Path) -> None:
    for language, text in fenced(document):
        if language == "python":
            compile(text, str(document), "exec")
        if language != "toml":
            continue
        content = tomli.loads(text)
        if "host" in content:
            (tmp_path / "hosts.toml").write_text(text)
            assert read_hosts(tmp_path / "hosts.toml")
            read_mesh(tmp_path / "hosts.toml")
        else:
            assert set(content) <= set(TABLES), text
            for table, values in content.items():
                missing = {key for key, field in TABLES[table].model_fields.items() if field.is_required()}
                broken = broken_keys(TABLES[table], values)
                assert not {key: rule for key, rule in broken.items() if key not in missing - set(values)}, text


# What the program writes


@pytest.mark.slow
@pytest.mark.parametrize("path", written_docs.whole_files(), ids=lambda path: path.name)
def test_pages_of_reference_are_the_code(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert path.read_text(encoding="utf-8") == written_docs.whole_files()[path], f"run: {written_docs.REWRITE}"
    options = {"job.md": ["--markdown"], "commands.md": ["--commands"], "reference.toml": []}
    if path.name in options:
        assert main(["reference", *options[path.name]]) == 0
        assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_every_number_of_the_job_has_its_unit() -> None:
    plain = {
        ("adapter", "rank"), ("adapter", "alpha"), ("train", "seed"), ("train", "learning_rate"), ("train", "lora_plus_ratio"),
        ("train", "neftune_noise_alpha"), ("train", "weight_decay"),
        ("train", "beta1"), ("train", "beta2"), ("train", "epsilon"), ("train", "clip_norm"), ("sample", "temperature"),
        ("train", "preference_beta"), ("train", "preference_margin"), ("train", "desirable_weight"),
        ("train", "undesirable_weight"), ("report", "watch"), ("train", "learning_rates"), ("adapter", "rank_pattern"),
        ("adapter", "alpha_pattern"), ("adapter", "tokens"),
    }  # fmt: skip
    numbers = {
        (table, key)
        for table, model in TABLES.items()
        for key, field in model.model_fields.items()
        if "number" in rule_text(field)
    }
    assert numbers - plain == {(table, key) for table, model in TABLES.items() for key in field_metadata(model, Unit)}


def test_grids_and_printed_blocks_are_the_programs() -> None:
    text = written_docs.CONCEPTS.read_text(encoding="utf-8")
    assert len(written_docs.GRID.findall(text)) == 4 and len(written_docs.PRINTS.findall(text)) == 1
    assert text.count("<!-- grid:") == 4 and text.count("<!-- prints -->") == 1
    assert text == written_docs.renewed(text), f"run: {written_docs.REWRITE}"


@pytest.mark.slow
def test_pictures_of_the_concepts_show_what_their_commands_draw(tmp_path: Path) -> None:
    from PIL import Image

    text = written_docs.CONCEPTS.read_text(encoding="utf-8")
    drawn = written_docs.draw(text, tmp_path)
    assert len(drawn) == text.count("<!-- draws:") == 3
    for new in drawn:
        old = Image.open(ROOT / "docs" / "images" / new.name)
        assert old.text[written_docs.SHOWS] == Image.open(new).text[written_docs.SHOWS], f"run: {written_docs.REWRITE}"
        assert f"<!-- draws: {new.name} -->\n![" in text and f"](images/{new.name})" in text


def test_the_changelog_begins_with_this_version() -> None:
    changes = (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)\]?", changes, re.M)
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert newest is not None and newest[1] == __version__ == project["version"]
