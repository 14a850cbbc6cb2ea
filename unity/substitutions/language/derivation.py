"""Derivations as data: the rules that were applied, step by step, from a captured program to the one that is planned.

A step refers to values by the hashes of their canonical forms (`unity.verify.derivations.canonical_form`), not by numbers, so that
it can be replayed without the code that recorded it. Plan files contain steps as JSON; reading one runs no code.
"""

from __future__ import annotations

from collections.abc import Mapping

from unity.base.documents import Record
from unity.substitutions.language.rearrangement import Rearrangement
from unity.substitutions.language.term import Attribute


class ValueReference(Record):
    """A reference to a value of a program: the hash of a canonical node, and the rearrangement through which it is viewed."""

    value: str
    view: Rearrangement


class RewriteStep(Record):
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
    tensors: Mapping[str, ValueReference]
    roots: tuple[ValueReference, ...]
    attributes: Mapping[str, Attribute] = {}
    manners: Mapping[str, str] = {}
    cuts: Mapping[str, tuple[tuple[int, int], ...]] = {}


class Derivation(Record):
    """The steps from one program to another.

    Attributes:
        steps: the steps in order, applied after those of nested programs.
        inside: the derivations of nested programs (of scans and remats), by the hash of a program's content before them.
    """

    steps: tuple[RewriteStep, ...] = ()
    inside: Mapping[str, NestedDerivation] = {}

    @property
    def every(self) -> tuple[RewriteStep, ...]:
        """All steps, those of nested programs first."""
        return (*(step for nested in self.inside.values() for step in nested.derivation.every), *self.steps)


class NestedDerivation(Record):
    """The derivation of a nested program, and the hash of the program's content after it (`to`)."""

    to: str
    derivation: Derivation
