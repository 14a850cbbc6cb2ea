"""The run of all published systems: it goes on after an interruption, hides nothing that is missing, compares what it should."""

import json
import math
from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS

from benchmarks.models import get, tiny
from benchmarks.seeds import age, steps, table5
from benchmarks.seeds import run as seeds_run
from benchmarks.seeds.beside import beside
from benchmarks.seeds.cases import OWN, PARTS, Case, cases, groups
from benchmarks.seeds.dimensions import ABLATION, space
from benchmarks.seeds.published import OPTCNN_VGG
from benchmarks.seeds.results import Results, ratio
from benchmarks.seeds.run import group, known, left, restore, run
from benchmarks.seeds.stepped import tables as stepped
from benchmarks.seeds.studies import DEVICES, PART, studied
from benchmarks.seeds.studies import tables as studies
from benchmarks.seeds.tables import absent, never_slower, tables, turning
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.baselines.restricted import Structure
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.published import Asked, algorithm, names
from unity.search.session import Search
from unity.search.simulator import Topology

MACHINE = Machine.grid(1, 2, "v100")


def case(algorithm: str, **options) -> Case:
    return Case("optcnn7", "lenet5", algorithm, MACHINE, {"batch": 32}, 2, **options)


def test_every_case_has_a_unique_and_stable_name() -> None:
    every = cases(tuple(PARTS))
    assert len({c.name for c in every}) == len(every)
    assert [c.name for c in every] == [c.name for c in cases(tuple(PARTS))]
    assert sum(map(len, groups(every))) == len(every)
    assert {c.algorithm for c in every} <= {*OWN, *names()}


def test_a_run_resumes_where_it_stopped(tmp_path, monkeypatch) -> None:
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


def test_a_process_runs_all_groups(tmp_path) -> None:
    every = [replace(case("no such algorithm"), scale=n) for n in range(6)]
    done = [name for names in run(every, tmp_path, 1) for name in names]
    assert sorted(done) == sorted(c.name for c in every)
    assert known(tmp_path, every).keys() == set(done)


def test_limits_and_impossible_cases_are_reported(tmp_path) -> None:
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


def test_a_faster_algorithm_is_reported() -> None:
    slower = Results((result("unity", 1.0), result("optcnn", 1.5), result("data-parallel", 2.0)))
    assert "No other strategy is faster" in never_slower(slower).notes[0]
    assert never_slower(slower).rows[0][5] == "+50.00%"
    faster = Results((result("unity", 1.0), result("optcnn", 0.9), result("data-parallel", 0.5, fits=False)))
    assert never_slower(faster).notes == ("optcnn7, vgg16 on m: optcnn is faster by 10.00%",)


def test_results_of_older_code_are_marked() -> None:
    new = {"code": "abc", "written": "2026-01-02 03:04 UTC"}
    some = (result("unity", 1.0) | new, result("optcnn", 1.5) | new, result("tofu", 1.5))
    assert "In 1 of them not all results are of the same code" in never_slower(Results(some)).notes[1]
    assert len(never_slower(Results(some[:2])).notes) == 1
    table = age.table(Results(some))
    assert [row[:1] + row[3:] for row in table.rows] == [("abc", "2", "optcnn7: unity, optcnn"), ("earlier", "1", "optcnn7: tofu")]
    assert table.rows[0][1:3] == (new["written"], new["written"])
    assert age.stamp()["code"] == age.code()


def test_tables_are_written_from_incomplete_results() -> None:
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


def test_layers_are_grouped_by_their_treatment() -> None:
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


def test_case_studies_show_the_papers_results_beside_ours() -> None:
    about = {"part": PART, "devices": DEVICES, "model": "nmt", "time": 1.0, "synchronized": 8.0}
    layers = [["p['table']", 4, 1, 1], ["p['softmax']['w']", 1, 4, 1]]
    some = [about | {"algorithm": "unity", "treated": layers}, about | {"algorithm": "data-parallel", "treated": layers[:1]}]
    inception, nmt = studies(Results(tuple(some)))
    assert {row[-1] for row in inception.rows} == {"not run"}
    assert {row[0]: row[4] for row in nmt.rows}["softmax"] == "1 x samples 1, parameters 4"
    assert {row[-1] for row in nmt.rows} == {"not run"}
    assert [note.rsplit(": ", 1)[1] for note in nmt.notes[:2]] == ["does not hold.", "holds."]


