"""Starts a script as several processes on this machine, as a cluster starts it on several hosts."""

import socket
import subprocess
import sys


def together(arguments: list[str], processes: int) -> None:
    """Runs this script again as so many processes, and waits for them. The first one's output is shown."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, sys.argv[0], *arguments, "--coordinator", address, "--processes", str(processes), "--process", str(k)],
            stdout=None if k == 0 else subprocess.DEVNULL,
        )
        for k in range(processes)
    ]
    if any([process.wait() for process in started]):
        sys.exit("a process failed")
