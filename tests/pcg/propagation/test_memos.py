"""What propagation remembers of a body never changes its choices: they equal those computed without any memo."""

from dataclasses import fields, replace

import jax
import pytest
from wide_networks import WideNetwork

from unity.pcg.ir.program import close
from unity.pcg.propagation import propagation, solver
from unity.pcg.propagation.choice import Choice
from unity.pcg.propagation.choices import choices, choices_with_moves
from unity.pcg.types.parallel_type import partitioned

SEEDS = ((0, partitioned(0, 2)), (1, partitioned(1, 4)))


class Forgetful(dict):
    """A memo that remembers nothing."""

    def setdefault(self, key, default=None):
        return default


def described(every: tuple[Choice, ...]):
    return [tuple(getattr(c, field.name) for field in fields(c)) for c in every]


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6, 7])
def test_choices_with_memos_are_those_without(seed, monkeypatch):
    network = WideNetwork(seed)
    body = close(jax.make_jaxpr(network)(*network.arguments))
    remembered = described(choices(body)), described(choices_with_moves(body)), described(choices_with_moves(body, SEEDS))

    monkeypatch.setattr(propagation, "_memo", lambda body: [Forgetful() for _ in body.equations])
    monkeypatch.setattr(solver, "_outcome", solver._outcome.__wrapped__)
    afresh = replace(body)  # another identity, for which nothing is cached
    assert described(choices(afresh)) == remembered[0]
    afresh = replace(body)
    assert described(choices_with_moves(afresh, SEEDS)) == remembered[2]
    assert described(choices_with_moves(afresh)) == remembered[1]
