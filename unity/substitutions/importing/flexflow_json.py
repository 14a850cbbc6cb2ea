"""FlexFlow's rule collections: JSON, checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unity.base.errors import RuleError


@dataclass(frozen=True)
class Node:
    """An operator as released: `inputs` are (operator, result), an operator below 0 being an input variable."""

    kind: str
    inputs: tuple[tuple[int, int], ...]
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class Pair:
    """A rule as released: both graphs, and which results correspond: (source operator, result), (target operator, result)."""

    name: str
    source: tuple[Node, ...]
    target: tuple[Node, ...]
    outputs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def read_graphs(text: str) -> tuple[Pair, ...]:
    """All rules of a collection. Raises RuleError that says where the file is truncated, or what a rule lacks."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise RuleError(f"line {problem.lineno}, column {problem.colno}: no JSON: {problem.msg}") from None
    except RecursionError:
        raise RuleError("the file is nested too deeply: is this a FlexFlow rule file?") from None
    rules = _of(content, "rule", list, "the file")
    return tuple(_pair(rule, k) for k, rule in enumerate(rules))


def _of(content: Any, key: str, kind: type, where: str) -> Any:
    """An entry of an object, of the type that it must have."""
    if not isinstance(content, dict) or key not in content:
        raise RuleError(f'{where}: expected an object with "{key}"')
    if not isinstance(content[key], kind) or (kind is int and isinstance(content[key], bool)):
        raise RuleError(f'{where}: "{key}" is {json.dumps(content[key])[:40]}, and must be of type {kind.__name__}')
    return content[key]


def _pair(rule: Any, k: int) -> Pair:
    where = f"rule {k}"
    name = _of(rule, "name", str, where)
    sides = [tuple(_node(x, f"{where} ({name})") for x in _of(rule, key, list, where)) for key in ("srcOp", "dstOp")]
    outputs = []
    for x in _of(rule, "mappedOutput", list, where):
        source, s, target, t = (_of(x, key, int, f"{where} ({name})") for key in ("srcOpId", "srcTsId", "dstOpId", "dstTsId"))
        outputs.append(((source, s), (target, t)))
    if not outputs:
        raise RuleError(f"{where} ({name}) has no outputs")
    return Pair(name, sides[0], sides[1], tuple(outputs))


def _node(x: Any, where: str) -> Node:
    inputs = tuple((_of(i, "opId", int, where), _of(i, "tsId", int, where)) for i in _of(x, "input", list, where))
    parameters = {_of(p, "key", str, where): _of(p, "value", int, where) for p in _of(x, "para", list, where)}
    return Node(_of(x, "type", str, where), inputs, parameters)
