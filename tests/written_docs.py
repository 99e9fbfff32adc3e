"""What stands in the documents but comes from the program. ``python -m tests.written_docs`` writes all of it anew:

* ``docs/job.md``, ``docs/commands.md``, ``docs/coming-from.md``, ``jobs/reference.toml``, ``tests/MODULES.md``,
  ``tests/messages.txt``: whole files;
* the fenced block after ``<!-- grid: 1f1b, 3 stages, 4 micro-batches -->``: the grid of such a schedule;
* the fenced block after ``<!-- prints -->``: what the last command of the ``sh`` block before it prints;
* the block after ``<!-- prints, shortened -->`` and the paragraph after ``<!-- figures: COMMAND -->``, which are compared but not
  written: the lines, and the figures, are among what the command prints;
* after ``<!-- draws: NAME.png -->``: ``docs/images/NAME.png``, the timeline that the command before it draws.

``--run`` makes the other pictures, in four minutes: ``architecture.png`` and ``report.png`` of the run in
``docs/reading-a-run.md``, and ``live.png`` of the live page of ``jobs/stages.toml`` (with ``chromium`` and ``selenium``).

Commands run in a directory with the repository's ``jobs/`` and ``profiles/``, and the files that the document itself shows after
``<!-- file: NAME -->``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hetero_mpi.cli import main, parser
from hetero_mpi.commands.reference_pages import commands_page, job_page, reference_text
from hetero_mpi.interop.job_draft import TABLE, TOOLS
from hetero_mpi.launch.launcher.command_line import build_command
from hetero_mpi.planning.schedule import schedule_of
from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from tests import module_tests
from tests.messages import messages
from tests.support.browser import Browser, browser
from tests.support.long_run import started
from tests.support.mpi import ROOT, launcher_or_skip
from tests.support.planning_samples import grid, make_model

REWRITE = "python -m tests.written_docs"
CONCEPTS = ROOT / "docs" / "concepts.md"
READING = ROOT / "docs" / "reading-a-run.md"
IMAGES = ROOT / "docs" / "images"
FENCE = r"```\w*\n(?P<text>.*?)```"
GRID = re.compile(
    r"<!-- grid: (?P<kind>\w+), (?P<stages>\d+) stages, (?P<count>\d+) micro-batch\w* -->\n" + FENCE, re.S
)
COMMAND = r"```sh\n(?:[^`]*\n)?python -m hetero_mpi (?P<command>[^\n]*)\n```\n\n"
PRINTS = re.compile(COMMAND + r"<!-- prints -->\n" + FENCE, re.S)
SHORTENED = re.compile(COMMAND + r"<!-- prints, shortened -->\n" + FENCE, re.S)
FIGURES = re.compile(r"<!-- figures: (?P<command>[^>]+) -->\n(?P<text>.+?)\n\n", re.S)
DRAWS = re.compile(COMMAND + r"<!-- draws: (?P<name>[\w.-]+) -->\n", re.S)
FILES = re.compile(r"<!-- file: (?P<name>[\w./-]+) -->\n" + FENCE, re.S)
SHOWS = "Shows"
"""Under this name a picture carries the figures that it shows, so that a test can see whether it is still true."""
COLOURS = 64
"""Of a picture in docs/images: a timeline has a dozen, and lettering wants some shades."""
RUN = re.compile(r"^python -m hetero_mpi (?P<command>launch -np 3 -- train homelab.toml)$", re.M)
LIVE_STEPS = 20
"""After so many steps the live page is drawn: the curves have a shape, and the run goes on."""


def whole_files() -> dict[Path, str]:
    """Files that the program writes whole -> their text."""
    return {
        ROOT / "docs" / "job.md": job_page(),
        ROOT / "docs" / "commands.md": commands_page(parser()),
        ROOT / "docs" / "coming-from.md": coming_from_page(),
        ROOT / "jobs" / "reference.toml": reference_text(),
        ROOT / "tests" / "MODULES.md": module_tests.table(),
        ROOT / "tests" / "messages.txt": messages(),
    }


COMING_FROM = """\
# Coming from axolotl, LLaMA-Factory or TRL

<!-- Written by `python -m tests.written_docs` from hetero_mpi/job/other_tools.toml. -->

Convert a configuration, then check it with a dry run:

```sh
python -m hetero_mpi init --from axolotl.yml --gpus 2      # writes job.toml; init --from FILE DIR: DIR/job.toml
python -m hetero_mpi launch -np 2 -- train job.toml --dry-run
```

