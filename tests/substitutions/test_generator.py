"""The generator: sound, complete, deterministic and resumable."""

import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from ci_cases import by_hand

from unity.pcg.types.parallel_type import UNUSED, partitioned
from unity.substitutions.generator.candidates import candidate, confirmed
from unity.substitutions.generator.discover import discover, instance_of, minimal
from unity.substitutions.generator.enumeration import Enumeration, EqualGraphs
from unity.substitutions.generator.families import (
    BOTH,
    MATRIX,
    PRODUCT,
    SUM,
    SWAP,
    A,
    each,
    family,
    joins,
    moves,
    placed_leaves,
)
from unity.substitutions.generator.family import FamilyLeaf
from unity.substitutions.generator.generate import generate
from unity.substitutions.generator.workers import FamilyTask, Workers, run
from unity.substitutions.language.axioms import axioms
from unity.substitutions.language.term import Apply, Variable, applications, variables
from unity.substitutions.language.text import parse_rule, parse_term, print_body, print_rule
from unity.substitutions.language.typecheck import result_types, tensor
from unity.verify.proofs.bounded import executed
from unity.verify.proofs.first_order import Prover
from unity.verify.semantics.domains import Modular
from unity.verify.semantics.meaning import apply, random_pieces

SMALL = family("small", [FamilyLeaf(MATRIX, 3, BOTH)], PRODUCT, SUM, SWAP, operators=2)
JOINED = family("joined", [FamilyLeaf(MATRIX, 3, BOTH)], PRODUCT, each("map", ("f",)), joins((-1, -2)), operators=3)
PARALLEL = family(
    "parallel", placed_leaves(MATRIX, (UNUSED, partitioned(0)), 2), moves((-1, -2)), PRODUCT, operators=3, variables=2, axes=(A,)
)


@pytest.fixture(scope="module")
def small():
    found, counts, opened = discover(SMALL, axioms())
    assert not opened
    assert not counts.chance
    return found


def everything(operators, instances, names="xyz"):
    """Return every term of at most `operators` operators as (term, type, value), by brute force."""
    domain, rng = Modular(), np.random.default_rng(5)
    pool = [(Variable(n), MATRIX, random_pieces(MATRIX, (), domain, rng)) for n in names]
    for size in range(1, operators + 1):
        new = []
        for name, attributes in instances:
            count = 1 if name == "transpose" else 2
            for chosen in itertools.product(pool, repeat=count):
                term = Apply(name, attributes, tuple(c[0] for c in chosen))
                if len(applications([term])) == size:
                    types = tuple(c[1] for c in chosen)
                    value = apply(name, attributes, types, [c[2] for c in chosen], (), domain)[0]
                    new.append((term, result_types(name, attributes, types, ())[0], value))
        pool += new
    return pool


def test_rules_connect_all_equal_graphs(small):
    """The rules connect every two graphs that brute force shows to be equal."""
    prover = Prover((f.rule for f in minimal(small)), values=False)
    classes: dict = {}
    for term, type_, value in everything(2, SMALL.instances):
        classes.setdefault((type_, value.tobytes()), []).append(term)
    pairs = [(c[0], other) for c in classes.values() for other in c[1:]]
    assert len(pairs) > 100
    for left, right in pairs:
        assert prover.prove(parse_rule(f"goal {print_body(rule_of(left, right))}")).status == "proved"


def rule_of(left, right):
    return replace(parse_rule("r x = x"), left=(left,), right=(right,))


def test_expected_rules_are_discovered(small):
    found = {print_body(f.rule) for f in minimal(small)}
    assert "add(x, y) = add(y, x)" in found
    assert "matmul(matmul(x, y), z) = matmul(x, matmul(y, z))" in found
    assert "transpose(transpose(x)) = x" in found
    assert all(executed(f.rule).status == "proved" for f in small)


def test_numbers_become_variables():
    found = {print_body(f.rule) for f in discover(JOINED, axioms())[0]}
    assert "split(d, concat(d, x, y)).0 = x" in found
    assert "concat(d, map(f, x), map(f, y)) = map(f, concat(d, x, y))" in found
    assert "concat(-1, matmul(x, y), matmul(x, z)) = matmul(x, concat(-1, y, z))" in found
    merged = "split(-1, matmul(x, concat(-1, y, z)))"
    assert f"({merged}.0, {merged}.1) = (matmul(x, y), matmul(x, z))" in found


