"""The garbage collector is left as it was found."""

from __future__ import annotations

import gc

import pytest

from unity.base.gc_pause import uncollected


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_as_before_also_after_an_error(before: bool):
    (gc.enable if before else gc.disable)()

    def fail() -> None:
        with uncollected():
            assert not gc.isenabled()
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled() == before
    finally:
        gc.enable()
