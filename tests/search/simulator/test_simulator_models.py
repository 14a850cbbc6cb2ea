"""The models of `benchmarks/simulator.py`: unrolled, the LSTM networks compute what they compute in a scan."""

from __future__ import annotations

import pytest

from benchmarks.models import tiny
from benchmarks.models.model import Model, concrete
from benchmarks.models.unrolled import nmt_unrolled, rnnlm_unrolled, rnntc_unrolled

SIZES = {"hidden": 16, "vocab": 61, "steps": 5, "batch": 8}


@pytest.mark.parametrize(
    ("scanned", "unrolled"),
    [
        (tiny("rnnlm", **SIZES), rnnlm_unrolled(**SIZES)),
        (tiny("rnntc", **SIZES), rnntc_unrolled(layers=2, **SIZES)),
        (tiny("nmt", **SIZES), nmt_unrolled(**SIZES)),
    ],
    ids=["rnnlm", "rnntc", "nmt"],
)
def test_an_unrolled_network_is_the_scanned_one(scanned: Model, unrolled: Model) -> None:
    params, data = concrete(scanned)
    assert float(unrolled.loss(params, data)) == pytest.approx(float(scanned.loss(params, data)), rel=1e-5)