def test_expected_parallel_rules_are_derivable():
    rules = [f.rule for f in discover(PARALLEL, axioms())[0]]
    found = {print_body(r) for r in rules}
    assert "combine(d, a, partition(d, a, x)) = x" in found
    prover = Prover(rules, values=False)
    for text in (
        "g partition(-2, a, matmul(x, y)) = matmul(partition(-2, a, x), replicate(a, y))",
        "g partition(-1, a, matmul(x, y)) = matmul(replicate(a, x), partition(-1, a, y))",
        "g matmul(x, y) = reduce(a, matmul(partition(-1, a, x), partition(-2, a, y)))",
        "g matmul(x, y) = combine(-2, a, matmul(partition(-2, a, x), replicate(a, y)))",
    ):
        assert prover.prove(parse_rule(text)).status == "proved", text


def test_equality_by_chance_of_sizes_is_rejected():
    """x + x and x · x have one shape and are equal for 2, but not in general."""
    family_ = family("chance", [FamilyLeaf(tensor((2, 2)), 1, BOTH)], SUM, operators=1)
    wrong = EqualGraphs((parse_term("add(0, 0)".replace("0", "v")),), (parse_term("mul(v, v)"),), 1)
    found = candidate(replace(wrong, new=renamed(wrong.new), known=renamed(wrong.known)), family_)
    assert found is not None
    assert confirmed(found, np.random.default_rng(0)) is None


def renamed(terms):
    """Return terms with variables numbered as in an enumeration."""
    return tuple(Apply(t.operator, t.attributes, tuple(Variable("0") for _ in t.operands)) for t in terms)


def test_discovery_is_deterministic(small):
    again = discover(SMALL, axioms())[0]
    assert [print_rule(f.rule) for f in again] == [print_rule(f.rule) for f in small]


def test_graphs_are_counted_once():
    enumeration = Enumeration(SMALL)
    levels = list(enumeration.levels())
    assert len(levels) == 2
    terms = [enumeration.graphs.term(n) for n in range(len(enumeration.graphs))]
    assert len(set(terms)) == len(terms)
    assert all(len(variables([t])) <= SMALL.variables for t in terms)


def test_known_rules_are_not_discovered_again(small):
    assert discover(SMALL, axioms(), [f.rule for f in small])[0] == []


def test_an_interrupted_run_is_resumed(tmp_path):
    families = [SMALL, replace(SMALL, name="other", instances=(*SUM, *SWAP)), *by_hand(PARALLEL)]
    whole, _ = generate(families, axioms(), tmp_path / "whole", 1)
    work = tmp_path / "work"
    work.mkdir()
    task = FamilyTask(SMALL, tuple(map(print_rule, axioms())), (), str(work))
    run(task)  # then it was interrupted
    done = work / f"{task.digest}.json"
    written = done.stat().st_mtime_ns
    again, _ = generate(families, axioms(), work, 1)
    assert done.stat().st_mtime_ns == written
    assert json.loads(done.read_text())["family"] == "small"
    assert [e.to_json() for e in again.entries] == [e.to_json() for e in whole.entries]
    assert len({e.rule.name for e in whole.entries}) == len(whole)
    assert whole.made["open"] == []


def test_an_instance_of_a_rule():
    general = parse_rule("g map(f, concat(d, x, y)) = concat(d, map(f, x), map(f, y))")
    special = parse_rule("s map(relu, concat(-1, x, x)) = concat(-1, map(relu, x), map(relu, x))")
    assert instance_of(special, general)
    assert not instance_of(general, special)


def dies(number):
    if number == 2:
        os._exit(1)
    if number == 3:
        raise ValueError("three")
    return number


def test_the_death_of_a_process_fails_its_task_alone():
    with Workers(2) as workers:
        assert list(workers.map(dies, range(6), lambda task, why: why)) == [
            0, 1, "its process died", "ValueError: three", 4, 5
        ]  # fmt: skip
