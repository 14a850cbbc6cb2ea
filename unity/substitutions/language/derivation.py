"""Derivations as data: which rule was applied where, step by step, from a captured program to the one that is planned.

A step names values by their normal form (`unity.verify.derivations.canonical_form`), not by a numbering, so that whoever replays it
needs nothing of who found it. Files hold steps as JSON; reading one runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unity.base.errors import PlanError
from unity.substitutions.language.rearrangement import Rearrangement
from unity.substitutions.language.term import Attribute


@dataclass(frozen=True)
class Seen:
    """A value of a program, named by its normal form, seen through a rearrangement."""

    value: str
    view: Rearrangement

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        v = self.view
        shapes = [list(v.source), list(v.sizes), list(v.permutation), list(v.target)]
        return {"value": self.value, "view": shapes}


@dataclass(frozen=True)
class RewriteStep:
    """A rule of the library, applied once. `backward`: what is found is its right side.

    `tensors` and `attributes` say what its variables stand for; `roots` what its outputs are, in order. `manners` has for
    operators whose equations say more than the vocabulary does (a precision) what those say. `cuts` has where tensor variables are
    split, if not in the middle: (dimension from the end, size of the first part).
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
        """As a JSON object."""
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
        """What `to_json` gave. Raises PlanError if it is something else."""
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
    """The steps from one program to another. First come those inside: programs of scans and remats, each named by its content."""

    steps: tuple[RewriteStep, ...] = ()
    inside: Mapping[str, Inside] = field(default_factory=dict)

    @property
    def every(self) -> tuple[RewriteStep, ...]:
        """All steps, those inside first."""
        return (*(step for one in self.inside.values() for step in one.derivation.every), *self.steps)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        inside = {key: {"to": one.to, **one.derivation.to_json()} for key, one in self.inside.items()}
        return {"steps": [step.to_json() for step in self.steps], "inside": inside}

    @classmethod
    def from_json(cls, data: Any) -> Derivation:
        """What `to_json` gave. Raises PlanError if it is something else."""
        if not (isinstance(data, dict) and isinstance(data.get("steps"), list) and isinstance(data.get("inside"), dict)):
            raise PlanError("it has no derivation, or a damaged one")
        inside = {str(key): Inside.from_json(one) for key, one in data["inside"].items()}
        return cls(tuple(map(RewriteStep.from_json, data["steps"])), inside)


@dataclass(frozen=True)
class Inside:
    """What a program inside of another becomes, named by its content, and how."""

    to: str
    derivation: Derivation

    @classmethod
    def from_json(cls, data: Any) -> Inside:
        """An entry of `Derivation.to_json`. Raises PlanError if it is something else."""
        derivation = Derivation.from_json(data)
        return cls(str(data.get("to")), derivation)


def _seen(data: Any) -> Seen:
    source, sizes, permutation, target = (tuple(int(n) for n in part) for part in data["view"])
    return Seen(str(data["value"]), Rearrangement(source, sizes, permutation, target))
