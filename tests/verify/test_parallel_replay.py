"""Parallelizations as recorded rules: saved, replayed from the serial graph, and refused where they are wrong."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import small_models
from operator_record import DEGREES, operator, proved_claims

import unity
from unity.base.documents import encoded, parsed, plain, typed
from unity.base.errors import DerivationError, PlanError
from unity.machine.hardware import Device
from unity.machine.machine import Machine
from unity.pcg.ir.program import close
from unity.pcg.propagation.choices import choices
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned
from unity.plan.files.plan_file import sealed
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.parallel_derivation import Parallelization, ParallelizationRecord
from unity.verify.derivations.parallel import check_parallelization
from unity.verify.proofs import claims as record
from unity.verify.proofs.claims import claims, proved
from unity.verify.proofs.operators import fits
from unity.verify.proofs.splits import justifies, vocabulary_operator

SLOW = Device("slow", {"float32": 1e9, "float64": 1e9}, 10**9, 1e12, 1.0, 1e-6)
FOUR = Machine.grid(2, 2, SLOW, intra=(1e9, 1e-5), inter=(2e8, 1e-5))
AXIS = Axis("a", 2, 0)

pytestmark = pytest.mark.usefixtures("own_cache")


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params, x):
    return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


MLP = {"up": f(64, 256), "down": f(256, 64)}, f(16, 64)


def plan(fn=mlp, args=MLP, machine=FOUR, search="captured", **options):
    return unity.optimize(fn, *args, machine=machine, search=search, progress=False, **options)


def replayed(found, changed=None):
    return check_parallelization(
        found.program.serial, found.program.pcg, changed or found.program.parallelization, default_library()
    )


@pytest.mark.parametrize("name", sorted(small_models.MODELS))
@pytest.mark.parametrize("search", ["captured", "unity-rules"])
def test_a_plan_is_derived_again_by_its_rules(name, search):
    model = small_models.MODELS[name]()
    found = plan(model.loss, (model.params, model.batch), search=search, budget=3000)
    report = replayed(found)
    assert report.applications > 0
    assert not report.unproved, str(report)
    found.program.check_derivation()


def test_a_plan_with_less_memory_is_derived_again():
    """Some weights are gathered again in the backward pass, and some inner values are recomputed."""
    model = small_models.gpt(2)
    found = plan(model.loss, (model.params, model.batch))
    lean = found.frontier[-1]
    assert any(c.again for row in lean.program.parallelization.rows for changes in row.changes for c in changes)
    for point in found.frontier[:: max(1, len(found.frontier) // 4)]:
        replayed(point)


def test_products_are_split_by_rules_of_the_library():
    report = replayed(plan(machine=Machine.grid(1, 2, SLOW, intra=(1e9, 1e-5), inter=(1e9, 1e-5))))
    assert {name for name in report.by_rule if "matmul" in name}
    assert "by rules of the library" in str(report)


def test_a_parallelization_survives_its_file():
    found = plan()
    data = parsed(encoded(found.program.parallelization.to_record()))
    assert Parallelization.from_record(typed(data, ParallelizationRecord)) == found.program.parallelization
    for wrong in (None, {}, {**data, "nodes": [99]}, {**data, "nodes": [-1]}, {**data, "types": ["Q"]}):
        with pytest.raises(PlanError, match="damaged at"):
            Parallelization.from_record(typed(wrong, ParallelizationRecord))


def test_equal_layers_are_written_once():
    sizes = []
    for layers in (4, 12):
        model = small_models.gpt(layers)
        found = plain(plan(model.loss, (model.params, model.batch)).program.parallelization.to_record())
        sizes.append(sum(len(json.dumps(found[k])) for k in ("types", "splits", "changes", "rows")))
    assert sizes[1] < 1.5 * sizes[0]


def at_product(found, change):
    """Return the parallelization with a changed row of the first product."""
    rows = list(found.program.parallelization.rows)
    at = next(k for k, row in enumerate(rows) if row.splits and row.splits[0].operator == "dot_general")
    rows[at] = change(rows[at])
    return replace(found.program.parallelization, rows=tuple(rows))


def with_split(row, **changes):
    at = next(k for k, s in enumerate(row.splits) if s.rule)
    splits = list(row.splits)
    splits[at] = replace(splits[at], **changes)
    return replace(row, splits=tuple(splits))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: with_split(row, hash="0" * 16), "has hash"),
        (lambda row: with_split(row, rule="no-such-rule"), "has no rule"),
        (lambda row: with_split(row, rule="matmul-of-replicas"), "hash"),
        (lambda row: with_split(row, results=(PARTIAL,)), "does not allow"),
        (lambda row: with_split(row, operands=(UNUSED, PARTIAL)), "not in the states that its rule requires"),
        (lambda row: replace(row, splits=row.splits[1:]), "rules on record"),
        (lambda row: replace(row, changes=((), ())), "not in the states that its rule requires|do not lead"),
        (lambda row: replace(row, again=True), "do not lead"),
    ],
)
def test_a_changed_row_is_refused(change, message):
    found = plan()
    with pytest.raises(DerivationError, match=message):
        replayed(found, at_product(found, change))


def test_missing_and_additional_rows_are_refused():
    found = plan()
    rows = found.program.parallelization.rows
    for wrong, message in ((rows[:-1], "fewer rows"), ((*rows, rows[-1]), "more rows")):
        with pytest.raises(DerivationError, match=message):
            replayed(found, replace(found.program.parallelization, rows=wrong))


def test_a_file_whose_parallelization_does_not_replay_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    plan().files.save(path)
    whole = json.loads(path.read_text())
    assert unity.load(path, mlp, *MLP).program.check_derivation() == ()
    data = whole["parallelization"]
    at = next(k for k, s in enumerate(data["splits"]) if s[3])
    edited = [[*s[:4], "0" * 16] if k == at else s for k, s in enumerate(data["splits"])]
    for wrong, message in (({**data, "splits": edited}, "hash"), (None, r"damaged at \$\.parallelization")):
        path.write_text(json.dumps(sealed({**whole, "parallelization": wrong})))
        with pytest.raises(PlanError, match=message):
            unity.load(path, mlp, *MLP)


def body_of(fn, *args):
    return close(jax.make_jaxpr(fn)(*args))


def test_rules_justify_every_split_of_a_product():
    """Along samples, output channels, batches and contracted dimensions, and for partial sums of an operand."""
    body = body_of(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), f(4, 6, 8), f(4, 8, 10))
    rules = [e.rule for e in default_library().entries if e.rule.parallel]
    found = {c.states for c in choices(body) if any(justifies(r, body, c.states, AXIS) for r in rules)}
    p = partitioned
    assert (p(1), REPLICATED, p(1)) in found
    assert (REPLICATED, p(2), p(2)) in found
    assert (p(0), p(0), p(0)) in found
    assert (p(2), p(1), PARTIAL) in found
    assert (PARTIAL, REPLICATED, PARTIAL) in found


def test_rules_justify_only_choices_of_the_table():
    """For any states of a product, a split that a rule justifies is a choice of the operator table."""
    every = (UNUSED, REPLICATED, PARTIAL, partitioned(0), partitioned(1))
    body = body_of(jnp.matmul, f(4, 6), f(6, 8))
    legal = {c.states for c in choices(body)}
    rules = [e.rule for e in default_library().entries if e.rule.parallel]
    said = {(a, b, c) for a in every for b in every for c in every if any(justifies(r, body, (a, b, c), AXIS) for r in rules)}
    assert {s for s in said if any(x.kind in "PS" for x in s)} <= legal
    assert len(said) >= 4


def test_slices_of_inner_parts_of_a_matrix_are_left_to_the_table():
    body = body_of(lambda x, y: jnp.einsum("bsd,df->bsf", x, y), f(4, 6, 8), f(8, 10))
    operator = vocabulary_operator(body)
    assert operator is not None
    assert operator.translate((partitioned(0), REPLICATED, partitioned(0))) is not None
    assert operator.translate((partitioned(1), REPLICATED, partitioned(1))) is None
    assert proved(("dot_general", "P R → P"))


@pytest.mark.parametrize("name", ["dot_general", "softmax", "bias", "reshape, [2, 12] to [6, 4]"])
def test_the_record_agrees_with_the_proofs(name):
    with jax.enable_x64(True):
        found = proved_claims(name)
        body, _ = operator(name)
    assert found
    assert all(map(proved, found))
    fitting = [c for c in choices(body) if any(fits(body, (c,), (n,)) for n in DEGREES)]
    assert {c for choice in fitting for c in claims(body, choice.operands, choice.results)} <= found


def test_the_record_is_about_the_current_table():
    stale = [name for name, (entry, _) in record._record().items() if entry != record.source_hash(name)]
    assert not stale, "their entries have changed: python tests/support/operator_record.py proves them again"


def test_unproved_claims_are_reported_by_operator(monkeypatch):
    known = {k: v for k, v in record._record().items() if k != "tanh"}
    monkeypatch.setattr(record, "_record", lambda: known)
    found = plan(lambda w, x: jnp.sum(jnp.tanh(x @ w).sum()), (f(64, 64), f(4096, 64)), FOUR)
    report = replayed(found)
    assert any("tanh" in claim for _, claim in report.unproved)
    assert "not proved" in str(report)


def test_an_entry_that_was_edited_is_not_on_record(monkeypatch):
    assert proved(("add", "P → P"))
    monkeypatch.setattr(record, "source_hash", lambda name: "0" * 16)
    assert not proved(("add", "P → P"))
