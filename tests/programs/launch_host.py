"""A host's login, for machines that are namespaces of this one: what sshd and ssh are to real ones.

    launch_host.py serve RACK NAME      in the host: runs the commands that come over RACK/NAME.socket
    launch_host.py run RACK NAME CMD    anywhere: runs CMD there with this process's stdin, stdout and stderr

While the file RACK/NAME.dark exists the host cannot be reached: ``run`` hangs, as ssh does without an answer.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def serve(rack: Path, name: str) -> None:
    socket.sethostname(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(rack / f"{name}.socket"))
    listener.listen(16)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_run_one, args=(connection,), daemon=True).start()


def _run_one(connection: socket.socket) -> None:
    with connection:
        command, descriptors, _, _ = socket.recv_fds(connection, 65536, 3)
        stdin, stdout, stderr = descriptors
        words = ["bash", "-c", command.decode()]
        process = subprocess.Popen(words, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(bytes([process.wait() % 256]))


def run(rack: Path, name: str, command: str) -> int:
    def wait_while_dark() -> None:
        while (rack / f"{name}.dark").exists():
            time.sleep(0.1)

    wait_while_dark()
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(rack / f"{name}.socket"))
        socket.send_fds(connection, [command.encode()], [0, 1, 2])
        answer = connection.recv(1)
    except OSError:
        answer = b""
    wait_while_dark()
    return answer[0] if answer else 255


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), sys.argv[3])
    sys.exit(run(Path(sys.argv[2]), sys.argv[3], " ".join(sys.argv[4:])))
