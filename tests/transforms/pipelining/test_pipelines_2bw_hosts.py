"""2BW in several processes: the losses are those of one. The processes are real, and run `pipelined_worker.py`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.processes import ended, start

WORKER = Path(__file__).parents[2] / "support" / "pipelined_worker.py"
SECONDS = 500  # until processes are given up


def test_two_processes_train_as_one_device(tmp_path: Path) -> None:
    found = ended(start([str(WORKER)], (2, 2), tmp_path), SECONDS)
    assert all(one.code == 0 for one in found), "\n\n".join(one.err[-4000:] for one in found)
    first, second = (json.loads(one.out.splitlines()[-1]) for one in found)
    assert first == second
    assert first["pipelining"] == "2 stages of 2 steps, 4 micro-batches, 2BW"
    assert first["along"] == ["n0"]  # across the processes
    np.testing.assert_allclose(first["together"], first["alone"], rtol=1e-10)
    assert len(set(first["together"])) == len(first["together"])
    assert first["weights"] < 1e-10
    assert first["agrees"]  # the compiled collectives with the plan's
