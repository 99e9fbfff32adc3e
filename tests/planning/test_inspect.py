"""The commands ``profile`` and ``inspect``, and planning on a laptop that has neither torch nor MPI."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero_mpi.cli import main
from hetero_mpi.commands import plan_commands
from hetero_mpi.planning.decision.planner import make_plan
from hetero_mpi.planning.types.profile import LinkProfile
from hetero_mpi.planning.types.toml_files import load_profile, plan_from_dict, save_plan, save_profile
from hetero_mpi.report.profile_text import residuals
from tests.support import past_runs
from tests.support.checkpoint_samples import told, write_checkpoint
from tests.support.errors import refuses
from tests.support.mpi import finish_mpi, require_success
from tests.support.planning_folder import JOB, REQUEST, cluster, run

ROOT = Path(__file__).parents[2]
TINY = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
[tokenizer]
train_vocab_size = 300
[data]
text = ["{stdlib}/json/*.py"]
sequence_length = 32
[train]
global_batch = 4
dtype = "fp32"
"""


# profile


@pytest.mark.long
def test_profile_measures_under_mpirun_and_its_file_is_planned_with_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "tiny.toml"
    job.write_text(TINY)
    output = tmp_path / "new" / "profile.toml"
    done = finish_mpi(2, ["-m", "hetero_mpi", "profile", str(job), "-o", str(output), "--set", "profile.repeats=1"])
    assert done.stdout.count("Written: ") == 1 and str(output) in done.stdout
    measured = load_profile(output)
    assert measured.source == "measured" and len(measured.devices) == 2 and len(measured.links) == 2
    assert measured.model.dtype == "fp32" and len(measured.model.layers) == 4
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(capsys, "plan", str(job), "--profile", str(output), "--json"))
    assert found["step_s"] > 0 and plan_from_dict(found["plan"]).layers == 4
    assert not (tmp_path / "runs").exists(), "profile and plan touch no run directory"


# inspect


@pytest.mark.slow
def test_inspect_shows_a_profile_with_residuals_and_spread(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "inspect", "profile.toml")
    assert "Rank 2: x12 (cpu)" in text and "5.0 %" in text and "Picture: profile.png" in text
    assert "0 -> 1 between hosts 50.0 ms 20.0 kB/s 5.0 % 10 % 2" in text
    assert Path("profile.png").stat().st_size > 20_000
    run(capsys, "inspect", "profile.toml", "-o", "elsewhere/other.png")
    assert Path("elsewhere/other.png").is_file()


def test_residuals_are_relative_to_the_measured_times() -> None:
    link = LinkProfile(0, 1, 0.05, 2e4, False, (1000, 10_000), (0.1, 0.5))
    assert residuals(link) == pytest.approx([0.0, 0.1])
    assert residuals(LinkProfile(0, 1, 0.05, 2e4, False)) == []


def test_inspect_shows_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(make_plan(cluster(), REQUEST), "what.toml")
    text = run(capsys, "inspect", "what.toml")
    assert "embedding, blocks" in text and "rank 2 idles" in text and "because: " in text
    edited = Path("what.toml").read_text().replace("global_batch = 8", "global_batch = 7")
    Path("what.toml").write_text(edited.replace("layers = 8", "layers = 9"))
    with refuses("file.invalid", "sequences = ", "global_batch = 7", "the chain's last layer is 8"):
        plan_commands.inspect(Path("what.toml"), None)


def test_inspect_shows_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {
        **told(3, losses=np.array([4.0, 2.5, 3.25])),
        "job": {"train": {"steps": 20, "dtype": "bf16"}, "data": {}, "adapter": {"method": "lora"}},
        "model_config": {"model_type": "qwen3", "num_hidden_layers": 28},
        "versions": {"torch": "2.13.0"},
    }
    write_checkpoint(Path("step-00000003.h5"), metadata, {"a.weight": (3, 4), "b.weight": (4,)})
    text = run(capsys, "inspect", "step-00000003.h5")
    assert "step 3 of 20" in text and "3.2500 (last step)" in text and "2.5000 (best step)" in text
    assert "model: qwen3, 28 blocks" in text and "method: LoRA" in text and "dtype: bf16" in text
    assert "2 trained tensors with 16 elements" in text and "torch 2.13.0" in text


