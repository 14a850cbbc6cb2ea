"""Composite operators, such as softmax and attention: each is defined by a program of the rule language.

A definition is an axiom: the prover puts the program in the place of the operator, and a test compares the program, executed,
with the function of JAX (`composite_execution.py`). Capital letters are groups of dimensions, small ones are operands of any
further dimensions; an operand whose name begins with `p` is of truth values, one whose name begins with `i` is of indices."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass

DEFINITIONS = """
mean(K, x) = div(reduce(add, K, x), reduce(add, K, like(x, 1)))
variance(K, x) = mean(K, mul(sub(x, like(x, mean(K, x))), sub(x, like(x, mean(K, x)))))
logsumexp(K, x) = add(log(reduce(add, K, exp(sub(x, like(x, largest(K, x)))))), largest(K, x))
softmax(K, x) = over_sum(K, exp(sub(x, like(x, largest(K, x)))))
log_softmax(K, x) = less_logarithm(K, sub(x, like(x, largest(K, x))))
masked_softmax(K, p, x) = over_sum(K, select(p, exp(sub(x, like(x, largest(K, x)))), 0))
masked_logsumexp(K, p, x)
    = add(log(reduce(add, K, select(p, exp(sub(x, like(x, largest(K, x)))), 0))), largest(K, x))
attention(D, T, c, a, k, v) = dot(T, softmax(T, mul(dot(D, a, k), c)), v)
masked_attention(D, T, p, c, a, k, v) = dot(T, masked_softmax(T, like(dot(D, a, k), p), mul(dot(D, a, k), c)), v)
rms_norm(K, x, w, e) = mul(mul(x, like(x, rsqrt(add(mean(K, mul(x, x)), e)))), like(x, w))
layer_norm(K, x, w, b, e) = add(mul(standardize(K, x, e), like(x, w)), like(x, b))
batch_norm(N, x, w, b, e) = add(mul(standardize(N, x, e), like(x, w)), like(x, b))
trained_batch_norm(x, m, v, w, b, e) = add(mul(mul(sub(x, like(x, m)), like(x, rsqrt(add(v, e)))), like(x, w)), like(x, b))
standardize(K, x, e) = mul(sub(x, like(x, mean(K, x))), like(x, rsqrt(add(variance(K, x), e))))
over_sum(K, x) = div(x, like(x, reduce(add, K, x)))
less_logarithm(K, x) = sub(x, like(x, log(reduce(add, K, exp(x)))))
sigmoid(x) = div(1, add(1, exp(neg(x))))
silu(x) = mul(x, sigmoid(x))
tanh(x) = sub(1, div(2, add(1, exp(mul(2, x)))))
gelu(x) = mul(mul(0.5, x), add(1, erf(mul(x, 0.7071067811865476))))
gelu_tanh(x) = mul(mul(0.5, x), add(1, tanh(mul(0.7978845608028654, add(x, mul(0.044715, mul(x, mul(x, x))))))))
softplus(x) = log(add(1, exp(x)))
cross_entropy(V, x, i) = sub(logsumexp(V, x), lookup(V, x, i))
soft_cross_entropy(V, x, y) = neg(reduce(add, V, mul(y, log_softmax(V, x))))
"""


@dataclass(frozen=True)
class Definition:
    """A composite operator.

    Attributes:
        groups: names of its groups of dimensions.
        operands: names of its operands.
        body: the program.
    """

    name: str
    groups: tuple[str, ...]
    operands: tuple[str, ...]
    body: ast.expr

    @property
    def usage(self) -> str:
        """The form of an application."""
        return f"{self.name}({', '.join((*self.groups, *self.operands))})"


class _Replaced(ast.NodeTransformer):
    """Puts terms in the place of names, but for those of operators."""

    def __init__(self, terms: Mapping[str, ast.expr]) -> None:
        self.terms = terms

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.terms.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.Call(node.func, [self.visit(a) for a in node.args], [])


def with_groups(definition: Definition, groups: list[str]) -> ast.expr:
    """Return the program of a composite about other groups of dimensions."""
    names = {old: ast.Name(new) for old, new in zip(definition.groups, groups, strict=True)}
    return _Replaced(names).visit(copy.deepcopy(definition.body))


def _definition(text: str) -> Definition:
    head, _, body = text.partition(" = ")
    call = ast.parse(head, mode="eval").body
    assert isinstance(call, ast.Call)
    names = [ast.unparse(a) for a in call.args]
    groups = tuple(n for n in names if n[0].isupper())
    return Definition(ast.unparse(call.func), groups, tuple(names[len(groups) :]), ast.parse(body, mode="eval").body)


COMPOSITES = {d.name: d for d in map(_definition, DEFINITIONS.replace("\n   ", "").strip().splitlines())}


class _Expanded(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        definition = COMPOSITES.get(ast.unparse(node.func))
        if definition is None:
            return node
        count = len(definition.groups)
        operands = dict(zip(definition.operands, node.args[count:], strict=True))
        body = with_groups(definition, [ast.unparse(g) for g in node.args[:count]])
        return self.visit(_Replaced(operands).visit(body))


def expanded(term: ast.expr) -> ast.expr:
    """Return a term with each composite operator replaced by its program, into which its operands are substituted."""
    return ast.parse(ast.unparse(_Expanded().visit(ast.parse(ast.unparse(term), mode="eval").body)), mode="eval").body
