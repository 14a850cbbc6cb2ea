"""The run of all published systems: it goes on after an interruption, hides nothing that is missing, compares what it should."""

import json
import math
from dataclasses import replace

import jax
import pytest
from small_models import MODELS

from benchmarks.models import get
from benchmarks.seeds import run as seeds_run
from benchmarks.seeds.cases import OWN, PARTS, Case, cases, groups
from benchmarks.seeds.dimensions import ABLATION, space
from benchmarks.seeds.results import Results, ratio
from benchmarks.seeds.run import group, known, left, restore, run
from benchmarks.seeds.studies import DEVICES, PART, studied
from benchmarks.seeds.studies import tables as studies
from benchmarks.seeds.tables import absent, never_slower, tables, turning
from unity.pcg.capture import capture
from unity.pcg.parallelize import parallelize
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.predict import predict
from unity.search.published import Asked, algorithm, names
from unity.search.published.restricted import Structure
from unity.search.session import Search

MACHINE = Machine.grid(1, 2, "v100")


def case(algorithm: str, **options) -> Case:
    return Case("optcnn7", "lenet5", algorithm, MACHINE, {"batch": 32}, 2, **options)


def test_every_case_has_a_name_of_its_own_and_keeps_it() -> None:
    every = cases(tuple(PARTS))
    assert len({c.name for c in every}) == len(every)
    assert [c.name for c in every] == [c.name for c in cases(tuple(PARTS))]
    assert sum(map(len, groups(every))) == len(every)
    assert {c.algorithm for c in every} <= {*OWN, *names()}


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    every = [case("data-parallel"), case("captured"), case("no such algorithm")]
    assert left(tmp_path, every) == every
    group(every[:1], str(tmp_path))
    assert left(tmp_path, every) == every[1:]
    group(every[1:], str(tmp_path))
    assert left(tmp_path, every) == every[2:]  # what was missing may be there the next time
    found = known(tmp_path, every)
    assert found[every[1].name]["time"] <= found[every[0].name]["time"]
    assert "missing" in found[every[2].name]
    rows = absent(Results(tuple(found.values()))).rows
    assert [row[3] for row in rows] == ["no such algorithm"]
    before = (tmp_path / f"{every[0].name}.json").read_text()
    restore(tmp_path / "elsewhere", list(found.values()))
    assert known(tmp_path / "elsewhere", every) == found
    restore(tmp_path, [{**found[every[0].name], "time": 0.0}])  # what is there is newer
    assert known(tmp_path, every) == found
    monkeypatch.setattr(seeds_run, "measured", lambda task, case: 1 / 0)
    group([replace(every[0], slots=1)], str(tmp_path))
    assert (tmp_path / f"{every[0].name}.json").read_text() == before
    (failed,) = known(tmp_path, [replace(every[0], slots=1)]).values()
    assert failed["failed"].startswith("ZeroDivisionError")


def test_a_process_runs_as_many_groups_as_there_are(tmp_path) -> None:
    every = [replace(case("no such algorithm"), scale=n) for n in range(6)]
    done = [name for names in run(every, tmp_path, 1) for name in names]
    assert sorted(done) == sorted(c.name for c in every)
    assert known(tmp_path, every).keys() == set(done)


def test_a_limit_and_what_cannot_be_are_said(tmp_path) -> None:
    tight, expert = case("data-parallel", limit=1.0), Case("flexflow6", "mlp_unity", "expert", MACHINE, {"batch": 32}, 2)
    group([tight], str(tmp_path))
    group([expert], str(tmp_path))
    found = known(tmp_path, [tight, expert])
    assert found[tight.name]["fits"] is False
    assert "no strategy of experts" in found[expert.name]["error"]