def test_a_run_stands_for_its_profile_and_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = cluster()
    made = past_runs.make_run(Path("run"), past_runs.planned(profile), profile, job=past_runs.WHOLE_JOB)
    (made / "checkpoints" / "step-00000060.h5").unlink()
    write_checkpoint(
        made / "checkpoints" / "step-00000003.h5", told(3, losses=np.array([4.0, 2.5, 3.25])), {"a.weight": (3,)}
    )
    text = run(capsys, "inspect", "run")
    assert "run/profile.toml" in text and "run/plan.toml" in text and "because: " in text and "after step 3" in text
    assert not (made / "profile.png").exists() and not Path("run.png").exists(), "nothing is written beside a run"
    own, job = str(made / "profile.toml"), ("--set", "train.global_batch=8", "--json")
    by_file = run(capsys, "plan", "--profile", own, "--plan", str(made / "plan.toml"), *job)
    assert (
        json.loads(run(capsys, "plan", "--profile", "run", "--plan", "run", *job))["plan"]
        == json.loads(by_file)["plan"]
    )
    batches = [
        json.loads(run(capsys, "plan", "--profile", of, "--json"))["plan"]["global_batch"] for of in ("run", own)
    ]
    assert batches == [past_runs.WHOLE_JOB["train"]["global_batch"], plan_commands.MIN_BATCH], (
        "the run's job, if it is given a run"
    )
    used = replace(profile, date="yesterday")
    save_profile(used, made / "used-profile.toml")
    assert load_profile("run") == used, "the one that its plans were made for"
    Path("empty").mkdir()
    for words in (("inspect", "empty"), ("plan", "--profile", "empty")):
        assert main(list(words)) == 2
        assert "empty: no used-profile.toml and no profile.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("job.toml", JOB, "for a job file, use `plan`"),
        ("odd.toml", "[odd]\na = 1\n", "not a profile"),
        ("odd.txt", "= = =", "neither HDF5 nor TOML"),
        ("cut.h5", "\x89HDF", "neither HDF5 nor TOML"),
    ],
)
def test_inspect_says_what_it_wants(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str
) -> None:
    Path(name).write_bytes(content.encode("latin-1"))
    assert words in run(capsys, "inspect", name, code=2)
    assert "absent.toml: no such file" in run(capsys, "inspect", "absent.toml", code=2)


# A laptop without torch and MPI

PROGRAM = """
import sys
for name in ("torch", "mpi4py", "transformers", "peft", "h5py", "bitsandbytes"):
    sys.modules[name] = None  # importing it raises ImportError
from hetero_mpi.cli import main
arguments = [["plan", "job.toml", "--profile", "profile.toml", "--explain", "-o", "plan.toml"], ["inspect", "plan.toml"]]
for each in arguments:
    assert main(each) == 0
assert "matplotlib" not in sys.modules, "nothing was drawn"
for each in (["simulate", "job.toml", "--profile", "profile.toml", "-o", "out"], ["inspect", "profile.toml"]):
    assert main(each) == 0
assert "matplotlib" in sys.modules
"""


@pytest.mark.slow
def test_offline_commands_need_neither_torch_nor_mpi(folder: Path) -> None:
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
    require_success(subprocess.run([sys.executable, "-c", path + PROGRAM], cwd=folder, capture_output=True, text=True))
    assert (folder / "out" / "timeline.svg").is_file() and (folder / "profile.png").is_file()


def test_dropout_is_seen_in_the_jobs_files(folder: Path) -> None:
    """Without the model's code, rates in its configuration and the adapter's are what can be seen."""
    question = plan_commands.ask(Path("job.toml"), (), Path("profile.toml"))
    assert not plan_commands.uses_dropout(question.loaded, {"attention_dropout": 0.0, "drop_count": 3})
    assert plan_commands.uses_dropout(question.loaded, {"resid_pdrop": 0.1})
    noisy = plan_commands.ask(Path("job.toml"), ("train.neftune_noise_alpha=5",), Path("profile.toml"))
    assert not plan_commands.uses_dropout(noisy.loaded, {}), "noise is drawn by sequence"
