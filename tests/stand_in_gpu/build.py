"""Compiles ``device.cpp`` once per torch build and source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "stand_in_gpu_device"


@cache
def missing() -> str | None:
    """Why the device cannot be built here; None where it can."""
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++) to build the stand-in GPU with"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are missing, which the stand-in GPU is built with"
    return None


@cache
def built() -> Path:
    """The extension module's file; takes half a minute the first time.

    Raises:
        RuntimeError: the compiler refused it; the text is the compiler's.
    """
    import torch

    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sysconfig.get_platform()}".encode()).hexdigest()[
        :16
    ]
    folder = SOURCE.parents[2] / "build" / f"stand_in_gpu-{key}"  # build/ is not tracked
    target = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # test processes run beside each other: one compiles, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    fresh = target.with_name(f"{os.getpid()}.so")
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", str(SOURCE), "-o", str(fresh)]
    command += [f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
    command += [f"-L{path}" for path in library_paths()] + ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"the stand-in GPU does not compile:\n{result.stderr[-4000:]}")
    fresh.rename(target)
