"""The imports of an exported file: what its text needs, in the order in which linters want them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from unity.export.module import Module
from unity.export.primitives import CHECKPOINT_NAME, LAID_OUT, LAYOUT
from unity.export.random import PRIMITIVES_BY_NAME
from unity.pcg.types.varying_axes import CAST

JAX = [
    "import jax",
    "import jax.numpy as jnp",
    "import numpy as np",
    "from jax import lax",
    "from jax.sharding import AxisType, Mesh, NamedSharding",
    "from jax.sharding import PartitionSpec as P",
]


def imports(module: Module) -> tuple[list[str], list[str]]:
    """The lines for Python's own modules, and those for all others."""
    text = "\n".join(line for f in module.functions for line in f)
    own = list(_of_users(module))
    of_python = [line for line in own if _module(line).partition(".")[0] in sys.stdlib_module_names]
    standard = ["import re", *(["from functools import partial"] if "partial(" in text else []), *of_python]
    standard += ["from pathlib import Path"] if module.arrays else []
    others = [*JAX, *(line for line in own if line not in of_python)]
    bound = re.search(rf"\b{PRIMITIVES_BY_NAME}\.\w+_p\.bind\(", text)
    others += [f"from jax.ad_checkpoint import {CHECKPOINT_NAME}"] if f"{CHECKPOINT_NAME}(" in text else []
    others += [f"from jax.experimental.layout import {LAYOUT}, {LAID_OUT}"] if f"{LAID_OUT}(" in text else []
    cast = f"{CAST}.bind(" in text
    core = [*(["Primitive"] if cast else []), *([PRIMITIVES_BY_NAME] if bound else [])]
    others += [f"from jax.extend.core import {', '.join(core)}"] if core else []
    others += ["from jax.interpreters import mlir"] if cast else []
    return _in_order(standard), _in_order(others)


def _of_users(module: Module) -> Iterable[str]:
    """One line for each module of the user's, and one for each function that is called otherwise here."""
    plain: dict[str, list[str]] = {}
    for (where, name), here in module.imports.items():
        if name == here:
            plain.setdefault(where, []).append(name)
    for where, names in plain.items():
        yield f"from {where} import {', '.join(sorted(names, key=_by_kind))}"
    yield from (f"from {where} import {name} as {here}" for (where, name), here in module.imports.items() if name != here)


def _by_kind(name: str) -> tuple[int, str]:
    """Constants first, then classes, then all others."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _in_order(lines: list[str]) -> list[str]:
    return sorted(lines, key=lambda line: (line.startswith("from"), _module(line).lower()))


def _module(line: str) -> str:
    return line.split()[1]