`init --from` reads YAML of axolotl, LLaMA-Factory or TRL, a Python script for TRL, or a file with the training command.
It runs and downloads nothing.
The job file names the source of each key, and lists keys without an equivalent, with values and reasons.
`init` prints misspelled keys and those without which training differs.

* Set `--gpus` to the other run's number of GPUs: a step's batch is micro-batch x accumulation x GPUs.
* The job states the other tool's defaults (axolotl 0.18, LLaMA-Factory 0.9.6, TRL 1.16) where they differ from those here.
* Paths stay relative to the working directory.
* `data.sequence_length` is the tool's limit minus one: the last token is only a target.
* axolotl drops long rows; here they are truncated and counted.
* Data order, the prompt template (the tokenizer's) and rounding differ, so losses are only similar.
"""
COMING_FROM_TABLES = {
    "Converted keys": "The last column has transformers' arguments, which several tools accept.",
    "Keys that stop the conversion": "No job is written unless these keys are off (`false`, 0, empty).\n"
    "PPO, GRPO, reward models, diffusion, images and sound stop it too.",
    "Keys without which training differs": "`init` prints them.",
}
COMING_FROM_REST = """
## Keys that are left out

The job's comments list those of your file, with these reasons:
"""


def coming_from_page() -> str:
    """The tables of ``init --from``; a key that a tool shares with transformers' trainers is in their column only."""
    titles, text = {**{tool: TABLE[tool]["title"] for tool in TOOLS}, "trainer": "transformers"}, COMING_FROM
    shared = {row for rows in _rows("trainer").values() for row in rows}
    for section, introduction in COMING_FROM_TABLES.items():
        keys_by_meaning: dict[str, dict[str, list[str]]] = {}
        for part in titles:
            for key, meaning in _rows(part)[section]:
                if part == "trainer" or (key, meaning) not in shared:
                    keys_by_meaning.setdefault(meaning, {}).setdefault(part, []).append(f"`{key}`")
        text += f"\n## {section}\n\n{introduction}\n\n| meaning | {' | '.join(titles.values())} |\n|{' --- |' * 5}\n"
        for meaning, keys in sorted(keys_by_meaning.items()):
            text += f"| {meaning} | {' | '.join(', '.join(keys.get(part, [])) for part in titles)} |\n"
    groups = [group for part in titles for group in TABLE[part]["left"] if not group.keys() & {"stop", "differs"}]
    return (
        text
        + "".join(f"* {reason}\n" for reason in [COMING_FROM_REST, *sorted({group["reason"] for group in groups})])[2:]
    )


def _rows(part: str) -> dict[str, list[tuple[str, str]]]:
    """Section of the page -> (key of the other tool, its meaning here)."""
    left = [(key, group) for group in TABLE[part]["left"] for key in group["keys"]]
    return {
        "Converted keys": [
            (key, TABLE["parts"][ours[1:]] if ours.startswith("=") else f"`{ours}`")
            for key, ours in TABLE[part]["keys"].items()
        ],
        "Keys that stop the conversion": [(key, group["reason"]) for key, group in left if group.get("stop")],
        "Keys without which training differs": [(key, group["reason"]) for key, group in left if group.get("differs")],
    }


def drawn_grid(kind: str, stages: int, micro_batches: int) -> str:
    """The grid of one pipeline of equal stages: ``gpipe``, ``1f1b`` or ``split``."""
    depths = [micro_batches if kind == "gpipe" else stages - 1 - index for index in range(stages)]
    cut = tuple(StagePlan((index,), index, index + 1, depths[index]) for index in range(stages))
    pipeline = PipelinePlan(cut, 1, micro_batches, split_backward=kind == "split")
    model = make_model(blocks=stages - 2)
    plan = Plan((pipeline,), global_batch=micro_batches, sequence_length=8, layers=stages)
    return grid(schedule_of(plan, model)) + "\n"


@contextlib.contextmanager
def workplace(document: str) -> Iterator[Path]:
    """A working directory for the document's commands."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        for folder in ("jobs", "profiles"):
            (Path(name) / folder).symlink_to(ROOT / folder)
        for found in FILES.finditer(document):
            (Path(name) / found["name"]).write_text(found["text"])
        os.chdir(name)
        os.environ["COLUMNS"] = "120"  # as wide as a document shows it
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            del os.environ["COLUMNS"]


def printed(command: str) -> str:
    """What ``python -m hetero_mpi COMMAND`` prints in the current directory; it must succeed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(shlex.split(command, comments=True))
    assert code == 0, f"{command}: exit code {code}"
    return out.getvalue()


def renewed(document: str) -> str:
    """The document with its grids and printed blocks as the program makes them now."""

    def put(found: re.Match[str], text: str) -> str:
        start, end = found.start("text") - found.start(), found.end("text") - found.start()
        return found[0][:start] + text + found[0][end:]

    document = GRID.sub(
        lambda found: put(found, drawn_grid(found["kind"], int(found["stages"]), int(found["count"]))), document
    )
    with workplace(document):
        return PRINTS.sub(lambda found: put(found, printed(found["command"])), document)


def draw(document: str, directory: Path) -> list[Path]:
    """Run the commands of the document that draw, and save their pictures, with few colours, in ``directory``."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    saved = []
    with workplace(document):
        for found in DRAWS.finditer(document):
            notes = PngInfo()
            notes.add_text(SHOWS, simulated(printed(found["command"])))
            folder = parser().parse_args(shlex.split(found["command"])).output
            picture = Image.open(folder / "timeline.png").convert("RGB").quantize(COLOURS)
            picture.save(directory / found["name"], optimize=True, pnginfo=notes)
            saved.append(directory / found["name"])
    return saved


def simulated(output: str) -> str:
    """Of what ``simulate`` prints, the lines that say what the picture shows."""
    found = re.search(r"^Simulated step:.*?(?=^  all-reduce: |^Written)", output, re.S | re.M)
    assert found is not None, output
    return found[0]


def draw_run(page: Browser, folder: Path) -> None:
    """Take the run of ``reading-a-run.md``, and save its architecture and the middle of its report."""
    text = READING.read_text(encoding="utf-8")
    found = RUN.search(text)
    assert found is not None, READING
    with workplace(text) as place:
        subprocess.run([sys.executable, "-m", "hetero_mpi", *shlex.split(found["command"])], check=True)
        run = place / "runs" / "homelab"
        page.look(1150)
        page.open(f"file://{run}/report.html")
        draw_parts(page, "usage memory step", folder / "report.png")
        _save(run / "architecture.png", IMAGES / "architecture.png")


def draw_live_page(page: Browser, folder: Path) -> None:
    """Start three CPU ranks with ``jobs/stages.toml``, and save their live page as it looks after a few steps."""
    program = [
        sys.executable,
        *["-m", "hetero_mpi", "train", "jobs/stages.toml", "--watch", "0", "--run-dir"],
        str(folder / "run"),
    ]
    command = build_command(launcher_or_skip(), 3, None, program)
    environment = {**os.environ, **command.environment, "OMP_NUM_THREADS": "1"}
    with started(command.arguments, environment, folder / "run", folder / "output.txt") as running:
        running.wait_for_steps(LIVE_STEPS)
        page.look(1000)
        page.open(re.findall(r"http://127\.0\.0\.1:\d+/#\S+", running.text())[0])
        page.wait_for("the curves", lambda: page.value("document.querySelectorAll('#part-learning svg').length"))
        draw_parts(page, "header tiles now learning", folder / "live.png")


def draw_parts(page: Browser, names: str, drawn: Path) -> None:
    """Save some sections of a report or a live page in ``docs/images``, under the name of ``drawn``."""
    shown = ", ".join(f"#part-{name}" for name in names.split())
    hidden = f"footer, #parts > :not({shown}), #part-learning .charts > :nth-child(n + 3)"
    style = f"<style>{hidden} {{display: none}}</style>"
    page.driver.execute_script("document.head.insertAdjacentHTML('beforeend', arguments[0])", style)
    page.picture(drawn)
    _save(drawn, IMAGES / drawn.name)


def _save(drawn: Path, saved: Path) -> None:
    """The picture in few colours, without the empty rest of the page below."""
    from PIL import Image, ImageChops

    picture = Image.open(drawn).convert("RGB")
    box = ImageChops.difference(picture, Image.new("RGB", picture.size, picture.getpixel((0, 0)))).getbbox()
    assert box is not None, drawn
    picture.crop((0, 0, picture.width, min(box[3] + 30, picture.height))).quantize(COLOURS).save(saved, optimize=True)


def write() -> None:
    for path, text in whole_files().items():
        path.write_text(text, encoding="utf-8")
    CONCEPTS.write_text(renewed(CONCEPTS.read_text(encoding="utf-8")), encoding="utf-8")
    for path in draw(CONCEPTS.read_text(encoding="utf-8"), IMAGES):
        print(path.relative_to(ROOT), path.stat().st_size, "bytes")


if __name__ == "__main__":
    if "--run" in sys.argv:
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
            draw_live_page(page, Path(folder))
            draw_run(page, Path(folder))
    else:
        write()
