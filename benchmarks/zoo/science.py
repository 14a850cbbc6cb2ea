"""Differential equations, graphs, probability and quantum states."""

# pyright: reportMissingImports=false

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.entry import Case, Pick, entry, integers, key, normal


@entry("diffrax", "neural ODE")
def neural_ode(pick: Pick) -> Case:
    import diffrax
    import equinox as eqx

    size, width, batch, steps = pick(64, 4), pick(512, 16), pick(4096, 8), pick(64, 4)

    def build() -> Any:
        return eqx.nn.MLP(size, size, width, 2, jax.nn.softplus, key=key())

    static = eqx.partition(eqx.filter_eval_shape(build), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]
    times = jnp.linspace(0, 1, steps)

    def loss(weights: Any, start: jax.Array, observed: jax.Array) -> jax.Array:
        field = eqx.combine(weights, static)

        def solve(y: jax.Array) -> Any:
            term, control = diffrax.ODETerm(lambda t, y, args: field(y)), diffrax.PIDController(rtol=1e-3, atol=1e-6)
            at = diffrax.SaveAt(ts=times)
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.1, y, saveat=at, stepsize_controller=control).ys

        return jnp.mean((jax.vmap(solve)(start) - observed) ** 2)

    def arguments() -> tuple[Any, ...]:
        return eqx.filter(build(), eqx.is_array), normal(batch, size), normal(batch, steps, size, seed=3)

    return loss, arguments


@entry("diffrax", "neural controlled differential equation")
def neural_cde(pick: Pick) -> Case:
    import diffrax
    import equinox as eqx

    hidden, channels, batch, steps = pick(64, 4), pick(16, 3), pick(1024, 8), pick(128, 8)

    def build() -> Any:
        return eqx.nn.MLP(hidden, hidden * channels, pick(256, 8), 1, jax.nn.softplus, jnp.tanh, key=key())

    static = eqx.partition(eqx.filter_eval_shape(build), lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def loss(weights: Any, path: jax.Array, label: jax.Array) -> jax.Array:
        field = eqx.combine(weights, static)

        def solve(values: jax.Array) -> jax.Array:
            times = jnp.linspace(0, 1, steps)
            control = diffrax.CubicInterpolation(times, diffrax.backward_hermite_coefficients(times, values))
            term = diffrax.ControlTerm(lambda t, y, args: field(y).reshape(hidden, channels), control).to_ode()
            solution = diffrax.diffeqsolve(term, diffrax.Heun(), 0, 1, 1 / steps, jnp.ones(hidden))
            return jnp.sum(solution.ys[-1])

        return jnp.mean(jax.nn.softplus(-label * jax.vmap(solve)(path)))

    def arguments() -> tuple[Any, ...]:
        return eqx.filter(build(), eqx.is_array), normal(batch, steps, channels), jnp.sign(normal(batch, seed=3))

    return loss, arguments


@entry("numpyro", "variational inference of a Bayesian logistic regression")
def logistic_regression(pick: Pick) -> Case:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import Trace_ELBO, autoguide

    rows, columns = pick(524288, 16), pick(512, 8)

    def model(x: jax.Array, y: jax.Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(columns), 1).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 10.0))
        with numpyro.plate("rows", rows):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weights + bias), obs=y)

    guide = autoguide.AutoNormal(model)
    names = {"weights": (columns,), "bias": ()}

    def loss(params: Any, x: jax.Array, y: jax.Array, seed: jax.Array) -> jax.Array:
        return Trace_ELBO(num_particles=pick(8, 2)).loss(seed, params, model, guide, x, y)

    def arguments() -> tuple[Any, ...]:
        x, y = normal(rows, columns), integers(2, rows).astype(jnp.float32)
        params = {}
        for name, shape in names.items():
            params |= {f"{name}_auto_loc": jnp.zeros(shape), f"{name}_auto_scale": jnp.full(shape, 0.1)}
        return params, x, y, key()

    def start() -> None:
        with numpyro.handlers.seed(rng_seed=0):
            guide(jnp.zeros((rows, columns)), jnp.zeros(rows))

    jax.eval_shape(start)
    return loss, arguments


