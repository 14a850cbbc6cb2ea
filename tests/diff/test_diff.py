"""Differences of graphs: a diff applied to the first graph gives the second, and says no more than is different."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations

import jax
import numpy as np
import pytest
from ci_cases import fewer
from derivation_cases import PROGRAMS, arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from small_functions import function, functions
from small_models import MODELS, made, named, random_point
from test_graph import chain, small_graphs, through_text

from unity.base.errors import PlanError, PlanFileError
from unity.diff import GraphDiff, apply, diff
from unity.diff.graph_diff_json import SCHEMA, from_json, to_json
from unity.diff.matching import matching
from unity.diff.placements import is_moved, type_in_words
from unity.diff.skeleton import is_parallelization
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture, graph_of
from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.graph_json import to_json as graph_json
from unity.pcg.ir.payloads import Input, PackedPart, Scan
from unity.pcg.ir.program import program_of, tensor_type
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned
from unity.substitutions.language.axioms import default_library
from unity.substitutions.rewriting.forms import planning_form, search_form
from unity.substitutions.rewriting.occurrences import occurrences, patterns
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.rewriting import rewritten


def applied_diff(before: PCG, after: PCG) -> GraphDiff:
    """Return the diff of two graphs, checked: applied to the first it gives the second with all names, also after a round trip
    through JSON.
    """
    difference = diff(before, after)
    assert graph_json(apply(difference, before)) == graph_json(after)
    data = json.loads(json.dumps(to_json(difference)))
    from_data = from_json(data)
    assert to_json(from_data) == data
    assert graph_json(apply(from_data, before)) == graph_json(after)
    assert bool(from_data) == bool(difference)
    return difference


def has_no_difference(difference: GraphDiff) -> bool:
    return not (difference or difference.removed or difference.added or difference.changed)


@settings(max_examples=fewer(80))
@given(small_graphs(), small_graphs())
def test_applying_a_diff_gives_the_second_graph(one, other):
    found = applied_diff(one, other)
    if not found:
        assert one.key == other.key


@given(small_graphs())
def test_a_graph_does_not_differ_from_itself(graph):
    assert has_no_difference(diff(graph, graph))
    assert has_no_difference(diff(graph, through_text(graph)))


# --- small edits ---


def with_nodes_replaced(graph: PCG, instead: dict[int, Node], bypass: dict[int, Value] | None = None) -> PCG:
    """Return the graph with some nodes replaced, by index, and with users of some nodes reading another value."""
    made: dict[int, Node] = {}
    skipped = {} if bypass is None else bypass

    def of(v: Value) -> Value:
        while id(v.node) in skipped:
            v = skipped[id(v.node)]
        return Value(made[id(v.node)], v.index)

    for k, n in enumerate(graph.nodes):
        made[id(n)] = replace(instead.get(k, n), operands=tuple(map(of, n.operands)))
    return PCG(tuple(made[id(n)] for n in graph.inputs), tuple(map(of, graph.outputs)), graph.axes)


@settings(max_examples=fewer(80))
@given(small_graphs(), st.data())
def test_one_changed_node_is_the_only_difference(graph, data):
    numbers = [k for k, n in enumerate(graph.nodes) if not is_parallelization(n) and n.kind != "input"]
    if not numbers:
        return
    k = data.draw(st.sampled_from(numbers))
    node = graph.nodes[k]
    scan, part = node.payload, None if isinstance(node.payload, PackedPart) else PackedPart()
    payload = structs.replace(scan, length=scan.length + 1) if isinstance(scan, Scan) else part
    found = applied_diff(graph, with_nodes_replaced(graph, {k: replace(node, payload=payload)}))
    assert (found.removed, found.added) == ((), ())
    assert [c.number for c in found.changed] == [k]
    assert set(found.changed[0].fields) == {"attributes"}
    assert found.changed[0].operands is None


@cache
def captured(operations: tuple[str, ...]) -> PCG:
    fn = function(operations)
    return capture(fn.loss, fn.params, fn.batch).graph


@given(functions, st.data())
def test_an_omitted_operator_is_the_only_removed_node(fn, data):
    """The operators have one operand of the same shape as their result, and the rest of the program is unchanged."""
    graph = capture(fn.loss, fn.params, fn.batch).graph
    places = [k for k, n in enumerate(graph.nodes) if n.operands and [n.operands[0].tensor] == list(n.tensors)]
    if not places:
        return
    k = data.draw(st.sampled_from(places))
    node = graph.nodes[k]
    shorter = with_nodes_replaced(graph, {}, {id(node): node.operands[0]})
    found = applied_diff(graph, shorter)
    gone = len(graph.nodes) - len(shorter.nodes)
    assert len(found.removed) == gone
    assert not found.added
    longer = applied_diff(shorter, graph)
    assert len(longer.added) == gone
    assert not longer.removed


@settings(max_examples=fewer(30))
@given(functions, functions)
def test_diffs_of_random_functions_can_be_applied(one, other):
    graphs = [capture(fn.loss, fn.params, fn.batch).graph for fn in (one, other)]
    applied_diff(*graphs)


# --- how good a matching is ---


def signature(node: Node) -> str:
    """Return what a node computes of its operands, independently of the matching."""
    plain = sorted((k, v) for k, v in node.attributes.items() if k not in ("name", "again"))
    return repr((node.kind, plain, [str(t) for t in node.tensors], None if node.inside is None else id(node.inside)))


@settings(max_examples=fewer(80))
@given(small_graphs(depth=0), small_graphs(depth=0))
def test_as_many_equal_operators_are_matched_as_both_graphs_have(one, other):
    sides = [[n for n in g.nodes if not is_parallelization(n) and n.kind != "input"] for g in (one, other)]
    most = sum((Counter(map(signature, sides[0])) & Counter(map(signature, sides[1]))).values())
    partner = matching(one, other)
    alike = [(i, j) for i, j in partner.items() if not is_parallelization(one.nodes[i]) and one.nodes[i].kind != "input"]
    assert all(one.nodes[i].kind == other.nodes[j].kind for i, j in partner.items())
    assert len(set(partner.values())) == len(partner)
    assert sum(signature(one.nodes[i]) == signature(other.nodes[j]) for i, j in alike) == most


def count_rewired(difference: GraphDiff) -> int:
    return sum(c.operands is not None for c in difference.changed)


def layered(layers) -> PCG:
    """Return equal layers in sequence, each added to the result of the one before."""
    tensor = (tensor_type((4,), np.dtype("float32")),)
    start = Node("input", (), tensor, payload=Input(0, "x"))
    weights = [Node("input", (), tensor, payload=Input(k + 1, f"w[{k}]")) for k in layers]
    x = Value(start)
    for w in weights:
        y = Value(Node("mul", (x, Value(w)), tensor))
        x = Value(Node("add", (x, Value(Node("tanh", (y,), tensor))), tensor))
    return PCG((start, *weights), (x,))


@given(st.data())
def test_omitted_layers_are_the_only_removed_nodes(data):
    """Any layers may be omitted, although all layers are equal but for the names of their weights."""
    every = list(range(6))
    kept = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    found = applied_diff(layered(every), layered(kept))
    assert len(found.removed) == 4 * (6 - len(kept))
    assert not found.added
    starts = sum(k > 0 and k - 1 not in kept for k in kept)  # layers that are handed what another one made before
    assert count_rewired(found) <= 2 * starts


@settings(max_examples=fewer(60))
@given(st.lists(st.tuples(st.sampled_from("fg"), st.integers(0, 4)), min_size=1, max_size=5), st.data())
def test_no_matching_of_tiny_graphs_leaves_fewer_nodes_unmatched(operators, data):
    """Every matching of nodes of one kind is tried.

    Among those that leave as few unmatched, the one that rewires the fewest operands is not always found.
    """
    one, other = tiny(operators), tiny(data.draw(st.permutations(operators)) + data.draw(st.sampled_from([[], [("h", 1)]])))
    found = diff(one, other)
    matchings = permutations(range(1, len(other.nodes)))
    assert len(found.removed) + len(found.added) <= min(count_unmatched(one, other, (0, *order)) for order in matchings)


def tiny(operators) -> PCG:
    tensor = (tensor_type((4,), np.dtype("float32")),)
    nodes = [Node("input", (), tensor, payload=Input(0, "x"))]
    for kind, reads in operators:
        nodes.append(Node(kind, (Value(nodes[min(reads, len(nodes) - 1)]),), tensor))
    used_by = {id(v.node) for n in nodes for v in n.operands}
    return PCG((nodes[0],), tuple(Value(n) for n in nodes if id(n) not in used_by))


def count_unmatched(one: PCG, other: PCG, order) -> int:
    """Return the number of unmatched nodes if node k of one graph is node order[k] of the other, where they are of one kind."""
    pairs = sum(a.kind == other.nodes[j].kind for a, j in zip(one.nodes, order, strict=False))
    return len(one.nodes) + len(other.nodes) - 2 * pairs


def test_deep_graphs_need_no_recursion():
    one, other = chain(3 * sys.getrecursionlimit()), chain(3 * sys.getrecursionlimit() + 1)
    found = applied_diff(one, other)
    assert (len(found.removed), len(found.added)) == (0, 1)
    assert has_no_difference(diff(one, chain(3 * sys.getrecursionlimit())))


# --- rewritings and strategies ---


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_diffs_of_random_rewritings_can_be_applied(fn):
    first = used(program_of(jax.make_jaxpr(fn)(*arguments(fn)))[0])
    names = [f"args[{k}]" for k in range(len(first.inputs))]
    body, rng, library = search_form(first), random.Random(0), patterns(default_library().rules)
    before = graph_of(planning_form(body), names)
    for _ in range(4):
        reading = Reading(body)
        ways = [new for p in library for o in occurrences(reading, p) if (new := rewritten(body, o)) and len(new.equations) < 40]
        if not ways:
            return
        body = rng.choice(ways)
        after = graph_of(planning_form(body), names)
        applied_diff(before, after)
        applied_diff(after, before)


@cache
def strategies(model: str) -> tuple[PCG, ...]:
    """Return the serial graph and random strategies."""
    found, assembled = named(model)
    points = [random_point(assembled, np.random.default_rng(seed)) for seed in range(3)]
    return found.graph, *(parallelize(found.graph, assembled.assignment(p)) for p in points)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_strategies_of_one_program_differ_in_parallelization_alone(name):
    graphs = strategies(name)
    for one in graphs:
        for other in graphs:
            found = applied_diff(one, other)
            assert has_no_difference(found) == (one is other)
            assert_only_parallelization(found)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_another_batch_size_adds_and_removes_nothing(name):
    """Every operator computes something else, and is still matched to its counterpart."""
    with jax.enable_x64(True):
        models = MODELS[name](), MODELS[name](b=16)
        found = applied_diff(*(capture(m.loss, m.params, m.batch).graph for m in models))
    assert found
    assert (found.removed, found.added) == ((), ())
    assert count_rewired(found) == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_types_on_other_meshes_are_compared_axis_by_axis(name):
    """A node's type is in the diff if and only if its placement differs, however many axes there are."""
    graphs = strategies(name)[0], *(random_strategy(name, machine) for machine in MACHINES), strategies(name)[1]
    for one in graphs:
        for other in graphs:
            applied_diff(one, other)
            assert_equal_placements(one, other)


