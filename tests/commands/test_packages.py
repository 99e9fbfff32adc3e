"""What stands beside the code for those who install and change it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

from tests.support.mpi import ROOT


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomli.loads((ROOT / "pyproject.toml").read_text())


def test_the_groups_hold_what_the_extra_holds(project: dict[str, Any]) -> None:
    groups = project["dependency-groups"]
    named = [*groups["lint"], *(entry for entry in groups["test"] if isinstance(entry, str))]
    extra = project["project"]["optional-dependencies"]["test"]
    assert set(extra) == {entry for entry in named if not entry.startswith("pre-commit")}


def test_the_lock_has_a_version_of_everything_but_torch(project: dict[str, Any]) -> None:
    text = (ROOT / "tests" / "requirements.txt").read_text()
    locked = dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, re.MULTILINE))
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *(entry for extra in extras for entry in extra)]
    names = {re.match(r"[\w-]+", entry)[0].replace("_", "-") for entry in wanted}  # type: ignore[index]
    assert names - locked.keys() == {"torch"}
    assert "torch" not in locked and not re.search(r"@|file:|://", text)
    assert len(locked) == len(text.splitlines()) - 3, "three lines of comment, then a version a line"


def test_ci_and_pre_commit_call_what_people_call() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert any("bash .ci/run" in command for command in commands)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    script = (ROOT / ".ci" / "run").read_text()
    for hook in local["hooks"]:
        assert f'bin/{hook["entry"].split()[0]}"{hook["entry"].partition(" ")[2] and " "}' in script.replace("' ", '"')
    assert (ROOT / "CONTRIBUTING.md").resolve() == ROOT / "docs" / "CONTRIBUTING.md"


def test_the_citation_says_what_the_project_says(project: dict[str, Any]) -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    about = project["project"]
    assert (cited["title"], cited["version"], cited["license"]) == (about["name"], about["version"], about["license"])
    assert cited["abstract"] == about["description"]


def test_security_names_tests_that_there_are() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/.]+)`", text)
    assert len(named) > 8 and all((ROOT / path).exists() for path in named), named


@pytest.mark.slow
@pytest.mark.parametrize("source", ["", "https://example.org/me/hetero_mpi"])
def test_an_sdist_has_the_documents_and_no_link_that_leads_nowhere(source: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "shared", "build", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)
    if source:
        with (tmp_path / "clone" / "pyproject.toml").open("a") as file:
            file.write(f'[project.urls]\nSource = "{source}"\n')
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames() if "." in name.rpartition("/")[2]}
        information = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert information is not None
        text = information.read().decode()
    wanted = {
        "CITATION.cff",
        "README.md",
        "setup.py",
        "jobs/quickstart.toml",
        "profiles/README.md",
        "tests/requirements.txt",
    }
    documents = {
        str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.*") if ".ipynb_checkpoints" not in page.parts
    }
    assert files >= wanted | documents and {name for name in files if name.startswith("tests/")} < wanted
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert links == [] and "](" in (ROOT / "README.md").read_text()
    targets = re.findall(rf"\]\({source}/(?:blob|raw)/HEAD/([^)#\s]+)", text) if source else []
    assert all((ROOT / target).exists() for target in targets) and bool(targets) == bool(source)
    assert (f"Project-URL: Source, {source}" in text) == bool(source)
