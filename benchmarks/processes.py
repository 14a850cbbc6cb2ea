"""Several processes of virtual CPU devices on this machine, joined as JAX's runtime joins hosts: over the network, here loopback.

A program is told by its last three arguments where to meet: `join` reads them.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

ROOT = Path(__file__).parent.parent
JOINING = 60  # seconds that processes wait for each other at the start
SAYING = 2  # seconds that a process has to say where it is


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


def start(command: Sequence[str], devices: Sequence[int], cache: Path) -> list[subprocess.Popen[str]]:
    """Starts a Python program once for each number of devices; together they are one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    flags = os.environ.get("XLA_FLAGS", "")
    return [
        subprocess.Popen(
            [sys.executable, *command, address, str(len(devices)), str(process)],
            env=environment | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip()},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cache,
        )
        for process, count in enumerate(devices)
    ]  # fmt: skip


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[Ended]:
    """Waits for all. What is still there after so many seconds says where it is, in all of its threads, and is killed."""
    until, found = time.monotonic() + seconds, list[Ended]()
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            time.sleep(SAYING)
            process.kill()
            out, err = process.communicate()
            err += f"\nkilled after {seconds} seconds"
        found.append(Ended(process.returncode, out, err))
    return found


def join(heartbeat: int = 100) -> None:
    """Joins the other processes, as a user's program does with `jax.distributed.initialize`. One alone joins nobody."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    address, processes, process = sys.argv[-3:]
    if int(processes) > 1:
        jax.distributed.initialize(
            address, int(processes), int(process), initialization_timeout=JOINING, heartbeat_timeout_seconds=heartbeat
        )