def assert_equal_placements(one: PCG, other: PCG) -> None:
    partner, difference = matching(one, other), diff(one, other)
    changed = {c.number for c in difference.changed if "types" in c.fields}
    pairs = [(i, placements_in_words(one.nodes[i], one), placements_in_words(other.nodes[j], other)) for i, j in partner.items()]
    expected = {i for i, before, after in pairs if before != after}
    assert changed == expected


def placements_in_words(node: Node, graph: PCG) -> list[tuple]:
    """Return the placements in words and with their axes, since axes of two meshes may share names and differ in size."""
    if not node.types:
        return [("whole", ())] * len(node.tensors)
    return [
        (type_in_words(t, graph.axes), tuple(a for a, s in zip(graph.axes, t, strict=True) if s.kind != "U")) for t in node.types
    ]


MACHINES = (Machine.grid(1, 4, "a100"), Machine.grid(3, 2, "a100"))


@cache
def random_strategy(name: str, machine: Machine) -> PCG:
    """Return a random strategy on a machine."""
    found, assembled = made(MODELS[name](), machine)
    return parallelize(found.graph, assembled.assignment(random_point(assembled, np.random.default_rng(0))))


def assert_only_parallelization(difference: GraphDiff) -> None:
    assert all(is_change_kind(x.node) for x in (*difference.removed, *difference.added))
    for c in difference.changed:
        assert set(c.fields) <= {"types", "attributes"}
        assert set(dict(c.fields).get("attributes", ({}, {}))[1]) - set(dict(c.fields).get("attributes", ({}, {}))[0]) <= {"again"}
        if c.inside is not None:
            assert_only_parallelization(c.inside)


