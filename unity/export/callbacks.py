"""Source of calls of Python functions on the host (`jax.pure_callback`), whose file imports the function from its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unity.base.errors import ExportError
from unity.export.arguments import is_plain, tree_literal
from unity.export.body_writer import BodyWriter
from unity.export.primitives.primitive_call import dtype_code
from unity.export.source_code import Code, call, packed
from unity.pcg.ir.program import Equation


def pure_callback(writer: BodyWriter, e: Equation) -> list[Code]:
    """Write a call of a user's function with the structure of arguments and results that it declares.

    Raises:
        ExportError: the file cannot import the function, or the call cannot be written.
    """
    function, tree = _function_and_tree(e)
    if e.params["sharding"] is not None:
        raise ExportError(e.source, e.name, "it names devices (sharding=), which a plan chooses by itself")
    codes = [writer.read(a).code for a in e.operands]
    positional, by_name = jax.tree.unflatten(tree, list(range(len(codes))))
    if not all(map(is_plain, (*positional, *by_name.values()))):
        raise ExportError(e.source, e.name, "its arguments are made of more than dictionaries, lists and tuples")
    tensors = [writer.body.tensors[v] for v in e.results]
    results = packed([call("jax.ShapeDtypeStruct", t.shape, dtype_code(t.dtype)) for t in tensors])
    options = {"vmap_method": e.params["vmap_method"]} if e.params["vmap_method"] is not None else {}
    keywords = {k: tree_literal(v, codes.__getitem__) for k, v in by_name.items()}
    value = call(
        "jax.pure_callback",
        _function_name(writer, e, function),
        results,
        *(tree_literal(x, codes.__getitem__) for x in positional),
        **options,
        **keywords,
    )
    return writer.block.let(["called_back"] * len(e.results), value)


def _function_and_tree(e: Equation) -> tuple[Callable[..., Any], Any]:
    """Return the user's function, and the structure of its positional and keyword arguments."""
    flat = e.params["callback"]
    try:
        return flat.callback_func, flat.in_tree
    except AttributeError:
        raise ExportError(e.source, e.name, f"JAX {jax.__version__} does not say which function it calls") from None


def _function_name(writer: BodyWriter, e: Equation, function: Any) -> Code:
    """Return a function as the file names it.

    Raises:
        ExportError: the function's module does not have it under its name.
    """
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    if vars(np).get(name) is function:
        return Code(f"np.{name}")
    if (imported := writer.block.module.imported(function)) is not None:
        return imported
    module = getattr(function, "__module__", None)
    described = f"{module}.{name}" if module and name else repr(function)
    if module == "__main__":
        why = f"the function {described} is in the program that was started; put it in a module, so that the file can import it"
    else:
        why = f"the file cannot import the function {described}; define it by name at the top level of a module"
    raise ExportError(e.source, e.name, why)