@entry("e3nn-jax", "equivariant messages along edges")
def equivariant(pick: Pick) -> Case:
    import e3nn_jax as e3nn

    inner = e3nn.Irreps(pick("64x0e + 64x1o + 32x2e", "4x0e + 4x1o"))
    nodes, edges = pick(8192, 16), pick(131072, 64)
    harmonics = e3nn.Irreps("0e + 1o + 2e")
    linear = e3nn.flax.Linear(inner)

    def message(x: Any, positions: jax.Array, senders: jax.Array, receivers: jax.Array) -> Any:
        offsets = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        sent = e3nn.tensor_product(x[senders], e3nn.spherical_harmonics(harmonics, offsets, True))
        return e3nn.scatter_sum(sent, dst=receivers, output_size=nodes)

    def loss(weights: Any, x: jax.Array, *graph: jax.Array) -> jax.Array:
        out = linear.apply(weights, message(e3nn.IrrepsArray(inner, x), *graph))
        return jnp.mean(e3nn.norm(out, squared=True).array)

    def arguments() -> tuple[Any, ...]:
        graph = normal(nodes, 3), integers(nodes, edges), integers(nodes, edges, seed=3)
        x = normal(nodes, inner.dim)
        return linear.init(key(), message(e3nn.IrrepsArray(inner, x), *graph)), x, *graph

    return loss, arguments


@entry("jraph", "GraphNetwork of three steps")
def graph_network(pick: Pick) -> Case:
    import haiku as hk
    import jraph

    nodes, edges, width = pick(65536, 16), pick(524288, 64), pick(256, 8)

    def update(*parts: jax.Array) -> jax.Array:
        return hk.nets.MLP([width, width])(jnp.concatenate(parts, -1))

    def forward(graph: Any) -> Any:
        for _ in range(3):
            step = jraph.GraphNetwork(lambda e, s, r, g: update(e, s, r), lambda n, s, r, g: update(n, s, r))
            graph = step(graph)
        return graph

    network = hk.without_apply_rng(hk.transform(forward))

    def loss(weights: Any, graph: Any, target: jax.Array) -> jax.Array:
        return jnp.mean((network.apply(weights, graph).nodes - target) ** 2)

    def arguments() -> tuple[Any, ...]:
        graph = jraph.GraphsTuple(
            nodes=normal(nodes, width),
            edges=normal(edges, width, seed=3),
            senders=integers(nodes, edges),
            receivers=integers(nodes, edges, seed=4),
            globals=None,
            n_node=jnp.array([nodes]),
            n_edge=jnp.array([edges]),
        )
        return network.init(jax.random.PRNGKey(0), graph), graph, normal(nodes, width, seed=5)

    return loss, arguments


@entry("netket", "energy gradient of a restricted Boltzmann machine")
def quantum_state(pick: Pick) -> Case:
    """Variational Monte Carlo's surrogate: the covariance of local energies with the log-amplitudes of samples."""
    import netket as nk

    sites, samples = pick(1024, 8), pick(16384, 16)
    network = nk.models.RBM(alpha=pick(4, 2), param_dtype=float)

    def loss(weights: Any, sigma: jax.Array) -> jax.Array:
        amplitude = partial(network.apply, weights)
        flips = 1 - 2 * jnp.eye(sites)
        ratios = jax.lax.map(lambda f: jnp.exp(amplitude(sigma * f) - amplitude(sigma)), flips)
        local = -jnp.sum(sigma * jnp.roll(sigma, 1, -1), -1) - jnp.sum(ratios, 0)
        local = jax.lax.stop_gradient(local - jnp.mean(local))
        return 2 * jnp.mean(local * amplitude(sigma))

    def arguments() -> tuple[Any, ...]:
        sigma = 2.0 * integers(2, samples, sites) - 1
        return network.init(key(), sigma[:1]), sigma

    return loss, arguments


@entry("distrax", "masked coupling flow with rational-quadratic splines")
def spline_flow(pick: Pick) -> Case:
    import distrax
    import haiku as hk

    width, bins, batch = pick(64, 4), 8, pick(65536, 16)

    def forward(x: jax.Array) -> jax.Array:
        layers = []
        for k in range(pick(8, 2)):
            shape = hk.Sequential([
                hk.nets.MLP([pick(512, 16)] * 2, activate_final=True),
                hk.Linear(width * (3 * bins + 1)), hk.Reshape((width, 3 * bins + 1), preserve_dims=-1),
            ])  # fmt: skip
            spline = partial(distrax.RationalQuadraticSpline, range_min=-5.0, range_max=5.0)
            layers.append(distrax.MaskedCoupling(jnp.arange(width) % 2 == k % 2, shape, spline))
        base = distrax.Independent(distrax.Normal(jnp.zeros(width), jnp.ones(width)), 1)
        return -jnp.mean(distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x))

    network = hk.without_apply_rng(hk.transform(forward))
    return network.apply, lambda: (network.init(jax.random.PRNGKey(0), normal(batch, width)), normal(batch, width))