def is_change_kind(node: Node) -> bool:
    return is_parallelization(replace(node, operands=(Value(node),)))


def test_programs_nested_in_scans_and_remats_are_compared():
    serial, one, other, _ = strategies("gpt_scanned")
    for found in (diff(serial, one), diff(one, other)):
        inner = [c.inside for c in found.changed if c.inside is not None]
        assert inner
        assert all(inner)
        assert not any(is_scan(x.node) for x in (*found.removed, *found.added))


def is_scan(node: Node) -> bool:
    return node.kind in ("scan", "remat")


# --- what is refused ---


def test_a_diff_applies_only_to_the_graph_that_it_starts_from():
    serial, one, other, _ = strategies("lstm")
    with pytest.raises(PlanError, match="starts from: that has the hash"):
        apply(diff(serial, one), other)


@pytest.mark.parametrize("data", [None, [], {}, {"unity": "graph", "schema": 1}])
def test_foreign_data_are_refused(data):
    with pytest.raises(PlanFileError, match="not a difference of two graphs"):
        from_json(data)


def test_other_schemas_and_damaged_data_are_refused():
    data = to_json(diff(captured(("dense", "relu")), captured(("dense", "softmax"))))
    with pytest.raises(PlanFileError, match=f"schema {SCHEMA + 1}"):
        from_json({**data, "schema": SCHEMA + 1})
    for part in ("before", "added", "changed", "removed"):
        with pytest.raises(PlanFileError, match="damaged"):
            from_json({**data, part: [3]})


# --- words ---


def test_types_in_words():
    axes = strategies("gpt")[1].axes
    a, b, c = (axis.name for axis in axes)
    assert type_in_words((UNUSED, UNUSED, UNUSED), axes) == "whole"
    assert type_in_words((partitioned(0), partitioned(0), PARTIAL), axes) == f"dim 0 over {a}·{b}, partial sum over {c}"
    assert type_in_words((REPLICATED, partitioned(1, 3), UNUSED), axes) == f"dim 1 (inside of 3) over {b}, replicated over {a}"


def test_equal_splits_on_other_axes_are_moves():
    one, other, third = Axis("n0", 2, 0), Axis("d0", 2, 1), Axis("d1", 3, 1)
    rows, columns = partitioned(0), partitioned(1)
    assert is_moved(((one, rows),), ((other, rows),))
    assert is_moved(((one, rows), (other, PARTIAL)), ((one, PARTIAL), (other, rows)))
    assert not is_moved(((one, rows),), ((one, rows),))
    assert not is_moved(((one, rows),), ((one, columns),))
    assert not is_moved(((one, rows),), ((third, rows),))
