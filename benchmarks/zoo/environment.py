"""The Python environment of the zoo: packages from PyPI beside JAX, in a folder of the user's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import platformdirs

REQUIRES = (3, 12)  # of several packages
OWN = ("jax", "flax", "kagglehub", "optax", "equinox", "msgspec", "networkx", "numba", "platformdirs", "rich", "scipy", "z3-solver")
ALONE = ("keras-hub",)  # its dependencies include TensorFlow, which only its tokenizers need
VARIABLES = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def environment(packages: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Create the environment, or reuse it, and install the packages.

    Returns:
        its interpreter, and the last line of pip's errors for each package that cannot be installed.
    """
    if sys.version_info < REQUIRES:
        raise SystemExit(f"the zoo needs Python {REQUIRES[0]}.{REQUIRES[1]} or newer, not {sys.version.split()[0]}")
    folder = Path(os.environ.get("ZOO_ENVIRONMENT") or platformdirs.user_cache_path("unity") / "zoo")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        _install(python, *OWN, check=True)
    problems = {package: _install(python, package) for package in packages if package not in _installed(python)}
    return python, {package: problem for package, problem in problems.items() if problem}


def _install(python: Path, *packages: str, check: bool = False) -> str:
    """Install packages without changing the version of JAX, and return the last line of pip's errors."""
    jax = _installed(python).get("jax")
    kept = [f"jax=={jax}", f"jaxlib=={jax}"] if jax else []
    alone = ["--no-deps"] if set(packages) & set(ALONE) else kept
    command = [python, "-m", "pip", "install", "-q", *packages, *alone]
    run = subprocess.run(command, capture_output=True, text=True, check=check)
    return (run.stderr.strip().splitlines() or ["pip failed"])[-1] if run.returncode else ""


def _installed(python: Path) -> Mapping[str, str]:
    """Return the versions of the installed packages by their names in lower case, with hyphens."""
    command = [python, "-m", "pip", "list", "--format=json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return {package["name"].lower().replace("_", "-"): package["version"] for package in json.loads(listed.stdout)}


def versions(python: Path, packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of some packages, None for those that are not installed."""
    installed = _installed(python)
    return {package: installed.get(package) for package in packages}
