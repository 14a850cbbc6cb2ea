"""The operator table is right: every entry, every choice, on one axis and on two, against the operator on whole tensors.

Values, gradients (in their dual types) and collectives: a body's only communication is the Reduces that its choice declares.
"""

import jax
import pytest
from operator_cases import CASES
from parallel_cases import Application

import unity.pcg.table  # noqa: F401 (fills the table)


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def application(name: str, sizes: tuple[int, ...]) -> Application:
    fn, args = CASES[name]
    return Application(fn, [a() if callable(a) else a for a in args], sizes)


@pytest.mark.parametrize("name", CASES)
def test_every_choice_computes_what_the_operator_does(name):
    application(name, (2, 3)).check()
