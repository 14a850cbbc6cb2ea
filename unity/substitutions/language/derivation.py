"""Derivations as data: the rules that were applied, step by step, from a captured program to the one that is planned.

A step refers to values by the hashes of their canonical forms (`unity.verify.derivations.canonical_form`), not by numbers, so that
it can be replayed without the code that recorded it. Plan files contain steps as JSON; reading one runs no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unity.base.errors import PlanError
from unity.substitutions.language.rearrangement import Rearrangement
from unity.substitutions.language.term import Attribute


@dataclass(frozen=True)
class Seen:
    """A value of a program, named by its canonical form, viewed through a rearrangement."""

    value: str
    view: Rearrangement

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        v = self.view
        shapes = [list(v.source), list(v.sizes), list(v.permutation), list(v.target)]
        return {"value": self.value, "view": shapes}


@dataclass(frozen=True)
class RewriteStep:
    """One application of a rule of the library.

    Attributes:
        rule: the rule's name.
        hash: the hash of the rule's text.
        backward: whether the rule's right side was replaced by its left side.
        tensors: the value of each tensor variable.
        roots: the values of the rule's outputs, in order.
        attributes: the value of each attribute variable.
        manners: parameters of operators' equations beyond the vocabulary, such as a precision, by operator.
        cuts: for tensor variables that are not split in the middle, pairs (dimension from the end, size of the first part).
    """

    rule: str
    hash: str
    backward: bool
    tensors: Mapping[str, Seen]
    roots: tuple[Seen, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    manners: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "rule": self.rule,
            "hash": self.hash,
            "backward": self.backward,
            "tensors": {k: x.to_json() for k, x in self.tensors.items()},
            "roots": [x.to_json() for x in self.roots],
            "attributes": dict(self.attributes),
            "manners": dict(self.manners),
            "cuts": {k: [list(c) for c in cuts] for k, cuts in self.cuts.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> RewriteStep:
        """Return the step that `to_json` wrote. Raises PlanError for any other data."""
        try:
            return cls(
                str(data["rule"]),
                str(data["hash"]),
                bool(data["backward"]),
                {str(k): _seen(x) for k, x in data["tensors"].items()},
                tuple(_seen(x) for x in data["roots"]),
                {str(k): v if isinstance(v, int) else str(v) for k, v in data["attributes"].items()},
                {str(k): str(v) for k, v in data["manners"].items()},
                {str(k): tuple((int(d), int(n)) for d, n in cuts) for k, cuts in data["cuts"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
            raise PlanError(f"a step of the derivation is damaged: {type(problem).__name__}: {problem}") from None


@dataclass(frozen=True)
class Derivation:
    """The steps from one program to another.

    The derivations of nested programs (of scans and remats), by the hashes of their content, precede the steps.
    """

    steps: tuple[RewriteStep, ...] = ()
    inside: Mapping[str, Inside] = field(default_factory=dict)

    @property
    def every(self) -> tuple[RewriteStep, ...]:
        """All steps, those of nested programs first."""
        return (*(step for nested in self.inside.values() for step in nested.derivation.every), *self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        inside = {key: {"to": nested.to, **nested.derivation.to_json()} for key, nested in self.inside.items()}
        return {"steps": [step.to_json() for step in self.steps], "inside": inside}

    @classmethod
    def from_json(cls, data: Any) -> Derivation:
        """Return the derivation that `to_json` wrote. Raises PlanError for any other data."""
        if not (isinstance(data, dict) and isinstance(data.get("steps"), list) and isinstance(data.get("inside"), dict)):
            raise PlanError("it has no derivation, or a damaged one")
        inside = {str(key): Inside.from_json(nested) for key, nested in data["inside"].items()}
        return cls(tuple(map(RewriteStep.from_json, data["steps"])), inside)


@dataclass(frozen=True)
class Inside:
    """The derivation of a nested program, and the hash of the program's content after it."""

    to: str
    derivation: Derivation

    @classmethod
    def from_json(cls, data: Any) -> Inside:
        """Return an entry of a derivation that `Derivation.to_json` wrote. Raises PlanError for any other data."""
        derivation = Derivation.from_json(data)
        return cls(str(data.get("to")), derivation)


def _seen(data: Any) -> Seen:
    source, sizes, permutation, target = (tuple(int(n) for n in part) for part in data["view"])
    return Seen(str(data["value"]), Rearrangement(source, sizes, permutation, target))
