"""Cases that run by hand alone: CI leaves them out, because its time is limited and other cases state the same law."""

import os
from typing import TypeVar

import pytest

Case = TypeVar("Case")

CI = "CI" in os.environ
BY_HAND = pytest.mark.skipif(CI, reason="CI has no time for it")


def by_hand(*cases: Case) -> tuple[Case, ...]:
    """Return the cases, or none in CI."""
    return () if CI else cases