def test_networks_step_by_step_are_beside_figure_13() -> None:
    about = {"part": "flexsteps p100", "devices": DEVICES, "model": "nmt_unrolled"}
    layers = [["p['layers'][0]['w']", 4, 1, [0, 1, 2, 3], 30], ["p['layers'][0]['w']", 1, 2, [0, 1], 10]]
    some = [about | {"algorithm": "simulated data-parallel", "simulated": 2.0}]
    some.append(about | {"algorithm": "simulated flexflow", "simulated": 1.5, "placed": layers})
    _, nmt = studies(Results(tuple(some)))
    cells = {row[0]: row[-1] for row in nmt.rows}
    assert cells["layers"] == "30 x samples 4, parameters 1; 10 x samples 1, parameters 2, on 2 GPUs"
    assert cells["seconds of a step, of data parallelism's"] == "0.75"
    assert "flexflow, on any GPUs: 10 of 40 products" in nmt.notes[0]


def unrolled(machine: Machine, name: str = "nmt_unrolled", batch: int = 64) -> tuple[Captured, Operators]:
    model = tiny(name, hidden=32, vocab=64, steps=3, batch=batch)
    captured = capture(model.loss, model.params, model.batch)
    return captured, operators(captured.graph, captured.differentiated, Topology.uniform(machine))


def readers(o: Operators, word: str) -> list[int]:
    """The operators that read a weight with this word in its name."""
    return [k for (node, _), found in o.weights.items() for k, _ in found if word in o.nodes[node].name]


