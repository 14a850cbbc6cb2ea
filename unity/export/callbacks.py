"""Calls of Python functions on the host (`jax.pure_callback`), as source: the file imports the function by its module and name."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unity.export.applied import dtype_code
from unity.export.arguments import is_plain, skeleton
from unity.export.errors import ExportError
from unity.export.inner import packed
from unity.export.source import Code, call
from unity.pcg.ir.program import Equation

if TYPE_CHECKING:
    from unity.export.block import Writing


def callback(writing: Writing, e: Equation) -> list[Code]:
    """A call of a user's function: with the same structure of arguments, and results as it is said to give them."""
    function, tree = _called(e)
    if e.params["sharding"] is not None:
        raise ExportError(e.source, e.name, "it names devices (sharding=), which a plan chooses by itself")
    codes = [writing.read(a).code for a in e.operands]
    given, named = jax.tree.unflatten(tree, list(range(len(codes))))
    if not all(map(is_plain, (*given, *named.values()))):
        raise ExportError(e.source, e.name, "its arguments are made of more than dictionaries, lists and tuples")
    tensors = [writing.body.tensors[v] for v in e.results]
    results = packed([call("jax.ShapeDtypeStruct", t.shape, dtype_code(t.dtype)) for t in tensors])
    how = {"vmap_method": e.params["vmap_method"]} if e.params["vmap_method"] is not None else {}
    more = {k: skeleton(v, codes.__getitem__) for k, v in named.items()}
    value = call(
        "jax.pure_callback",
        _named(writing, e, function),
        results,
        *(skeleton(x, codes.__getitem__) for x in given),
        **how,
        **more,
    )
    return writing.block.let(["called_back"] * len(e.results), value)


def _called(e: Equation) -> tuple[Callable[..., Any], Any]:
    """The user's function, and the structure of its arguments, positional and by name."""
    flat = e.params["callback"]
    try:
        return flat.callback_func, flat.in_tree
    except AttributeError:
        raise ExportError(e.source, e.name, f"JAX {jax.__version__} does not say which function it calls") from None


def _named(writing: Writing, e: Equation, function: Any) -> Code:
    """A function as the file names it. Raises ExportError unless its module has it under its name."""
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    if vars(np).get(name) is function:
        return Code(f"np.{name}")
    module = getattr(function, "__module__", None) or ""
    said = f"{module}.{name}" if module and name else repr(function)
    if module == "__main__":
        why = f"the function {said} is in the program that was started; put it in a module, so that the file can import it"
        raise ExportError(e.source, e.name, why)
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError, TypeError, ValueError):
        found = None
    if found is not function:
        why = f"the file cannot import the function {said}; define it by name at the top level of a module"
        raise ExportError(e.source, e.name, why)
    first, _, rest = name.partition(".")
    own = writing.block.module.imported(module, first)
    return Code(f"{own}.{rest}") if rest else own
