"""What the launcher is given in files. The relay script: a launch agent for hosts on which MPI is installed in different places.

Launchers start their daemon on every host by the path it has here, and take one prefix for all hosts. So a small shell script
between the launcher and ssh puts each host's own prefix into the command. The script is kept in the cache directory under a name
made of its content, so that people can read it and a command line printed earlier still finds it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_mpi.disk import atomic_write, cache_folder, writing

_SCRIPT = """#!/bin/sh
# AGENT [OPTIONS] HOST COMMAND...: runs a launcher's command on HOST, with the place where MPI is installed there.
# Written by `hetero_mpi launch --hosts`; may be deleted while no job is being started.
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1; shift
case "$host" in
{cases}
  *) there= ;;
esac
command=$*
if [ -n "$there" ]; then
  # The prefix ends where a path goes on, or where the word ends.
  command=$(printf '%s\\n' "$command " | sed -e {here}"$there"{rest})
fi
exec {agent} "$host" "$command"
"""


def relay_script(agent: Sequence[str], prefix: str, prefixes: Mapping[str, str]) -> str:
    """The text of the script. ``prefix``: where MPI is installed here; ``prefixes``: host, as the launcher names it -> there."""
    # As sed takes them between ``#``: a replacement, a basic regular expression.
    replacements = {host: re.sub(r"[\\&#]", r"\\\g<0>", there) for host, there in prefixes.items()}
    pattern = re.sub(r"[\\.\[\]*^$#]", r"\\\g<0>", prefix)
    cases = "\n".join(f"  {shlex.quote(host)}) there={shlex.quote(to)} ;;" for host, to in replacements.items())
    return _SCRIPT.format(
        cases=cases,
        here=shlex.quote(f"s#{pattern}" + r'\([/:;" ]\)#'),
        rest=shlex.quote(r"\1#g"),
        agent=shlex.join(agent),
    )


def write_relay(script: str) -> Path:
    """Write the script into the cache directory; returns its path. Raises UserError: the cache directory cannot be written."""
    return write_cached("launch-agent", ".sh", script, "for the launch agent of hosts with different MPI prefixes")


def write_cached(name: str, ending: str, text: str, purpose: str) -> Path:
    """Write a program or file for the launcher into the cache directory, under a name made of its content; returns its path.

    :raises UserError: the cache directory cannot be written.
    """
    folder = cache_folder()
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}{ending}"
    with writing(folder, f"set XDG_CACHE_HOME to a directory that you can write to, {purpose}"):
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")
            draft.chmod(0o755)
    return path