def test_experts_give_nodes_other_samples_and_the_gpus_of_a_node_other_layers() -> None:
    _, o = unrolled(Machine.grid(2, 4, "p100"))
    configs = steps.expert(o, 64)
    Strategy(o, configs)  # every operator can have its own
    of_gpu = {k: {device % 4 for device in config.devices} for k, config in configs.items()}
    assert all(len(gpus) == 1 for gpus in of_gpu.values())
    words = ("['layers'][0]", "['layers'][1]", "token", "softmax")
    of_word = {word: set.union(*(of_gpu[k] for k in readers(o, word))) for word in words}
    assert all(len(gpus) == 1 for gpus in of_word.values())  # with all steps, of encoder and decoder alike
    assert of_word["['layers'][0]"] != of_word["['layers'][1]"]
    products = [k for word in of_word for k in readers(o, word)]
    assert all(configs[k].pieces == 2 and {device // 4 for device in configs[k].devices} == {0, 1} for k in products)


def test_figure_13_has_each_embedding_on_a_gpu_and_softmax_in_parameters() -> None:
    _, o = unrolled(Machine.grid(1, 4, "p100"))
    configs = steps.figure_13(o, 64)
    graph = Strategy(o, configs).graph
    assert graph.tasks
    embeds = {word: {configs[k].devices for k in readers(o, f"['{word}']['token']")} for word in ("encoder", "decoder")}
    assert all(len(found) == 1 for found in embeds.values())
    assert embeds["encoder"] != embeds["decoder"]
    assert {configs[k].degrees for k in readers(o, "['softmax']['weight']")} == {(1, 4)}
    rows = steps.placed(o, configs)
    assert {tuple(row[1:3]) for row in rows if "softmax" in row[0]} == {(1, 4)}
    assert [(row[1:3], len(row[3])) for row in rows if "token" in row[0]] == [([1, 1], 1)] * 2
    assert {tuple(row[1:3]) for row in rows if "layers" in row[0]} == {(4, 1)}
    assert sum(row[-1] for row in rows if "token" in row[0]) == 2 * 3  # three steps


def test_a_search_is_no_slower_than_its_initial_strategy() -> None:
    machine = Machine.grid(1, 2, "p100")
    captured, _ = unrolled(machine, "rnntc_unrolled")
    found = {name: steps.simulated(captured, machine, name, 64, 60) for name in steps.SIMULATED}
    assert found[steps.SEARCH]["simulated"] <= min(found[name]["simulated"] for name in steps.BEGUN)
    assert all(row["sent"] > 0 and row["compute"] > 0 for row in found.values())
    assert all(row["simulated"] >= row["compute"] / 2 for row in found.values())  # two devices


@given(st.lists(st.floats(0, 10), min_size=1, max_size=7), st.integers(1, 5), st.data())
def test_depths_are_assigned_to_minimize_the_load_of_the_busiest_gpu(work: list[float], gpus: int, data: st.DataObject) -> None:
    def busiest(gpu_of: list[int]) -> float:
        return max(sum(w for w, g in zip(work, gpu_of, strict=True) if g == gpu) for gpu in set(gpu_of))

    found = steps.shared_out(work, gpus)
    assert found == sorted(found)
    assert len(set(found)) == min(gpus, len(work))
    other = sorted(data.draw(st.lists(st.integers(0, gpus - 1), min_size=len(work), max_size=len(work))))
    assert busiest(found) <= busiest(other) * (1 + 1e-12)


def test_the_networks_step_by_step_are_beside_the_paper() -> None:
    about = {"part": "flexsteps k80", "model": "nmt_unrolled", "machine": "m", "devices": 64, "process seconds": 1.0}
    figures = {"data-parallel": (3.0, 6.0, 10.0), "expert": (4.0, 3.0, 7.0)}
    figures |= {"figure 13": (2.0, 4.0, 8.0), "flexflow": (1.5, 3.0, 8.0)}
    rows = [
        about | {"algorithm": f"simulated {name}", "simulated": seconds, "sent": sent, "compute": compute}
        for name, (seconds, sent, compute) in figures.items()
    ]
    rows[-1] |= {"proposals": 200, "found": {"data-parallel": 2.0, "figure 13": 1.5}}
    scanned = about | {"model": "nmt"}
    rows += [scanned | {"algorithm": name, "on rings": seconds} for name, seconds in (("data-parallel", 2.0), ("captured", 1.0))]
    world, figure, plans = stepped(Results(tuple(rows)))
    assert world.rows == (("k80", "nmt", "64", "3000", "1.33", "1.3 to 3.3", "1.5", "2", "1.5", "200", "1", "2", "1.5"),)
    assert figure.rows[0][2:] == ("1", "1.33", "0.667", "0.5")
    assert [note.rsplit(": ", 1)[1] for note in figure.notes[2:4]] == ["holds.", "holds."]
    assert figure.notes[0].startswith("seconds of a step, others / FlexFlow: 2 and 2.67")
    assert plans.rows == ()


def test_vgg_as_the_paper_splits_it() -> None:
    machine = Machine.grid(1, 4, "p100")
    model = get("vgg16", image=64, channels=8, width=64, batch=8, classes=16)
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    candidate = table5.as_published(search)
    assert tuple(table5.layers(parallelize(search.graph, candidate.assignment))) == OPTCNN_VGG
    assert candidate.time >= algorithm("optcnn")(search, Asked(math.inf)).time * (1 - 1e-9)


def test_the_page_shows_results_of_other_benchmarks(tmp_path) -> None:
    assert beside(tmp_path) == []
    row = {"algorithm": "flexflow", "model": "nmt", "devices": 64, "published": 2190.0, "search": 900.0, "whole": False}
    kept = {"date": "today", "targets": {"optcnn": 2, "flexflow": 1}, "configured": "layer"}
    kept |= {"proposals_per_operator": 10, "seconds_at_most": 120}
    (tmp_path / "published_speed.json").write_text(json.dumps(kept | {"rows": [row | {"met": True}]}))
    small = {"model": "lenet5", "devices": 4, "space": "costs", "operators": 9, "optimal_ms": 1.0, "whole": True}
    small |= {"flexflow_ms": 1.5, "optcnn_ms": None}
    bounded = small | {"space": "mesh", "whole": False, "best_ms": 2.0, "flexflow_ms": 3.0}
    (tmp_path / "optimal.json").write_text(json.dumps({"date": "today", "most_nodes": 9, "rows": [small, bounded]}))
    speed, optimal, against = beside(tmp_path)
    assert "every layer has 10 proposals" in speed.notes[0]
    assert speed.rows == (("flexflow", "nmt", "64", "2190", "900", "at the pace of the first seconds", "yes"),)
    assert optimal.rows[0][4:] == ("1", "yes", "1.5", "1.5", "", "")
    assert optimal.rows[1][4:8] == ("1 to 2", "between these", "3", "1.5 to 3")
    assert against.rows == (("the optimum", "1", "1"), ("flexflow", "1.5", "1.5"), ("optcnn", "", ""))
    assert all(len(row) == len(table.columns) for table in (speed, optimal, against) for row in table.rows)
