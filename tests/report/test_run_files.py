"""Files of a run: metrics, logs, and the lock of its directory."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hetero_mpi.rundir.logs import LOGGER, say, setup_logging
from hetero_mpi.rundir.metrics import Evaluation, MetricsWriter, read_metrics, rewards_text
from hetero_mpi.rundir.run_directory import EventLog, claim
from hetero_mpi.util.errors import UserError
from tests.support.errors import refuses
from tests.support.past_runs import metrics

ROOT = Path(__file__).parents[2]


def test_metrics_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.step(metrics(1))
        assert len(path.read_text().splitlines()) == 1, "flushed line by line"
        writer.evaluation(1, 2.25)
        writer.step(metrics(2))
        writer.step(replace(metrics(3), router_loss=2.5))
    found = read_metrics(path)
    assert found.steps == (metrics(1), metrics(2), replace(metrics(3), router_loss=2.5))
    assert found.evaluations == (Evaluation(1, 2.25),)
    keys = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "predicted_step_s"]
    lines = path.read_text().splitlines()
    assert list(json.loads(lines[0])) == keys and list(json.loads(lines[-1])) == [*keys, "router_loss"]


def test_rewards_survive_the_file(tmp_path: Path) -> None:
    told = {"chosen_reward": 0.5, "rejected_reward": -0.25, "reward_margin": 0.75, "reward_accuracy": 1.0}
    line = replace(metrics(1), **told)
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.step(line)
        writer.step(replace(metrics(2), chosen_reward=0.0, kl=0.25))
        writer.evaluation(2, 0.5, **told)
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert found.steps == (line, replace(metrics(2), chosen_reward=0.0, kl=0.25))
    assert found.evaluations == (Evaluation(2, 0.5, **told),)
    first, second, _ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first)[-4:] == list(told) and list(second)[-2:] == ["chosen_reward", "kl"]
    assert Evaluation(2, 0.5, 1.65, 0.431).beside() == ", perplexity 1.65, token accuracy 43.1 %"
    assert rewards_text(line) == ", reward margin 0.7500, accuracy 100 %" and rewards_text(metrics(1)) == ""


def test_non_finite_numbers_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.step(metrics(1, loss=math.nan))
        writer.evaluation(1, math.inf, sets={"a": math.nan, "b": 0.1})

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["loss"] is None and lines[0]["non_finite"] is True and lines[0]["grad_norm"] == 1.0
    sets = {"a": None, "b": 0.1}
    assert lines[1] == {"step": 1, "evaluation_loss": None, "sets": sets, "non_finite": True}
    found = read_metrics(path)
    assert math.isnan(found.steps[0].loss) and str(found.evaluations[0].sets) == "{'a': nan, 'b': 0.1}"


@pytest.mark.parametrize(("resume_step", "kept"), [(0, []), (2, [1, 2]), (3, [1, 2, 3])])
def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path, resume_step: int, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3):
            writer.step(metrics(step))
            writer.evaluation(step, 2.0)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # torn by a crash
    assert [step.step for step in read_metrics(path).steps] == [1, 2, 3]
    with MetricsWriter(path, resume_step) as writer:
        writer.step(metrics(resume_step + 1, loss=7.0))
    found = read_metrics(path)
    assert [step.step for step in found.steps] == [*kept, resume_step + 1]
    assert [evaluation.step for evaluation in found.evaluations] == kept
    assert found.steps[-1].loss == 7.0
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.fixture
def logging_restored() -> Iterator[None]:
    yield
    setup_logging(None, rank=1, size=1)
    logging.captureWarnings(False)


def test_rank_0_talks_and_every_rank_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logging_restored: None
) -> None:
    setup_logging(tmp_path, rank=3, size=12)
    say("unheard")
    warnings.warn("careful", stacklevel=1)
    logging.getLogger("hetero_mpi.comm").info("inside")
    logging.getLogger("somebody.else").info("chatter")
    (own,) = [handler for handler in logging.getLogger().handlers if handler.get_name() == LOGGER]
    half = logging.LogRecord("somebody.else", logging.WARNING, __file__, 1, "half a character: %s", ("\ud800",), None)
    own.handle(half)  # past pytest's handler, whose text pytest-xdist cannot send
    setup_logging(tmp_path, rank=0, size=12)
    say("first", "second")
    captured = capsys.readouterr()
    assert captured.out == "first\nsecond\n"
    lines = (tmp_path / "logs" / "rank-0003.log").read_text().splitlines()
    assert [line.split(" ", 2)[2].split(":")[0] for line in lines if line[:2] == "20"] == [
        " 3/12 INFO hetero_mpi.say",
        " 3/12 WARNING py.warnings",
        " 3/12 INFO hetero_mpi.comm",
        " 3/12 WARNING somebody.else",
    ]
    assert lines[-1].endswith("half a character: \\ud800")
    assert "careful" in "\n".join(lines) and "chatter" not in "\n".join(lines)
    assert len((tmp_path / "logs" / "rank-0000.log").read_text().splitlines()) == 2
    assert [handler.get_name() for handler in logging.getLogger().handlers].count(LOGGER) == 1


def test_lines_that_wait_are_not_written_by_the_end_of_the_process(tmp_path: Path, logging_restored: None) -> None:
    setup_logging(tmp_path, rank=0, size=1, waits=True)
    logging.getLogger(LOGGER).info("of a start that is refused")
    (own,) = [handler for handler in logging.getLogger().handlers if handler.get_name() == LOGGER]
    logging.shutdown([weakref.ref(own)])
    assert list(tmp_path.iterdir()) == []


# Run directory


def test_a_supervisors_events_in_a_used_directory_wait_for_more_than_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")

    def told(*names: str, does: Callable[[], object] = int) -> list[str]:
        log = EventLog(tmp_path, "supervisor")
        for name in names[:-1]:
            log.report(name, name)
        does()
        log.report(names[-1], names[-1])
        path = tmp_path / "events.jsonl"
        return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []

    assert told("hosts", "start", "ended", "end") == [] and {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "run.json",
    }
    assert told("hosts", "start", "broken") == ["hosts", "start", "broken"]
    (tmp_path / "events.jsonl").unlink()
    write_run = partial((tmp_path / "run.json").write_text, "{} ")
    assert told("hosts", "start", "end", does=write_run) == ["hosts", "start", "end"], "the start was accepted"


HOLD = """
import sys, time
from hetero_mpi.rundir.run_directory import claim
with claim(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "a"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=f"is in use by process {holder.pid} on .*, started 20.*--run-dir"),
            claim(directory),
        ):
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with claim(directory) as again:  # the holder crashed: nothing to clean up by hand
        assert again == directory
        assert json.loads((directory / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(UserError, match=f"process {os.getpid()} on"), claim(directory):
            pass
    with claim(directory):
        pass


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses("run.unwritable"), claim(tmp_path / "file" / "a"):
        pass


ODD_LINES = [
    "[]", "7", '"text"', "null", "{}", '{"step": "2"}', '{"step": null}', '{"step": 2}', '{"step": 2, "loss": [1]}',
    '{"step": 2, "evaluation_loss": "low"}', '{"step": 2.5, "evaluation_loss": 1.0}', "{" * 20, "[" * 100_000,
    '{"step": ' + "9" * 5000 + "}", '{"step": 1' + "0" * 400 + ', "evaluation_loss": 1.0}',
]  # fmt: skip


def test_odd_lines_of_metrics_are_left_out_and_newer_keys_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2, 3):
            writer.step(metrics(step))
        writer.evaluation(3, 2.5)
    lines = path.read_text().splitlines()
    newer = json.dumps({**json.loads(lines[1]), "watts": 7, "layers": [1, 2]})
    path.write_text("\n".join([*ODD_LINES, lines[0], *ODD_LINES, newer, *ODD_LINES, *lines[2:], *ODD_LINES]))
    found = read_metrics(path)
    assert found.steps == tuple(metrics(step) for step in (1, 2, 3))
    assert [(one.step, one.loss) for one in found.evaluations] == [(3, 2.5)]
    MetricsWriter(path, resume_step=2).close()
    assert read_metrics(path).steps == tuple(metrics(step) for step in (1, 2))
    assert newer in path.read_text(), "what another version has written stays"