@entry("ott-jax", "Sinkhorn divergence of a generator's samples")
def sinkhorn(pick: Pick) -> Case:
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    samples, width = pick(8192, 16), pick(256, 4)

    def loss(weights: Any, noise: jax.Array, data: jax.Array) -> jax.Array:
        generated = jnp.tanh(noise @ weights["up"]) @ weights["down"]
        return sinkhorn_divergence.sinkhorn_divergence(pointcloud.PointCloud, generated, data, epsilon=1.0)[0]

    def arguments() -> tuple[Any, ...]:
        weights = {"up": normal(width, 4 * width), "down": normal(4 * width, width, seed=3) / 8}
        return weights, normal(samples, width, seed=4), normal(samples, width, seed=5)

    return loss, arguments


@entry("dynamax", "hidden Markov model, marginal likelihood")
def hidden_markov(pick: Pick) -> Case:
    from dynamax.hidden_markov_model import GaussianHMM

    states, width, batch, steps = pick(64, 4), pick(16, 2), pick(1024, 8), pick(512, 8)
    model = GaussianHMM(states, width)

    def loss(params: Any, observed: jax.Array) -> jax.Array:
        return -jnp.mean(jax.vmap(lambda y: model.marginal_log_prob(params, y))(observed))

    return loss, lambda: (model.initialize(key())[0], normal(batch, steps, width))


@entry("blackjax", "mean-field variational inference")
def mean_field(pick: Pick) -> Case:
    from blackjax.vi import meanfield_vi

    width, data = pick(1024, 8), pick(262144, 16)

    def loss(params: Any, x: jax.Array, y: jax.Array, seed: jax.Array) -> jax.Array:
        def density(w: jax.Array) -> jax.Array:
            return -0.5 * jnp.sum(w**2) - jnp.sum(jax.nn.softplus(-y * (x @ w)))

        state = meanfield_vi.MFVIState(params["mu"], params["rho"], None)
        z = meanfield_vi.sample(seed, state, pick(16, 4))
        guide = jax.vmap(meanfield_vi.generate_meanfield_logdensity(params["mu"], params["rho"]))
        return jnp.mean(guide(z) - jax.vmap(density)(z))

    def arguments() -> tuple[Any, ...]:
        params = {"mu": jnp.zeros(width), "rho": jnp.full(width, -2.0)}
        return params, normal(data, width), jnp.sign(normal(data, seed=3)), key()

    return loss, arguments


