"""Types of terms: shapes, seams, and what each device holds."""

import jax
import pytest
from rule_cases import A

from unity.base.errors import IllTypedError
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import TABLE, Entry, Spec
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, partitioned
from unity.substitutions.language.library import load
from unity.substitutions.language.term import applications
from unity.substitutions.language.text import parse_term
from unity.substitutions.language.typecheck import body_of, concrete, tensor, typecheck
from unity.substitutions.language.vocabulary import VOCABULARY
from unity.verify.proofs.small_instances import small_instances

U = (UNUSED,)


def type_of(text, **known):
    term = parse_term(text)
    return typecheck([term], known, (A,))[term]


def test_matrix_products():
    x, y = tensor((4, 6), U), tensor((6, 8), U)
    assert type_of("combine(-2, a, matmul(partition(-2, a, x), replicate(a, y)))", x=x, y=y) == tensor((4, 8), U)
    assert type_of("matmul(partition(-1, a, x), partition(-2, a, y))", x=x, y=y) == tensor((4, 8), (PARTIAL,))
    assert type_of("matmul(replicate(a, x), partition(-1, a, y))", x=x, y=y).states == (partitioned(1),)


def test_types_follow_a_new_entry_of_the_operator_table(monkeypatch):
    x, term = tensor((4, 6), U), "map(tanh, partition(-1, a, x))"
    assert type_of(term, x=x).states == (partitioned(1),)
    with monkeypatch.context() as patch:
        patch.setitem(TABLE, "tanh", Entry("tanh", lambda params, operands, results: Spec(())))
        with pytest.raises(IllTypedError, match="the operand is partitioned in dimension 1"):
            type_of(term, x=x)
    assert type_of(term, x=x).states == (partitioned(1),)


ILL_TYPED = {
    "map(relu, matmul(partition(-1, a, x), partition(-2, a, y)))": r"map\(relu, …\) along a: the operand is a partial sum",
    "matmul(partition(-2, a, x), y)": "operand 2 is unused, and must be replicated for use",
    "reduce(a, x)": "the operand is unused along a, and must be a partial sum",
    "combine(-2, a, partition(-1, a, x))": "is partitioned in dimension 1 along a, and must be partitioned in dimension 0",
    "add(x, y)": r"add takes two tensors of one shape and type, and got float32\(4, 6\) and float32\(6, 8\)",
    "matmul(x, x)": r"as many columns as rows, and got shapes \(4, 6\) and \(4, 6\)",
    "partition(-3, a, x)": r"a tensor of shape \[4, 6\] has no such dimension",
    "partition(-1, a, odd)": "size 3 is not divisible by 2",
    "split(-1, add(concat(-1, odd, wide), concat(-1, wide, odd))).0": "concatenated at different places",
    "conv2d(1, 1, same, x, y)": "rank 4",
}


@pytest.mark.parametrize("text", ILL_TYPED)
def test_why_a_term_is_ill_typed(text):
    known = {"x": tensor((4, 6), U), "y": tensor((6, 8), U), "odd": tensor((2, 3), U), "wide": tensor((2, 5), U)}
    with pytest.raises(IllTypedError, match=ILL_TYPED[text]):
        typecheck([parse_term(text)], known, (A,))


def test_a_split_undoes_the_last_concat():
    x, y, w = tensor((4, 3), U), tensor((4, 5), U), tensor((6, 4), U)
    joined = "concat(-1, x, y)"
    for text in (joined, f"map(f, {joined})", f"matmul(w, {joined})", f"add({joined}, {joined})", f"softmax({joined})"):
        assert type_of(f"split(-1, {text}).0", x=x, y=y, w=w).shape[-1] == 3
        assert type_of(f"split(-1, {text}).1", x=x, y=y, w=w).shape[-1] == 5
    assert type_of(f"split(-2, transpose({joined})).1", x=x, y=y).shape == (5, 4)
    assert type_of(f"split(-1, concat(-1, x, {joined})).1", x=x, y=y).seams[1] == (3, None, None)
    assert type_of("split(-2, x).0", x=x).shape == (2, 3)  # in halves, where nothing was joined


def test_several_axes_on_one_dimension():
    axes = (Axis("a", 2, 0), Axis("b", 3, 0))
    x = tensor((12, 4), (UNUSED, UNUSED))
    term = parse_term("map(f, partition(-2, b, partition(-2, a, x)))")
    assert typecheck([term], {"x": x}, axes)[term].states == (partitioned(0), partitioned(0))
    with pytest.raises(IllTypedError, match="not divisible by 6"):
        typecheck([term], {"x": tensor((4, 4), (UNUSED, UNUSED))}, axes)


def test_replicated_is_not_unused():
    assert type_of("map(f, replicate(a, x))", x=tensor((4, 4), U)).states == (REPLICATED,)


def test_programs_of_operators_are_the_same_with_and_without_64_bits():
    """They are cached, and a derivation is replayed in another process than the search that found it."""
    traced = set()
    for entry in (e for e in load("rules/library.json").entries if not e.rule.parallel):
        for instance in small_instances(entry.rule, (), (2, 4), 2):
            types = typecheck(instance.rule.sides, instance.types)
            for term in applications(instance.rule.sides):
                operands = [types[x] for x in term.operands]
                attributes = concrete(VOCABULARY[term.operator], term.attributes, operands)
                traced.add((term.operator, attributes, tuple((t.shape, t.dtype) for t in operands)))
    for arguments in traced:
        with jax.enable_x64(False):
            narrow = body_of.__wrapped__(*arguments).key
        with jax.enable_x64(True):
            assert body_of.__wrapped__(*arguments).key == narrow, arguments
    assert {"enlarge", "embedding", "conv2d", "maxpool"} <= {name for name, *_ in traced}
