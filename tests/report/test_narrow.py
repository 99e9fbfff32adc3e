"""The page in a real browser, from a phone's width to a desk's: nothing is cut, and what is wider says that it scrolls."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_mpi.report.page.document import write_report
from hetero_mpi.report.past_run import read_run
from hetero_mpi.rundir.run_directory import SAMPLE_NAME
from tests.report.test_looks import LORA
from tests.support.browser import Browser, browser
from tests.support.past_runs import cluster, make_run, planned

pytestmark = pytest.mark.slow
FACTS = """(() => {
  const shown = e => e.getClientRects().length > 0, wide = [...document.querySelectorAll(".wide")];
  const hinted = w => { const p = w.previousElementSibling; return p && p.matches(".hint") && shown(p); };
  const inside = e => { const r = e.getBoundingClientRect(); return r.left >= 0 && r.right <= innerWidth + 0.5; };
  const words = [...document.querySelectorAll("h1,h2,p,li,code,pre,td,.tile,.charts svg,.bar")].filter(shown);
  return {
    width: innerWidth, page: document.documentElement.scrollWidth,
    cut: words.filter(e => !inside(e) && !e.closest(".wide svg")).map(e => e.textContent.slice(0, 60)),
    silent: wide.filter(w => w.scrollWidth > w.clientWidth && !hinted(w)).map(w => w.textContent.slice(0, 60)),
    headings: document.querySelectorAll(".of").length && shown(document.querySelector(".of")),
    paper: getComputedStyle(document.body).backgroundColor,
  };
})()"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long names, and all sections."""
    profile = cluster(6, per_host=1)
    long = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    profile = replace(profile, devices=tuple(replace(one, name=f"{long} {one.rank}") for one in profile.devices))
    run = make_run(tmp_path_factory.mktemp("narrow") / "a-run-with-a-long-name", planned(profile, 4), profile, job=LORA)
    (run / SAMPLE_NAME).write_text("## Prompt\n" + "a word and another " * 20 + "x" * 300)
    return write_report(read_run(run), run / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 980, 1200])
def test_nothing_is_cut(shown: Browser, page: Path, width: int, scheme: str) -> None:
    shown.look(width, scheme=scheme, mobile=width < 600)
    shown.open(page.as_uri())
    assert shown.errors() == [] and shown.requested() <= {page.as_uri()}, "its own policy forbids every request"
    found = shown.value(FACTS)
    assert found["page"] <= found["width"] == width, "the page itself does not scroll sideways"
    assert found["cut"] == [] and found["silent"] == [], found
    assert found["headings"] == (width < 900), "rows are lists where tables would be too wide, and tell their headings"
    assert found["paper"] == {"light": "rgb(253, 253, 252)", "dark": "rgb(22, 24, 28)"}[scheme]
