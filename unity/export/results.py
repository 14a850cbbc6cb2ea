"""The results of an exported function: an expression of their structure, whose classes the file imports by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax

from unity.base.errors import ExportError
from unity.base.formatting import with_article
from unity.export.module import ModuleWriter
from unity.export.source_code import Code, call, literal, mapping, sequence


@dataclass(frozen=True)
class _Leaf:
    number: int


def results_code(module: ModuleWriter, structure: Any, leaves: Sequence[Code]) -> Code:
    """Return the results of a function as an expression of their leaves.

    Raises:
        ExportError: neither a literal nor a constructor of a class of some module gives a part of the results. The message has
            the path of the part.
    """
    placeholders = jax.tree.unflatten(structure, [_Leaf(k) for k in range(structure.num_leaves)])

    def written(part: Any, path: str) -> Code:
        if isinstance(part, _Leaf):
            return leaves[part.number]
        if part is None or type(part) in (bool, int, float, str):  # of a dataclass, a field that is no array
            return literal(part)
        if type(part) is dict and all(isinstance(k, (str, int)) for k in part):
            return mapping([(literal(k).text, written(v, f"{path}[{k!r}]")) for k, v in part.items()])
        if type(part) in (list, tuple):
            items = [written(v, f"{path}[{k}]") for k, v in enumerate(part)]
            return sequence(items, "[]" if type(part) is list else "()")
        constructor = module.imported(type(part)) if _is_made_of_its_fields(part) else None
        if constructor is None:
            kind = with_article(type(part).__name__)
            advice = (
                "return dictionaries, lists, tuples, or named tuples and dataclasses at the top level of a module that the file can"
                " import, whose other fields are numbers and texts"
            )
            raise ExportError("", f"{path}, {kind},", advice)
        return call(constructor.text, **{name: written(v, f"{path}.{name}") for name, v in _fields_of(part)})

    return written(placeholders, "result")


def _fields_of(part: Any) -> Iterable[tuple[str, Any]]:
    """Return the fields of a named tuple or a dataclass by name."""
    if isinstance(part, tuple):
        return zip(getattr(part, "_fields", ()), part, strict=False)
    return [(f.name, getattr(part, f.name)) for f in fields(part) if f.init] if is_dataclass(part) else []


def _is_made_of_its_fields(part: Any) -> bool:
    """Return whether the class of a value gives an equal tree if it is called with the value's fields."""
    try:
        again = type(part)(**dict(_fields_of(part)))
        return jax.tree.flatten(again) == jax.tree.flatten(part)
    except Exception:  # a constructor that is the user's own may raise anything on placeholders
        return False
