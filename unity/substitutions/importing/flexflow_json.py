"""The file format of FlexFlow's rules: JSON, checked while it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unity.base.errors import RuleError

ACTIVATIONS = {0: None, 1: "sigmoid", 2: "relu", 3: "tanh"}  # by the parameter PM_ACTI


@dataclass(frozen=True)
class FlexFlowOperator:
    """A released operator. `inputs` are (operator, result); a negative operator is an input variable."""

    kind: str
    inputs: tuple[tuple[int, int], ...]
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class FlexFlowRule:
    """A released rule: two graphs, and the corresponding outputs as ((source operator, result), (target operator, result))."""

    name: str
    source: tuple[FlexFlowOperator, ...]
    target: tuple[FlexFlowOperator, ...]
    outputs: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


def read_rules(text: str) -> tuple[FlexFlowRule, ...]:
    """Read all rules of a file. Raises RuleError, naming the place where it is not JSON, or the entry that a rule lacks."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise RuleError(f"line {problem.lineno}, column {problem.colno}: not JSON: {problem.msg}") from None
    except RecursionError:
        raise RuleError("the file is nested too deeply: is this a FlexFlow rule file?") from None
    rules = _entry(content, "rule", list, "the file")
    return tuple(_rule(rule, k) for k, rule in enumerate(rules))


def _entry(content: Any, key: str, kind: type, where: str) -> Any:
    """Return an entry of an object, checked to be of a type."""
    if not isinstance(content, dict) or key not in content:
        raise RuleError(f'{where}: expected an object with "{key}"')
    if not isinstance(content[key], kind) or (kind is int and isinstance(content[key], bool)):
        raise RuleError(f'{where}: "{key}" is {json.dumps(content[key])[:40]}, expected a value of type {kind.__name__}')
    return content[key]


def _rule(rule: Any, k: int) -> FlexFlowRule:
    where = f"rule {k}"
    name = _entry(rule, "name", str, where)
    sides = [tuple(_operator(x, f"{where} ({name})") for x in _entry(rule, key, list, where)) for key in ("srcOp", "dstOp")]
    outputs = []
    for x in _entry(rule, "mappedOutput", list, where):
        source, s, target, t = (_entry(x, key, int, f"{where} ({name})") for key in ("srcOpId", "srcTsId", "dstOpId", "dstTsId"))
        outputs.append(((source, s), (target, t)))
    if not outputs:
        raise RuleError(f"{where} ({name}) has no outputs")
    return FlexFlowRule(name, sides[0], sides[1], tuple(outputs))


def _operator(x: Any, where: str) -> FlexFlowOperator:
    inputs = tuple((_entry(i, "opId", int, where), _entry(i, "tsId", int, where)) for i in _entry(x, "input", list, where))
    parameters = {_entry(p, "key", str, where): _entry(p, "value", int, where) for p in _entry(x, "para", list, where)}
    return FlexFlowOperator(_entry(x, "type", str, where), inputs, parameters)
