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
BESIDE = {  # imported by a package that does not require them, or not in the version that it can import
    "maxtext": ("pathwaysutils", "fastapi", "drjax", "tiktoken"),
    "gemma": ("sentencepiece==0.2.0",),
}
APART = ("gemma",)  # in an environment of its own, as it needs older packages than others
VARIABLES = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def environments(packages: Sequence[str]) -> tuple[Mapping[str, Path], dict[str, str]]:
    """Create the environments of some packages, or reuse them, and install what they lack.

    Returns:
        the interpreter of each package, and the installer's reason for each package that cannot be installed.
    """
    together = [package for package in packages if package not in APART]
    python, problems = environment(together)
    interpreters = dict.fromkeys(together, python)
    for package in packages:
        if package in APART:
            interpreters[package], problem = environment([package], f"-{package}")
            problems |= problem
    return interpreters, problems


def environment(packages: Sequence[str], suffix: str = "") -> tuple[Path, dict[str, str]]:
    """Create an environment, or reuse it, and install what it lacks.

    Args:
        packages: the packages that it has beside unity's own.
        suffix: the end of its folder's name.

    Returns:
        its interpreter, and the installer's reason for each package that cannot be installed.
    """
    if sys.version_info < REQUIRES:
        raise SystemExit(f"the zoo needs Python {REQUIRES[0]}.{REQUIRES[1]} or newer, not {sys.version.split()[0]}")
    folder = Path(f"{os.environ.get('ZOO_ENVIRONMENT') or platformdirs.user_cache_path('unity') / 'zoo'}{suffix}")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    installed = _installed(python)
    if "uv" not in installed:
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv"], check=True)
    if absent := [package for package in OWN if package not in installed]:
        if problem := _install(python, *absent):
            raise SystemExit(f"unity's own packages cannot be installed into {folder}: {problem}")
        installed = _installed(python)
    same_jax = [f"{package}=={installed[package]}" for package in ("jax", "jaxlib")]
    problems = {}
    for package in packages:
        if package not in installed:
            beside = BESIDE.get(package, ())
            problems[package] = _install(python, package, *beside, *(["--no-deps"] if package in ALONE else same_jax))
    return python, {package: problem for package, problem in problems.items() if problem}


def _install(python: Path, *arguments: str) -> str:
    """Install packages with uv, which resolves in seconds what pip does in minutes. Return its first error, or an empty text."""
    command = [python, "-m", "uv", "pip", "install", "-q", "--python", python, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line.strip() for line in run.stderr.splitlines() if line.startswith(("error:", "  ╰─▶ "))]
    return (errors or [f"uv's exit code is {run.returncode}"])[0] if run.returncode else ""


def _installed(python: Path) -> Mapping[str, str]:
    """Return the versions of the installed packages by their names in lower case, with hyphens."""
    command = [python, "-m", "pip", "list", "--format=json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return {package["name"].lower().replace("_", "-"): package["version"] for package in json.loads(listed.stdout)}


def versions(interpreters: Mapping[str, Path]) -> dict[str, str | None]:
    """Return the versions of packages by the interpreters that have them, None for those that are not installed."""
    installed = {python: _installed(python) for python in set(interpreters.values())}
    return {package: installed[python].get(package) for package, python in interpreters.items()}
