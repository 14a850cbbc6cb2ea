"""Random programs in which something can be rewritten: sides of the library's rules, at small shapes, one after the other.

What a side reads is an argument of its own, or a value that was made before it, through a function or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.rule import Rule
from unity.substitutions.language.term import Term, Variable
from unity.substitutions.language.typecheck import TensorType, concrete, typecheck
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.small_instances import SmallInstance, small_instances

SIZES, INSTANCES = (2, 4), 6  # dimensions of a rule's operands, and how many of its small instances are drawn from
EARLIER = 0.6  # how often an operand is an earlier value, where there is one of its shape
BETWEEN: tuple[Callable[[Any], Any], ...] = (lambda x: x, jnp.tanh, jnp.negative)


def computed(terms: Sequence[Term], types: Mapping[str, TensorType]) -> Callable[..., list[Any]]:
    """The function of arrays that terms say, each operator by the vocabulary's own; `types` of the variables, in their order."""
    names, checked = list(types), typecheck(terms, types)

    def run(*arrays: Any) -> list[Any]:
        values: dict[Any, Any] = {Variable(name): [x] for name, x in zip(names, arrays, strict=True)}

        def of(term: Term) -> Any:
            if isinstance(term, Variable):
                return values[term][0]
            if term.node not in values:
                operator = VOCABULARY[term.operator]
                given = concrete(operator, term.attributes, [checked[x] for x in term.operands])
                more = {"at": given[-1]} if term.operator == "split" else {}
                made = operator.run(*given[: len(operator.attributes)], *map(of, term.operands), **more)
                values[term.node] = made if isinstance(made, list) else [made]
            return values[term.node][term.result]

        return [of(t) for t in terms]

    return run


@dataclass(frozen=True)
class Part:
    """One side of a rule. What it reads is an argument or an earlier value, by number, through a function."""

    run: Callable[..., list[Any]]
    reads: tuple[tuple[int, Callable[[Any], Any]], ...]


@dataclass(frozen=True)
class Program:
    """Values are arguments and results of the parts, numbered as they come."""

    parts: tuple[tuple[Part, int], ...]  # and how many values there are before it
    arguments: tuple[np.ndarray, ...]

    def __call__(self, *arguments: Any) -> list[Any]:
        """The values that nothing else is made of."""
        values, waiting = [], list(arguments)
        for part, before in self.parts:
            while len(values) < before:
                values.append(waiting.pop(0))
            values += part.run(*(between(values[k]) for k, between in part.reads))
        read = {k for part, _ in self.parts for k, _ in part.reads}
        return [x for k, x in enumerate(values) if k not in read]


@cache
def instances(rule: Rule) -> list[SmallInstance]:
    return small_instances(rule, (), SIZES, INSTANCES)


def program(rng: random.Random, parts: int) -> Program:
    rules = [rule for rule in default_library().rules if not rule.parallel]
    shapes: list[tuple[tuple[int, ...], str]] = []
    made, arguments = [], []
    while len(made) < parts:
        if not (known := instances(rng.choice(rules))):
            continue
        instance = rng.choice(known)
        terms = rng.choice([instance.rule.left, instance.rule.right])
        reads = []
        for kind in instance.types.values():
            alike = [k for k, shape in enumerate(shapes) if shape == (kind.shape, kind.dtype)]
            if kind.dtype != "int32" and alike and rng.random() < 0.6:
                reads.append((rng.choice(alike), rng.choice(BETWEEN)))
                continue
            drawn = np.random.default_rng(rng.randrange(2**32))
            whole = kind.dtype == "int32"
            arguments.append(drawn.integers(0, 2, kind.shape).astype("int32") if whole else drawn.normal(size=kind.shape))
            reads.append((len(shapes), BETWEEN[0]))
            shapes.append((kind.shape, kind.dtype))
        run = computed(terms, instance.types)
        made.append((Part(run, tuple(reads)), len(shapes)))
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in instance.types.values()]
        shapes += [(x.shape, str(x.dtype)) for x in jax.eval_shape(run, *structs)]
    return Program(tuple(made), tuple(arguments))
