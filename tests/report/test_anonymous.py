"""A report for others names no host and no user, and shows no absolute path."""

import getpass
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.cli import main
from tests.support.past_runs import JOB, cluster, make_run, planned

HOSTS = ("annas-laptop", "cpu")
"""The second one is a word of ours, too."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    profile = cluster(4)
    names = dict(zip(dict.fromkeys(device.host for device in profile.devices), HOSTS, strict=True))
    profile = replace(
        profile,
        devices=tuple(replace(one, host=names[one.host]) for one in profile.devices),
        hosts=tuple(replace(one, name=names[one.name]) for one in profile.hosts),
    )
    job = json.loads(json.dumps(JOB))
    job["model"] = {**job.get("model", {}), "path": "/home/anna/my models/llama"}
    job["data"] = {**job.get("data", {}), "text": ["/home/anna/texts/*.txt", "~/more/notes.txt"]}
    made = make_run(tmp_path / "run", planned(profile), profile, job=job)
    text = (
        f"Died: rank 1 on annas-laptop; {made}/checkpoints/step-00000060.h5 of anna and beta is whole, at 1/2 the speed"
    )
    event = {"unix_s": 1.7e9, "event": "ranks-lost", "text": text, "hosts": ["beta"]}
    (made / "events.jsonl").write_text(json.dumps(event) + "\n")
    return made


def told(page: str) -> set[str]:
    """The names of this run that a page shows."""
    page = re.sub("<style>.*?</style>", "", page, flags=re.DOTALL)  # ":root"
    secrets = ("annas-laptop", "anna", "beta", getpass.getuser(), "/home", "/tmp", "~/", "my models", "texts")
    return {secret for secret in secrets if re.search(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", page)}


def test_a_shared_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run / "report.html"
    assert main(["report", str(run)]) == main(["report", str(run), "--share"]) == 0
    page = (run / "report-shared.html").read_text()
    assert str(run / "report-shared.html") in capsys.readouterr().out
    assert told(own.read_text()) >= {"annas-laptop", "anna", "beta", "/home"}, "what is to be left out is in the report"
    assert not told(page), told(page)
    assert "host 0" in page and "host 1" in page
    for kept in (".../llama", ".../*.txt", ".../notes.txt", ".../step-00000060.h5", "at 1/2 the speed", "host 2"):
        assert kept in page, kept
    elsewhere = run.parent / "elsewhere.html"
    assert main(["report", str(run), "--share", "-o", str(elsewhere)]) == 0 and not told(elsewhere.read_text())