def test_the_more_dimensions_may_be_split_the_faster() -> None:
    model = MODELS["gpt"](layers=1, d=256, b=8, s=64)
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, Machine.grid(1, 4, "v100"), Training())
    spaces = [space(Structure(search), may) for may in ABLATION.values()]
    times = [point.time for point in (found.at(0.0) for found in spaces) if point is not None]
    assert len(times) == len(ABLATION)
    assert times[0] >= times[1] >= times[2] >= search.fastest.time * (1 - 1e-12)
    partial = [
        any(state.kind == "S" for v in range(len(d)) for state in d.type_of(v, len(site.ports)))
        for site, d in zip(spaces[0].assembled.opened.sites, spaces[0].assembled.domains, strict=True)
        if site.node is not None and site.node.kind == "dot_general"
    ]
    assert partial
    assert not any(partial)  # no reduction


def result(algorithm: str, time: float, **more) -> dict:
    about = {"part": "optcnn7", "model": "vgg16", "machine": "m", "devices": 16, "scale": 16, "limit": None, "batch": 512}
    return {**about, "algorithm": algorithm, "time": time, "memory": 1e9, "sent": 1e9, "seconds": 1.0, **more}


def test_another_algorithm_that_is_faster_is_said() -> None:
    slower = Results((result("unity", 1.0), result("optcnn", 1.5), result("data-parallel", 2.0)))
    assert "No other strategy is faster" in never_slower(slower).notes[0]
    assert never_slower(slower).rows[0][5] == "+50.00%"
    faster = Results((result("unity", 1.0), result("optcnn", 0.9), result("data-parallel", 0.5, fits=False)))
    assert never_slower(faster).notes == ("optcnn7, vgg16 on m: optcnn is faster by 10.00%",)


def test_tables_are_written_of_whatever_is_there() -> None:
    some = Results((result("unity", 1.0), result("optcnn", 1.5), {"part": "unity14", "model": "xdl", "machine": "m", "devices": 6,
                    "scale": 6, "limit": None, "algorithm": "flexflow", "missing": "flexflow: not available"}))  # fmt: skip
    for table in tables(some):
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
    assert math.isnan(ratio(None, some.every[0]))
    assert ratio(some.every[1], some.every[0]) == pytest.approx(1.5)
    json.dumps([table.rows for table in tables(some)])


def test_the_turning_point_is_the_farthest_from_the_line_between_the_ends() -> None:
    points = [[1e9, 10.0, 0.0], [2e9, 2.0, 0.0], [5e9, 1.5, 0.0], [11e9, 1.0, 0.0]]
    assert turning(points).startswith("the turning point is at 2 GB and 2 s")
    assert "too few" in turning(points[:2])


def test_how_layers_are_treated() -> None:
    """By data parallelism: every matrix is used with other samples on every device, and all gradients are added up."""
    model = get("nmt", layers=1, hidden=16, vocab=32, steps=3, batch=8)
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, MACHINE, Training())
    graph = parallelize(search.graph, algorithm("data-parallel")(search, Asked(math.inf)).assignment)
    found = studied(graph, captured.differentiated, MACHINE, predict(graph, MACHINE, captured.differentiated))
    matrices = [x for x in jax.tree.leaves(model.params) if len(x.shape) > 1]
    assert [row[1:] for row in found["treated"]] == [[2, 1, 1]] * len(matrices)
    every = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(model.params))
    assert found["synchronized"] == pytest.approx(2 * every)  # a ring of two sends all of it once, twice over


def test_what_the_papers_case_studies_found_is_beside_ours() -> None:
    about = {"part": PART, "devices": DEVICES, "model": "nmt", "time": 1.0, "synchronized": 8.0}
    layers = [["p['table']", 4, 1, 1], ["p['softmax']['w']", 1, 4, 1]]
    some = [about | {"algorithm": "unity", "treated": layers}, about | {"algorithm": "data-parallel", "treated": layers[:1]}]
    inception, nmt = studies(Results(tuple(some)))
    assert {row[-1] for row in inception.rows} == {"not run"}
    assert {row[0]: row[-1] for row in nmt.rows}["softmax"] == "1 x samples 1, parameters 4"
    assert [note.rsplit(": ", 1)[1] for note in nmt.notes] == ["does not hold.", "holds."]
