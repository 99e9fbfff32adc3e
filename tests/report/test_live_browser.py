"""The live page in a real browser, beside a real run of three ranks: it follows the run, a death and the end, with a keyboard, on a
phone, light and dark; and nothing but the run's page is asked for."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_mpi.planning.types.plan import PipelinePlan, Plan, StagePlan
from hetero_mpi.planning.types.toml_files import save_plan
from hetero_mpi.rundir.line_files import METRICS_NAME
from hetero_mpi.rundir.metrics import read_metrics
from tests.runtime.test_recovery import outliving_or_skip
from tests.support.browser import Browser, browser
from tests.support.jobs import GLOBAL_BATCH, SEQUENCE
from tests.support.long_run import LongRun, Running, kill
from tests.support.mpi import ROOT
from tests.support.past_runs import cluster, make_run, planned

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Watched:
    running: Running
    browser: Browser
    url: str

    def step(self) -> int:
        found = re.search(r"([\d,]+) of 100,000", self.browser.text())
        return int(found[1].replace(",", "")) if found else 0

    def ranks(self) -> dict[str, str]:
        """Rank -> what its box says."""
        script = (
            "Object.fromEntries([...document.querySelectorAll('.rank')].map(one => [one.dataset.rank, one.innerText]))"
        )
        return dict(self.browser.value(script))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("live")
    options = outliving_or_skip()
    with browser(folder) as page:
        job = LongRun(folder, 3)
        stages = StagePlan((0,), 0, 2, 2), StagePlan((1,), 2, 3, 1), StagePlan((2,), 3, 4, 0)
        save_plan(Plan((PipelinePlan(stages, 1, GLOBAL_BATCH),), GLOBAL_BATCH, SEQUENCE, 4), job.plan)
        run = folder / "run"
        more = (
            "--set",
            "checkpoint.replicate_every=2",
            "--set",
            "train.evaluate_every=10",
            "--set",
            "report.write=true",
            "--watch",
            "0",
        )
        arguments, environment = job.command(run, *more)
        with job.started([arguments[0], *options, *arguments[1:]], environment, run) as running:
            running.wait_for("the address", lambda: "Watch this run at " in running.text())
            found = re.search(r"http://127\.0\.0\.1:\d+/#\S+", running.text())
            assert found is not None
            running.wait_for_steps(1)
            page.look(1200)
            page.open(found[0])
            yield Watched(running, page, found[0])


def test_it_follows_the_run_and_asks_for_nothing_else(watched: Watched) -> None:
    page = watched.browser
    first = page.wait_for("step", watched.step)
    page.wait_for("further steps", lambda: watched.step() > first + 5)
    page.wait_for("the three ranks", lambda: watched.ranks().keys() == {"0", "1", "2"})
    seen = set[str]()
    page.wait_for("different work", lambda: seen.add(watched.ranks()["1"].splitlines()[0]) or len(seen) > 1)
    assert "MB of" in watched.ranks()["0"] and "busy" in watched.ranks()["0"]
    page.wait_for("the curves", lambda: page.value("document.querySelectorAll('#part-learning svg').length") >= 3)
    written = [(0.0, 0)]

    def follows() -> bool:
        """The curves show what was written two seconds ago."""
        written.append((time.monotonic(), read_metrics(watched.running.run / METRICS_NAME).steps[-1].step))
        labels = page.value("[...document.querySelectorAll('#part-learning svg')].map(one => one.ariaLabel)")
        shown = [int(found[1].replace(",", "")) for label in labels if (found := re.search(r" to ([\d,]+)$", label))]
        return len(shown) >= 3 and min(shown) >= max(step for when, step in written if when < written[-1][0] - 2.0)

    page.wait_for("further steps", lambda: follows() is not None and len(written) > 30 and watched.step() > first + 20)
    page.wait_for("curves within two seconds, ten times", lambda: all(follows() for _ in range(10)))
    page.wait_for("the held-out loss", lambda: "evaluation loss" in page.text())
    assert "Running: " in page.text() and page.value("document.title") == "job"
    address = watched.url.partition("#")[0]
    asked = page.requested()
    assert {address, f"{address}live.js"} <= asked and all(url.startswith(address) for url in asked), asked
    assert page.errors() == []
    token = watched.url.partition("#")[2]
    logs = "".join(path.read_text() for path in (watched.running.run / "logs").iterdir())
    assert token not in logs and watched.running.text().count(token) == 1


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window_light_and_dark(watched: Watched, width: int, scheme: str) -> None:
    page = watched.browser
    page.look(width, scheme=scheme, mobile=width < 600)
    page.wait_for("the ranks", watched.ranks)
    page.wait_for("the curves", lambda: page.value("document.querySelectorAll('#part-learning svg').length"))
    assert page.value("document.documentElement.scrollWidth") <= width, "nothing but what says so scrolls sideways"
    box = "[...document.querySelectorAll('.rank')].every(one => one.getBoundingClientRect().right <= window.innerWidth)"
    assert page.value(box)
    light = sum(map(int, re.findall(r"\d+", page.value("getComputedStyle(document.body).backgroundColor"))[:3])) > 380
    assert light == (scheme == "light")
    page.look(1200)


def test_it_is_used_with_a_keyboard_and_stays_as_it_was_left(watched: Watched) -> None:
    page = watched.browser
    here = "document.activeElement.parentElement?.dataset.log"
    for _ in range(60):
        page.press("\ue004")  # Tab
        if page.value(here) == "0001":
            break
    assert page.value(here) == "0001"
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") != "none", "the focus is seen"
    page.press("\ue007")  # Enter
    log = "document.querySelector('[data-log=\"0001\"] pre').textContent"
    page.wait_for("the log", lambda: "process" in page.value(log))
    before = watched.step()
    page.wait_for("further steps", lambda: watched.step() > before + 5)
    page.value("put('logs', document.querySelector('#part-logs').innerHTML.replaceAll('open', ''))")
    assert page.value(here) == "0001" and page.value("document.activeElement.parentElement.open")
    assert "process" in page.value(log)


def test_curves_are_read_by_hovering_and_keep_their_form(watched: Watched) -> None:
    page, boxes = watched.browser, "['log', 'smooth'].map(name => document.getElementById(name))"
    page.value(f"{boxes}.forEach(box => box.click())")
    before = watched.step()
    page.wait_for("further steps", lambda: watched.step() > before + 5)
    assert page.value(f"{boxes}.map(box => box.checked)") == [True, True]
    shown = "['linear', 'log', 'smooth'].map(name => getComputedStyle(document.querySelector('svg .' + name)).display)"
    assert page.value(shown) == ["none", "inline", "inline"]
    place = "(rect => [rect.x + rect.width / 2, rect.y + 20])(document.querySelector('.reading rect').getBoundingClientRect())"

    def reading() -> str:
        page.value("document.querySelector('.reading').scrollIntoView({block: 'center'})")
        x, y = page.value(place)
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        visible = "(text => getComputedStyle(text).visibility === 'visible' ? text.textContent : '')"
        return str(page.value(f"{visible}(document.querySelector('.reading text'))"))

    assert re.match(r"step \d+training \d", page.wait_for("a reading", reading))


def test_it_shows_a_death_the_recovery_and_the_end(watched: Watched) -> None:
    page, running = watched.browser, watched.running
    running.find_ranks()
    kill(running, 2)
    page.wait_for("the death", lambda: "Lost rank 2 on " in page.text())
    page.wait_for("the ranks that are left", lambda: watched.ranks().keys() <= {"0", "1"} and watched.ranks())
    page.wait_for("the recovery", lambda: "first step after the loss" in page.text())
    before = watched.step()
    page.wait_for("further steps", lambda: watched.step() > before + 5)
    running.find_ranks()
    running.ranks[0].send_signal(signal.SIGTERM)
    page.wait_for("the end", lambda: "The run ended after " in page.text() and "requested by a signal" in page.text())
    page.wait_for("the word that nobody answers", lambda: "No answer since " in page.text())
    assert "Lost rank 2 on " in page.text(), "what was last heard stays"
    running.end()
    assert "requested by a signal" in (running.run / "report.html").read_text()


def test_the_command_serves_a_run_that_is_over_until_an_interrupt(tmp_path: Path) -> None:
    profile = cluster(2)
    run = make_run(tmp_path / "run", planned(profile), profile)
    words = [sys.executable, "-m", "hetero_mpi", "watch", str(run), "--port", "0", "--token", "mine"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            address, token = serving.stdout.readline().split()[-1].split("#")
            headers = {"Authorization": f"Bearer {token}"}
            with urllib.request.urlopen(
                urllib.request.Request(f"{address}changes/0", headers=headers), timeout=60
            ) as answer:
                assert "Training finished after 60 steps." in json.load(answer)["parts"]["header"]
            serving.send_signal(signal.SIGINT)
            assert serving.wait(60) == 0
        finally:
            serving.kill()