@entry("tokamax", "layer norm, attention and gated linear unit")
def tokamax_layer(pick: Pick) -> Case:
    import tokamax

    batch, length, width, heads = pick(64, 8), pick(1024, 16), pick(2048, 32), pick(16, 4)

    def loss(weights: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        y = tokamax.layer_norm(x, weights["scale"], weights["offset"])
        q, k, v = jnp.moveaxis((y @ weights["qkv"]).reshape(batch, length, 3, heads, width // heads), 2, 0)
        x = x + tokamax.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]
        gated = tokamax.gated_linear_unit(x, weights["gate"], activation=jax.nn.swish)
        return jnp.mean((x + gated @ weights["down"] - target) ** 2)

    def arguments() -> tuple[Any, ...]:
        weights = {
            "scale": jnp.ones(width),
            "offset": jnp.zeros(width),
            "qkv": normal(width, 3 * width) / width**0.5,
            "out": normal(width, width, seed=3) / width**0.5,
            "gate": normal(width, 2, 4 * width, seed=4) / width**0.5,
            "down": normal(4 * width, width, seed=5) / width**0.5,
        }
        return weights, normal(batch, length, width, seed=6), normal(batch, length, width, seed=7)

    return loss, arguments


def _forces(energy: Any, weights: Any, positions: jax.Array, *rest: Any) -> jax.Array:
    """The mean square of energies and of forces, for targets of zero: a potential is trained on both."""
    energies, gradients = jax.vmap(jax.value_and_grad(energy, 1), (None, 0, *(0 for _ in rest)))(weights, positions, *rest)
    return jnp.mean(energies**2) / positions.shape[1] + jnp.mean(gradients**2)


@entry("jax-md", "graph network potential on neighbour lists, energies and forces")
def potential(pick: Pick) -> Case:
    from flax import nnx
    from jax_md import energy, partition, space

    batch, atoms, neighbours, width = pick(512, 8), pick(64, 8), pick(32, 4), pick(128, 8)
    sizes = {"n_recurrences": 2, "mlp_sizes": (width, width), "format": partition.Dense}
    displacement = space.periodic(10.0)[0]

    def build() -> Any:
        return energy.graph_network_neighbor_list(displacement, 10.0, 3.0, 0.0, key=key(), **sizes)[1].model

    graph = nnx.split(nnx.eval_shape(build))[0]

    def molecule(state: Any, positions: jax.Array, index: jax.Array) -> jax.Array:
        error = partition.PartitionError(jnp.zeros((), jnp.uint8))
        lists: Any = partition.NeighborList(index, positions, error, None, neighbours, partition.Dense, None, None, None)
        return jnp.sum(nnx.merge(graph, state)(positions, lists))

    def loss(state: Any, positions: jax.Array, index: jax.Array) -> jax.Array:
        return _forces(molecule, state, positions, index)

    def arguments() -> tuple[Any, ...]:
        positions = jax.random.uniform(key(1), (batch, atoms, 3), maxval=10.0)
        return nnx.split(build())[1], positions, integers(atoms, batch, atoms, neighbours)

    return loss, arguments


@entry("e3x", "equivariant message passing, energies and forces (its example)")
def message_passing(pick: Pick) -> Case:
    import e3x
    import flax.linen as nn

    batch, atoms, features, degree = pick(1024, 8), pick(9, 4), pick(64, 4), pick(2, 1)
    receivers, senders = e3x.ops.sparse_pairwise_indices(atoms)

    class Potential(nn.Module):
        @nn.compact
        def __call__(self, positions: jax.Array, numbers: jax.Array) -> jax.Array:
            offsets = positions[senders] - positions[receivers]
            radial = {"radial_fn": e3x.nn.reciprocal_bernstein, "cutoff_fn": partial(e3x.nn.smooth_cutoff, cutoff=5.0)}
            basis = e3x.nn.basis(offsets, num=8, max_degree=degree, **radial)
            x = e3x.nn.Embed(num_embeddings=32, features=features)(numbers)
            for last in (False, False, True):
                pair = {"dst_idx": receivers, "src_idx": senders}
                step = e3x.nn.MessagePass(max_degree=0, include_pseudotensors=False) if last else e3x.nn.MessagePass()
                y = step(x, basis, **pair)
                x = e3x.nn.add(e3x.nn.change_max_degree_or_type(x, max_degree=0, include_pseudotensors=False) if last else x, y)
                x = e3x.nn.add(x, e3x.nn.Dense(features)(e3x.nn.silu(e3x.nn.Dense(features)(x))))
            return jnp.sum(nn.Dense(1, use_bias=False)(x))

    network = Potential()

    def loss(weights: Any, positions: jax.Array, numbers: jax.Array) -> jax.Array:
        return _forces(network.apply, weights, positions, numbers)

    def arguments() -> tuple[Any, ...]:
        positions, numbers = 2 * normal(batch, atoms, 3), integers(9, batch, atoms)
        return network.init(key(), positions[0], numbers[0]), positions, numbers

    return loss, arguments


@entry("dinosaur", "a learned correction of the shallow-water equations on the sphere")
def shallow_water(pick: Pick) -> Case:
    from dinosaur import coordinate_systems, layer_coordinates, shallow_water, spherical_harmonic, time_integration, units

    layers, batch, steps, width = pick(8, 2), pick(64, 4), pick(16, 2), pick(256, 8)
    grid = pick(spherical_harmonic.Grid.T85, lambda: spherical_harmonic.Grid.with_wavenumbers(6))()
    coordinates = coordinate_systems.CoordinateSystem(grid, layer_coordinates.LayerCoordinates(layers))
    equations = shallow_water.ShallowWaterEquations(
        coordinates, units.SimUnits.from_si(), np.zeros(grid.modal_shape), 0.1 * np.ones(layers), np.ones(layers)
    )
    step = time_integration.imex_rk_sil3(equations, 1e-3)

    def corrected(weights: Any, state: Any) -> Any:
        state = step(state)
        nodal = grid.to_nodal(state.potential)
        hidden = jax.nn.gelu(jnp.einsum("lxy,lw->xyw", nodal, weights["up"]))
        change = grid.to_modal(jnp.einsum("xyw,wl->lxy", hidden, weights["down"]))
        return shallow_water.State(state.vorticity, state.divergence, state.potential + change)

    def loss(weights: Any, vorticity: jax.Array, potential: jax.Array, target: jax.Array) -> jax.Array:
        def rollout(vorticity: jax.Array, potential: jax.Array) -> jax.Array:
            start = shallow_water.State(vorticity, jnp.zeros_like(vorticity), potential)
            return time_integration.repeated(partial(corrected, weights), steps)(start).potential

        return jnp.mean((jax.vmap(rollout)(vorticity, potential) - target) ** 2)

    def arguments() -> tuple[Any, ...]:
        weights = {"up": normal(layers, width), "down": 1e-3 * normal(width, layers, seed=3)}
        return weights, *(1e-2 * normal(batch, layers, *grid.modal_shape, seed=seed) for seed in (4, 5, 6))

    return loss, arguments
