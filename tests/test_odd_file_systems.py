"""File systems that lack what most can do: a library laid under a real process fails one system call of it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static int failing(const char *call) {
    return !strcmp(getenv("SHIM_CALL"), call) || !strcmp(getenv("SHIM_CALL"), "all");
}
static int fail(void) { errno = atoi(getenv("SHIM_ERRNO")); return -1; }
#define REAL(name) ((int (*)())dlsym(RTLD_NEXT, name))
int flock(int fd, int operation) { return failing("flock") ? fail() : REAL("flock")(fd, operation); }
int link(const char *a, const char *b) { return failing("link") ? fail() : REAL("link")(a, b); }
int symlink(const char *a, const char *b) { return failing("symlink") ? fail() : REAL("symlink")(a, b); }
int rename(const char *a, const char *b) {
    return failing("rename over") && !access(b, F_OK) ? fail() : REAL("rename")(a, b);
}
int fsync(int fd) {
    struct stat found;
    return failing("fsync directory") && !fstat(fd, &found) && S_ISDIR(found.st_mode) ? fail() : REAL("fsync")(fd);
}
"""
ABILITIES = [
    ("flock", errno.ENOLCK), ("flock", errno.ENOSYS), ("flock", errno.EOPNOTSUPP),
    ("fsync directory", errno.EINVAL), ("rename over", errno.EEXIST), ("link", errno.EPERM), ("symlink", errno.EPERM),
]  # fmt: skip
JOB = """\
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[tokenizer]
train_vocab_size = 260
[data]
text = ["text.txt"]
sequence_length = 8
[train]
steps = 4
global_batch = 2
[checkpoint]
every = 1
keep = 2
[profile]
repeats = 1
"""
RUN = "from hetero_mpi.cli import main; import sys; sys.exit(main(['train', 'job.toml', *sys.argv[1:]]))"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a library under a process needs Linux and a C compiler")
    directory = tmp_path_factory.mktemp("shim")
    (directory / "shim.c").write_text(SHIM)
    command = [compiler, "-w", "-shared", "-fPIC", "-o", str(directory / "shim.so"), str(directory / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return directory / "shim.so"


@pytest.mark.parametrize(
    ("call", "number"), [("all", errno.ENOLCK), *(pytest.param(*one, marks=pytest.mark.long) for one in ABILITIES)]
)
def test_a_run_goes_on_and_resumes_without_an_ability(tmp_path: Path, shim: Path, call: str, number: int) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "SHIM_CALL": call, "SHIM_ERRNO": str(number)}
    for more in ([], ["--resume", "--set", "train.steps=6"], []):
        answer = subprocess.run(
            [sys.executable, "-c", RUN, *more],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert ("does not support file locking" in answer.stdout) == (call in ("flock", "all")), answer.stdout
    run = tmp_path / "runs" / "job"
    assert (run / "model" / "model.safetensors").is_file() and (run / "set-aside-1" / "model").is_dir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 4
    assert not [path for path in run.rglob(".*") if path.name != ".lock"]
