"""The Flax layer: dense mathematics under replay and live, born sharded, trained as a scanned stack."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from relibra_jax.capacity import count_capacities, worst_case_capacities
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.execution.gating import GATINGS, balance_loss
from relibra_jax.execution.mesh import expert_mesh, rank_sharding
from relibra_jax.execution.moe import ExpertParallel, LayerExperts
from relibra_jax.nnx.layer import MoELayer, expert_labels, reorder_experts, set_homes
from relibra_jax.plan import check_plan
from relibra_jax.token_split import refit_quota
from relibra_jax.types import EMPTY, Plan, Topology

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)
RANKS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = (2, 4), (2, 5), 8, 6, 16, 2
MESH = expert_mesh(TOPOLOGY)
SAFE = ExpertParallel(mesh=MESH, topology=TOPOLOGY, capacities=worst_case_capacities(10, TOP_K, TOPOLOGY))
GATING = {
    "softmax": dataclasses.replace(GATINGS["gpt-oss"], top_k=TOP_K),
    "sigmoid": dataclasses.replace(GATINGS["deepseek-v3"], top_k=TOP_K, groups=4, top_groups=2),
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(*RANKS, *TOKENS, WIDTH)).astype(np.float32)
COTANGENT = RNG.normal(size=X.shape).astype(np.float32)
MASK = RNG.random((*RANKS, *TOKENS)) < 0.8
REPLAY = RNG.permuted(np.tile(np.arange(EXPERTS) ** 2 // 16, (*RANKS, *TOKENS, 1)), axis=-1)[..., :TOP_K]
REPLAY[..., 1] = np.where(REPLAY[..., 1] == REPLAY[..., 0], 15, REPLAY[..., 1])
REPLAY = REPLAY.astype(np.uint8)


def load_of(ids, mask, experts=EXPERTS):
    """Token copies of each expert at each rank, ``[..., N, G, E]``."""
    flat = np.where(mask[..., None], ids.astype(np.int32), EMPTY).reshape(*ids.shape[:-3], -1)
    return jnp.asarray((flat[..., None] == np.arange(experts)).sum(-2), jnp.int32)


def any_plan(seed, load, topology):
    """A valid plan of ``load[M, L, N, G, E]`` that no planner would choose: homes, replicas and quotas at random. No
    seed: homes in order and nothing else."""
    rng = np.random.default_rng(seed)
    micro_batches, layers, nodes, local, experts = load.shape
    home = np.stack([np.arange(experts) if seed is None else rng.permutation(experts) for _ in range(layers)])
    slot_expert = np.full((micro_batches, layers, nodes, local, topology.slots), EMPTY)
    layout = np.argsort(home, -1).reshape(layers, nodes, local, -1)
    slot_expert[..., : topology.home_slots] = layout
    quota = np.zeros_like(slot_expert)
    for m, row in np.ndindex(micro_batches, layers):
        for n, g in np.ndindex(nodes, local):
            neighbours = np.delete(layout[row, n], g, axis=0).ravel()
            if seed is not None:
                copied = rng.permutation(neighbours)[: topology.replica_slots]
                slot_expert[m, row, n, g, topology.home_slots :] = copied
        for expert, count in enumerate(np.asarray(load)[m, row].sum((0, 1))):
            slots = np.nonzero(slot_expert[m, row] == expert)
            quota[m, row][slots] = rng.multinomial(count, rng.dirichlet(np.ones(len(slots[0]))))
    plan = Plan(*(jnp.asarray(leaf, jnp.int32) for leaf in (slot_expert, home, quota)))
    check_plan(plan, load, topology)
    return plan


def one_layer(plan):
    return Plan(plan.slot_expert[0, 0], plan.home[0], plan.quota[0, 0])


@functools.cache
def replayed():
    """Plan and load of the replay, of one layer in one micro-batch."""
    load = load_of(REPLAY, MASK)
    return one_layer(any_plan(0, load[None, None], TOPOLOGY)), load


@functools.cache
def layer_of(scores):
    layer = MoELayer(
        *(TOPOLOGY, WIDTH, HIDDEN, GATING[scores]),
        shared_width=4 if scores == "sigmoid" else 0,
        home=replayed()[0].home,
        sharding=rank_sharding(MESH),
        rngs=nnx.Rngs(0),
    )
    for bias in (layer.correction_bias, layer.router_bias):
        if bias is not None:
            bias[...] = jnp.asarray(np.random.default_rng(1).normal(size=EXPERTS) * 0.3, jnp.float32)
    return layer


def loss_of(output, logits, scores):
    batch_load = load_of(REPLAY, MASK).sum((0, 1))
    return (output * COTANGENT).sum() + balance_loss(logits, batch_load, GATING[scores], mask=MASK)


@functools.cache
def replay_step(scores):
    """Output and gradients of the layer in replay, with its replicas fetched early."""
    graph, params, rest = nnx.split(layer_of(scores), nnx.Param, ...)

    @jax.jit
    def step(params, x, ids, mask, plan, load):
        def loss(params, x):
            layer = nnx.merge(graph, params, rest)
            experts, x = layer.fetch(x, plan, SAFE)
            output, _, logits = layer(x, ids, plan, load, parallel=SAFE, experts=experts, mask=mask)
            return loss_of(output, logits, scores), output

        (_, output), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return output, *grads

    return functools.partial(step, params)


@functools.cache
def dense(scores):
    """The same in one place, every expert on every token."""
    graph, params, rest = nnx.split(layer_of(scores), nnx.Param, ...)
    gating = GATING[scores]

    def forward(params, x, ids, mask):
        layer = nnx.merge(graph, params, rest)
        logits = x @ layer.router[...]
        if scores == "softmax":
            logits += jnp.broadcast_to(layer.router_bias[...], logits.shape)
            score = jax.nn.softmax(logits)
        else:
            score = jax.nn.sigmoid(logits)
        chosen = jax.nn.one_hot(ids, EXPERTS).sum(-2) * mask[..., None]
        score = score * chosen
        gates = gating.scale * score / jnp.where(mask, score.sum(-1), 1)[..., None]
        weights = layer.experts[...].reshape(EXPERTS, 3, WIDTH, HIDDEN)[layer.home[...]]
        gate, up, down = (weights[:, part] for part in range(3))
        hidden = jax.nn.silu(jnp.einsum("...d,edf->...ef", x, gate)) * jnp.einsum("...d,edf->...ef", x, up)
        output = jnp.einsum("...ef,edf,...e->...d", hidden, down, gates)
        if layer.shared is not None:
            gate, up, down = layer.shared[...]
            output += (jax.nn.silu(x @ gate) * (x @ up)) @ down.T
        return output, logits

    @jax.jit
    def step(params, x, ids, mask):
        def loss(params, x):
            output, logits = forward(params, x, ids, mask)
            return loss_of(output, logits, scores), output

        (_, output), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return output, *grads

    return functools.partial(step, params)


def assert_close(found, wanted):
    """To float32 rounding of sums in another order, relative to the largest value of each leaf."""
    found, wanted = (
        {jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(t)} for t in (found, wanted)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=5e-6 * np.abs(value).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("scores", GATING)
def test_replay_is_the_dense_layer(scores):
    plan, load = replayed()
    found = replay_step(scores)(X, REPLAY, MASK, plan, load)
    wanted = dense(scores)(X, REPLAY, MASK)
    assert_close(found, wanted)
    slopes = {jax.tree_util.keystr(k): np.abs(v).max() for k, v in jax.tree.leaves_with_path(found[1])}
    assert len(slopes) == 3
    assert all(slope > 0 for slope in slopes.values())


def test_a_plan_of_other_homes_is_noticed():
    load = load_of(REPLAY, MASK)
    plan = any_plan(1, load[None, None], TOPOLOGY)
    output, *_ = replay_step("softmax")(
        X, REPLAY, MASK, Plan(plan.slot_expert[0, 0], plan.home[0], plan.quota[0, 0]), load
    )
    assert np.isnan(output).all()


@pytest.mark.parametrize("scores", GATING)
def test_live_routing_is_the_dense_layer_and_can_be_replayed(scores):
    layer = layer_of(scores)
    # Homes alone, and a plan made for other loads.
    plan = None if scores == "softmax" else replayed()[0]
    live = nnx.jit(lambda layer, x, plan: layer(x, plan=plan, parallel=SAFE, mask=MASK))
    output, ids, logits = live(layer, X, plan)
    assert ids.dtype == np.uint8
    assert ids.shape == (*RANKS, *TOKENS, TOP_K)
    assert logits.dtype == np.float32
    assert_close(output, dense(scores)(X, ids, MASK)[0])
    # Any plan of the recorded ids gives the same: here their own load, under the replay's homes.
    load = load_of(np.asarray(ids), MASK)
    plan = refit_quota(replayed()[0], load, TOPOLOGY)
    assert_close(replay_step(scores)(X, ids, MASK, plan, load)[0], output)


def test_counting_first_needs_less_than_the_safe_sizes():
    layer, plan = layer_of("sigmoid"), replayed()[0]
    ids, _ = nnx.jit(lambda layer, x: layer.route(x))(layer, X)
    load = load_of(np.asarray(ids), MASK)
    plan = refit_quota(plan, load, TOPOLOGY)
    batch = Plan(plan.slot_expert[None, None], plan.home[None], plan.quota[None, None])
    sizes = count_capacities(batch, load[None, None], TOPOLOGY)
    assert sizes.rows < SAFE.capacities.rows
    counted = dataclasses.replace(SAFE, capacities=sizes)
    run = nnx.jit(lambda layer, *replayed, **how: layer(*replayed, **how, mask=MASK).output)
    replayed_output = run(layer, X, ids, plan, load, parallel=counted)
    np.testing.assert_allclose(replayed_output, run(layer, X, parallel=SAFE), atol=2e-6)


def test_ids_that_are_not_the_loads_are_noticed():
    plan, load = replayed()
    output, *_ = replay_step("softmax")(X, REPLAY, np.ones_like(MASK), plan, load)
    assert np.isnan(output).any()


def test_weights_of_an_expert_do_not_depend_on_ranks_or_homes():
    alone = Topology(num_nodes=1, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0)
    one = MoELayer(alone, WIDTH, HIDDEN, GATING["softmax"], rngs=nnx.Rngs(0))
    many = layer_of("softmax")
    np.testing.assert_allclose(
        one.experts[...].reshape(EXPERTS, -1),
        many.experts[...].reshape(EXPERTS, -1)[replayed()[0].home],
        rtol=1e-6,
    )
    np.testing.assert_allclose(one.router[...], many.router[...], rtol=1e-6)
    assert np.std(one.experts[...][..., 0, :, :]) == pytest.approx(WIDTH**-0.5, rel=0.2)
    assert np.std(one.experts[...][..., 2, :, :]) == pytest.approx(HIDDEN**-0.5, rel=0.2)
    assert many.experts.sharding == rank_sharding(MESH)
    assert {leaf.sharding.is_fully_replicated for leaf in (many.router, many.home)} == {True}


def test_dtypes():
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology, devices=jax.devices()[:1]),
        topology=topology,
        capacities=worst_case_capacities(4, TOP_K, topology),
    )
    layer = MoELayer(
        *(topology, WIDTH, HIDDEN, GATING["softmax"]), dtype=jnp.bfloat16, shared_width=4, rngs=nnx.Rngs(0)
    )
    # A residual stream in float32 around a layer that computes in bfloat16.
    x = jax.ShapeDtypeStruct((1, 1, 4, WIDTH), jnp.float32)
    output, ids, logits = jax.eval_shape(functools.partial(layer, parallel=parallel), x)
    assert layer.experts.dtype == jnp.float32
    assert (output.dtype, ids.dtype, logits.dtype) == (jnp.bfloat16, jnp.uint8, jnp.float32)


def test_misfits_are_refused_before_anything_is_compiled():
    layer, (plan, load) = layer_of("softmax"), replayed()
    call = functools.partial(jax.eval_shape, functools.partial(layer, parallel=SAFE))
    ids = REPLAY.astype(np.int32)
    with pytest.raises(ValueError, match=r"x: expected shape \(2, 4, 2, 5, 8\), found \(2, 4, 2, 5, 7\)"):
        call(X[..., :7])
    with pytest.raises(ValueError, match=r"x: expected .* found shape \(2, 4, 8\)"):
        call(X[:, :, 0, 0])
    with pytest.raises(ValueError, match=r"expert_ids: .*\(2, 4, 2, 5, 2\), found \(2, 4, 2, 5, 3\)"):
        call(X, np.concatenate([ids, ids[..., :1]], -1), plan, load)
    with pytest.raises(ValueError, match="expert_ids: expected integers that hold 15, found float32"):
        call(X, ids.astype(np.float32), plan, load)
    with pytest.raises(ValueError, match=r"load of shape .* without expert_ids"):
        call(X, None, plan, load)
    with pytest.raises(ValueError, match=r"plan.slot_expert: .*\(2, 4, 4\), found \(2, 4, 3\)"):
        call(X, ids, plan._replace(slot_expert=plan.slot_expert[..., :3]), load)
    with pytest.raises(ValueError, match=r"load: .*\(2, 4, 16\), found \(2, 4, 15\)"):
        call(X, ids, plan, load[..., :15])
    with pytest.raises(ValueError, match=r"mask: .*found \(2, 4, 2\)"):
        call(X, ids, plan, load, mask=MASK[..., 0])
    rounded = LayerExperts(*(jnp.zeros((2, 4, 2, 3, WIDTH, HIDDEN), jnp.bfloat16),) * 2)
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        call(X, ids, plan, load, experts=rounded)
    other = dataclasses.replace(TOPOLOGY, num_nodes=4, ranks_per_node=2)
    elsewhere = dataclasses.replace(SAFE, mesh=expert_mesh(other), topology=other)
    with pytest.raises(
        ValueError, match=r"expert weights: .*\(4, 2, 2, 3, 8, 6\), found \(2, 4, 2, 3, 8, 6\)"
    ):
        jax.eval_shape(functools.partial(layer, parallel=elsewhere), X.reshape(4, 2, *X.shape[2:]))
    with pytest.raises(ValueError, match="top_k=8 of 4 experts"):
        MoELayer(
            dataclasses.replace(TOPOLOGY, ranks_per_node=1, num_experts=4),
            *(WIDTH, HIDDEN, GATINGS["qwen3-moe"]),
            rngs=nnx.Rngs(0),
        )


class Twin(nnx.Module):
    """Two layers in a list and two that are stacked."""

    def __init__(self, topology, sharding):
        gating = dataclasses.replace(GATINGS["glm-4.5"], top_k=TOP_K)

        def layer(rngs):
            return MoELayer(topology, 4, 3, gating, shared_width=2, sharding=sharding, rngs=rngs)

        self.apart = nnx.List([layer(nnx.Rngs(seed)) for seed in range(2)])
        self.stacked = nnx.vmap(layer)(nnx.Rngs(2).split(2))


def test_labels_find_the_experts_and_nothing_else():
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:1])
    model = Twin(topology, rank_sharding(mesh))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    labels = expert_labels(nnx.state(model, nnx.Param))

    def found(labels):
        return {jax.tree_util.keystr(path): label for path, label in jax.tree.leaves_with_path(labels)}

    experts = {
        "['apart'][0]['experts']": 0,
        "['apart'][1]['experts']": 1,
        "['stacked']['experts']": range(2, 4),
    }
    assert found(labels) == experts
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 9
    state = found(optimizer_layers(optimizer.tx, optimizer.opt_state, labels))
    assert state == {f"[0].{moment}{path}.value": v for moment in ("mu", "nu") for path, v in experts.items()}

    # Layers in a list and stacked ones move by the same rows of homes.
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    home = np.stack([np.roll(np.arange(4), layer) for layer in range(4)])
    with pytest.raises(ValueError, match="old_home has 4 layers, new_home 3"):
        reorder_experts(model, optimizer, home[:3], mesh=mesh, topology=topology)
    reorder_experts(model, None, home, mesh=mesh, topology=topology)
    after = jax.tree.leaves(nnx.state(model, nnx.Param))
    moved = {0: home[0], 3: home[1], 6: home[2:]}
    for leaf, (old, new) in enumerate(zip(before, after, strict=True)):
        if leaf in moved:
            new = np.take_along_axis(new.reshape(*moved[leaf].shape, -1), moved[leaf][..., None], axis=-2)
        np.testing.assert_array_equal(new.reshape(old.shape), old)
    np.testing.assert_array_equal(model.apart[1].home[...], home[1])
    np.testing.assert_array_equal(model.stacked.home[...], home[2:])


# A stack of two layers over two data-parallel groups.
LAYERS = 2
SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
GROUPS = expert_mesh(SMALL, data=2)
PARALLEL = ExpertParallel(
    mesh=GROUPS, topology=SMALL, capacities=worst_case_capacities(6, TOP_K, SMALL), groups=("data",)
)
STACK_X, STACK_TARGET = RNG.normal(size=(2, 2, 2, 2, 6, 4)).astype(np.float32)


@nnx.jit
def train_step(model, optimizer, ids, plan, load):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def block(x, layer):
        params, rest, ids, plan, load = layer
        moe = nnx.merge(graph, params, rest)
        return x + moe(jnp.tanh(x), ids, plan, load, parallel=PARALLEL).output, None

    def loss(params):
        out, _ = jax.lax.scan(block, STACK_X, (params, rest, ids, plan, load))
        return jnp.square(out - STACK_TARGET).mean()

    value, grads = jax.value_and_grad(loss)(params)
    optimizer.update(model, grads)
    return value


def train(*, planned):
    """Three updates, each with new routing: experts, first moments, router and losses, by expert id."""
    gating = dataclasses.replace(GATINGS["glm-4.5"], top_k=TOP_K)

    @nnx.vmap
    def stack(rngs):
        return MoELayer(SMALL, 4, 3, gating, shared_width=2, sharding=rank_sharding(GROUPS), rngs=rngs)

    model = stack(nnx.Rngs(0).split(LAYERS))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    # Counters start on one device and end on all, which would cost a second compilation.
    nnx.update(optimizer, jax.tree.map(on_all, nnx.state(optimizer)))
    losses = []
    for batch in range(3):
        ids = np.random.default_rng(batch).integers(0, 7, (LAYERS, *STACK_X.shape[:-1], TOP_K))
        ids[..., 1] = np.where(ids[..., 1] == ids[..., 0], 7, ids[..., 1])
        load = load_of(ids[..., None, :], np.ones((*ids.shape[:-1], 1), bool), 8)
        # To a planner the groups are micro-batches of the batch: [data, L, N, G, E].
        plan = any_plan(batch if planned else None, jnp.swapaxes(load, 0, 1), SMALL)
        reorder_experts(model, optimizer, plan.home, mesh=GROUPS, topology=SMALL)
        plan = Plan(jnp.swapaxes(plan.slot_expert, 0, 1), plan.home, jnp.swapaxes(plan.quota, 0, 1))
        losses.append(train_step(model, optimizer, ids, plan, load))
    home = np.asarray(model.home[...])

    def by_expert(leaf):
        return np.stack([rows.reshape(8, -1)[home] for rows, home in zip(leaf[...], home, strict=True)])

    return {
        "losses": np.array(losses),
        "router": model.router[...],
        "experts": by_expert(model.experts),
        "moments": by_expert(optimizer.opt_state[0].mu["experts"]),
    }, home


def on_all(leaf):
    named = isinstance(leaf.sharding, NamedSharding)
    return leaf if named else jax.device_put(leaf, NamedSharding(GROUPS, PartitionSpec()))


def test_training_with_plans_and_reorders_is_training_without():
    found, home = train(planned=True)
    wanted, at_birth = train(planned=False)
    assert (home != at_birth).any()
    assert (np.abs(wanted["moments"]).max((1, 2)) > 0).all()
    assert_close(found, wanted)


def test_homes_of_another_model_are_refused():
    layer = nnx.clone(layer_of("softmax"))
    home = np.roll(np.arange(EXPERTS, dtype=np.int32), 3)
    for wrong in ([home] * 3, np.zeros((0, EXPERTS), np.int32), [home[:4]]):
        shape = re.escape(str(np.shape(wrong)))
        with pytest.raises(ValueError, match=rf"homes of shape {shape} for 1 MoE layers of 16 experts"):
            set_homes(layer, np.asarray(wrong))
    set_homes(layer, home[None])
    np.testing.assert_array_equal(layer.home[...], home)
