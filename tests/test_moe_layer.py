"""Tests of the Flax layer: it equals the dense layer in replay and live, starts sharded, and trains as a stack."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.dense import assert_close as assert_within
from support.dense import mixture
from support.plans import compiled_planner, load_of, random_plan

from relibra_jax.contract.types import EMPTY, Topology, layer_plans
from relibra_jax.execution import ExpertParallel, LayerExperts, expert_mesh, optimizer_layers, rank_sharding
from relibra_jax.execution.gating import GATINGS, balance_loss
from relibra_jax.nnx import ExpertParam, MoELayer, expert_labels, reorder_experts, set_homes
from relibra_jax.routing.sizes import count_capacities
from relibra_jax.routing.split import refit_quota

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)
SHAPE, WIDTH, HIDDEN, EXPERTS, TOP_K = (16, 5), 8, 6, 16, 2
MESH = expert_mesh(TOPOLOGY)
PARALLEL = ExpertParallel(mesh=MESH, topology=TOPOLOGY)
GATING = {
    "softmax": dataclasses.replace(GATINGS["gpt-oss"], top_k=TOP_K),
    "sigmoid": dataclasses.replace(GATINGS["deepseek-v3"], top_k=TOP_K, expert_groups=4, top_expert_groups=2),
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(*SHAPE, WIDTH)).astype(np.float32)
COTANGENT = RNG.normal(size=X.shape).astype(np.float32)
MASK = RNG.random(SHAPE) < 0.8
REPLAY = RNG.permuted(np.tile(np.arange(EXPERTS) ** 2 // 16, (*SHAPE, 1)), axis=-1)[..., :TOP_K]
REPLAY[..., 1] = np.where(REPLAY[..., 1] == REPLAY[..., 0], 15, REPLAY[..., 1])
REPLAY = REPLAY.astype(np.uint8)
assert_close = functools.partial(assert_within, tolerance=5e-6)


def loads(ids, mask, topology=TOPOLOGY):
    """Return the token copies ``[N, G, E]`` of ids ``[B, T, K]`` whose sequences are on the ranks in order."""
    ids = np.where(mask[..., None], np.asarray(ids, np.int32), EMPTY)
    return load_of(ids.reshape(topology.num_ranks, -1, ids.shape[-1]), topology)


def any_plan(seed, load, topology=TOPOLOGY):
    """Layer plans of ``load[M, L, N, G, E]`` that no planner would choose."""
    return layer_plans(random_plan(np.random.default_rng(seed), load, topology), load)


@functools.cache
def replayed():
    """Return the layer plan of the replay."""
    return any_plan(0, loads(REPLAY, MASK)[None, None]).layer(0).layer(0)


@functools.cache
def layer_of(scores):
    layer = MoELayer(
        *(TOPOLOGY, WIDTH, HIDDEN, GATING[scores]),
        shared_width=4 if scores == "sigmoid" else 0,
        home=replayed().home,
        mesh=MESH,
        rngs=nnx.Rngs(0),
    )
    for bias in (layer.correction_bias, layer.router_bias):
        if bias is not None:
            bias[...] = jnp.asarray(np.random.default_rng(1).normal(size=EXPERTS) * 0.3, jnp.float32)
    return layer


def loss_of(output, logits, scores):
    batch_load = loads(REPLAY, MASK).sum((0, 1))
    return (output * COTANGENT).sum() + balance_loss(logits, batch_load, GATING[scores], mask=MASK)


@functools.cache
def replay_step(scores):
    """Return the output and gradients of the layer in replay, with its replicas fetched early."""
    graph, params, rest = nnx.split(layer_of(scores), nnx.Param, ...)

    @jax.jit
    def step(params, x, ids, mask, plan):
        def loss(params, x):
            layer = nnx.merge(graph, params, rest)
            experts, x = layer.fetch(x, plan, PARALLEL)
            output, _, logits, _ = layer(x, ids, plan, parallel=PARALLEL, experts=experts, mask=mask)
            return loss_of(output, logits, scores), output

        (_, output), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return output, *grads

    return functools.partial(step, params)


@functools.cache
def dense(scores):
    """Return the output and gradients of the dense reference, which runs every expert on every token."""
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
        chosen = jnp.take_along_axis(score, jnp.asarray(ids, jnp.int32), -1)
        gates = gating.scale * chosen / chosen.sum(-1, keepdims=True)
        weights = layer.experts[...].reshape(EXPERTS, 3, WIDTH, HIDDEN)[layer.home[...]]
        output = mixture(x, jnp.asarray(ids, jnp.int32), jnp.where(mask[..., None], gates, 0), weights)
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


SCORES = ["softmax", pytest.param("sigmoid", marks=pytest.mark.long)]
assert {"softmax", "sigmoid"} == set(GATING)


@pytest.mark.parametrize("scores", SCORES)
def test_moe_layer_with_replay_equals_the_dense_layer(scores):
    actual = replay_step(scores)(X, REPLAY, MASK, replayed())
    desired = dense(scores)(X, REPLAY, MASK)
    assert_close(actual, desired)
    slopes = {jax.tree_util.keystr(k): np.abs(v).max() for k, v in jax.tree.leaves_with_path(actual[1])}
    assert len(slopes) == 3
    assert all(slope > 0 for slope in slopes.values())


def test_moe_layer_is_nan_under_a_plan_of_other_homes():
    plan = any_plan(1, loads(REPLAY, MASK)[None, None]).layer(0).layer(0)
    output, grads, _ = replay_step("softmax")(X, REPLAY, MASK, plan)
    assert np.isnan(output).all()
    assert np.isnan(grads["router"][...]).any()


@pytest.mark.slow
@pytest.mark.parametrize("scores", SCORES)
def test_moe_layer_live_equals_the_dense_layer_and_its_replay(scores):
    layer = layer_of(scores)
    # Home slots only, and a plan that was made for other loads.
    plan = None if scores == "softmax" else replayed()._replace(load=None)

    @nnx.jit
    def live(layer, x, plan):
        experts, x = layer.fetch(x, plan, PARALLEL)
        return layer(x, plan=plan, parallel=PARALLEL, experts=experts, mask=MASK)

    output, ids, logits, _ = live(layer, X, plan)
    assert ids.dtype == np.uint8
    assert ids.shape == (*SHAPE, TOP_K)
    assert logits.dtype == np.float32
    assert_close(output, dense(scores)(X, ids, MASK)[0])
    # Any plan gives the same result, here one for the load of the live ids with the replay's homes.
    plan = refit_quota(replayed(), loads(ids, MASK), TOPOLOGY)
    assert_close(replay_step(scores)(X, ids, MASK, plan)[0], output)


@pytest.mark.slow
def test_route_counted_first_needs_smaller_buffers():
    layer = layer_of("sigmoid")
    ids, _ = nnx.jit(lambda layer, x: layer.route(x))(layer, X)
    plan = refit_quota(replayed(), loads(ids, MASK), TOPOLOGY)
    sizes = count_capacities(jax.tree.map(lambda leaf: leaf[None, None], plan), TOPOLOGY)
    assert sizes.rows < PARALLEL.token_exchanges(10, TOP_K)[1]
    counted = dataclasses.replace(PARALLEL, capacities=sizes)
    run = nnx.jit(lambda layer, *replayed, **how: layer(*replayed, **how, mask=MASK).output)
    np.testing.assert_allclose(
        run(layer, X, ids, plan, parallel=counted), run(layer, X, parallel=PARALLEL), atol=2e-6
    )


def test_moe_layer_is_nan_for_ids_of_another_load():
    output, *_ = replay_step("softmax")(X, REPLAY, np.ones_like(MASK), replayed())
    assert np.isnan(output).any()


def test_moe_layer_initial_weights_do_not_depend_on_ranks_or_homes():
    alone = Topology(num_nodes=1, ranks_per_node=1, num_experts=EXPERTS, replica_slots=0)
    one = MoELayer(alone, WIDTH, HIDDEN, GATING["softmax"], rngs=nnx.Rngs(0))
    many = layer_of("softmax")
    np.testing.assert_allclose(
        one.experts[...].reshape(EXPERTS, -1),
        many.experts[...].reshape(EXPERTS, -1)[replayed().home],
        rtol=1e-6,
    )
    np.testing.assert_allclose(one.router[...], many.router[...], rtol=1e-6)
    assert np.std(one.experts[...][..., 0, :, :]) == pytest.approx(WIDTH**-0.5, rel=0.2)
    assert np.std(one.experts[...][..., 2, :, :]) == pytest.approx(HIDDEN**-0.5, rel=0.2)
    assert many.experts.sharding == rank_sharding(MESH)
    assert {leaf.sharding.is_fully_replicated for leaf in (many.router, many.home)} == {True}


@pytest.mark.slow
def test_moe_layer_precision_is_as_documented():
    """With bfloat16 compute and float32 master weights, transfers, sums and stored arrays have documented dtypes."""
    layer = MoELayer(
        *(TOPOLOGY, WIDTH, HIDDEN, GATING["softmax"]),
        dtype=jnp.bfloat16,
        home=replayed().home,
        shared_width=4,
        mesh=MESH,
        rngs=nnx.Rngs(0),
    )
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params, x):
        layer = nnx.merge(graph, params, rest)
        output, ids, logits, _ = layer(x, REPLAY, replayed(), parallel=PARALLEL, mask=MASK)
        assert (output.dtype, ids.dtype, logits.dtype) == (jnp.bfloat16, jnp.uint8, jnp.float32)
        return output.astype(jnp.float32).sum()

    grads = jax.jit(jax.grad(loss))(params, X)
    # The residual stream around the layer is float32, and so are master weights, gradients and moments.
    trees = (params, grads, optax.adam(1e-3).init(params)[0].mu)
    assert {leaf.dtype for tree in trees for leaf in jax.tree.leaves(tree)} == {jnp.dtype("float32")}
    exact = jax.jit(jax.grad(loss_in_float32))(params, X)
    for name, tolerance in (("experts", 0.1), ("router", 0.1)):
        actual, desired = (np.asarray(each[name][...], np.float64) for each in (grads, exact))
        assert 0 < np.abs(actual - desired).max() < tolerance * np.abs(desired).max()

    # Replicas and their gradients travel in bfloat16 and in four pieces, one for each rank of a node.
    text = str(jax.make_jaxpr(jax.grad(loss))(params, X))
    carried = re.findall(rf":(\w+)\[[\d,]*{3 * WIDTH * HIDDEN // 4}\][^=]*= all_to_all", text)
    assert set(carried) == {"bf16"}, carried


def loss_in_float32(params, x):
    rest = nnx.split(layer_of("softmax"), nnx.Param, ...)[2]
    wide = MoELayer(TOPOLOGY, WIDTH, HIDDEN, GATING["softmax"], shared_width=4, rngs=nnx.Rngs(0))
    layer = nnx.merge(nnx.graphdef(wide), params, rest)
    return layer(x, REPLAY, replayed(), parallel=PARALLEL, mask=MASK).output.sum()


@pytest.mark.parametrize(("width", "expert_width", "shared_width"), [(0, 6, 0), (8, -1, 0), (8, 6, -2)])
def test_moe_layer_rejects_widths_of_nothing(width, expert_width, shared_width):
    with pytest.raises(ValueError, match=r"width=(0|-1|-2) must be an integer of at least (0|1)"):
        MoELayer(
            TOPOLOGY, width, expert_width, GATING["softmax"], shared_width=shared_width, rngs=nnx.Rngs(0)
        )


def test_moe_layer_rejects_misfits_before_compilation():
    layer, plan = layer_of("softmax"), replayed()
    call = functools.partial(jax.eval_shape, functools.partial(layer, parallel=PARALLEL))
    ids = REPLAY.astype(np.int32)
    with pytest.raises(ValueError, match=r"x: expected shape \(16, 5, 8\), found \(16, 5, 7\)"):
        call(X[..., :7])
    with pytest.raises(
        ValueError,
        match=r"x: expected \[B, \.\.\.\] with B a multiple of 8 ranks \(2 x 4\) and no empty axis, found",
    ):
        call(X[:12])
    with pytest.raises(ValueError, match=r"expert_ids: .*\(16, 5, 2\), found \(16, 5, 3\)"):
        call(X, np.concatenate([ids, ids[..., :1]], -1), plan)
    with pytest.raises(
        ValueError, match="expert_ids: expected an integer dtype that holds 15, found float32"
    ):
        call(X, ids.astype(np.float32), plan)
    with pytest.raises(ValueError, match=r"plan has a load of shape .*, but expert_ids is None"):
        call(X, None, plan)
    with pytest.raises(ValueError, match=r"plan.slot_expert: .*\(2, 4, 4\), found \(2, 4, 3\)"):
        call(X, ids, plan._replace(slot_expert=plan.slot_expert[..., :3]))
    with pytest.raises(ValueError, match=r"plan.load: .*\(2, 4, 16\), found \(2, 4, 15\)"):
        call(X, ids, plan._replace(load=plan.load[..., :15]))
    # In tests the check of type annotations raises first, with its own message.
    with pytest.raises((ValueError, TypeError), match=r"layers\.layer\(i\)|LayerPlan"):
        call(X, ids, jnp.asarray(plan.home))
    with pytest.raises(ValueError, match=r"mask: .*found \(16, 5, 1\)"):
        call(X, ids, plan, mask=MASK[..., None])
    zeros = jnp.zeros((2, 4, 2, 3, WIDTH, HIDDEN), jnp.bfloat16)
    rounded = LayerExperts(zeros, None, zeros, plan.slot_expert)
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        call(X, ids, plan, experts=rounded)
    other = dataclasses.replace(TOPOLOGY, num_nodes=4, ranks_per_node=2)
    elsewhere = ExpertParallel(mesh=expert_mesh(other), topology=other)
    with pytest.raises(
        ValueError, match=r"expert weights: .*\(4, 2, 2, 3, 8, 6\), found \(2, 4, 2, 3, 8, 6\)"
    ):
        jax.eval_shape(functools.partial(layer, parallel=elsewhere), X)
    with pytest.raises(ValueError, match="top_k=8 is more than the 4 experts"):
        MoELayer(
            dataclasses.replace(TOPOLOGY, ranks_per_node=1, num_experts=4),
            *(WIDTH, HIDDEN, GATINGS["qwen3-moe"]),
            rngs=nnx.Rngs(0),
        )


class Twin(nnx.Module):
    """A model with two layers in a list and two stacked layers."""

    def __init__(self, topology, mesh):
        gating = dataclasses.replace(GATINGS["glm-4.5"], top_k=TOP_K)

        def layer(rngs):
            return MoELayer(topology, 4, 3, gating, shared_width=2, mesh=mesh, rngs=rngs)

        self.apart = nnx.List([layer(nnx.Rngs(seed)) for seed in range(2)])
        self.stacked = nnx.vmap(layer)(nnx.Rngs(2).split(2))


@pytest.mark.slow
def test_expert_labels_find_the_experts_and_nothing_else():
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:1])
    model = Twin(topology, mesh)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    labels = expert_labels(nnx.state(model, nnx.Param))

    def labels_by_name(labels):
        return {jax.tree_util.keystr(path): label for path, label in jax.tree.leaves_with_path(labels)}

    experts = {
        "['apart'][0]['experts']": 0,
        "['apart'][1]['experts']": 1,
        "['stacked']['experts']": range(2, 4),
    }
    assert labels_by_name(labels) == experts
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 9
    state = labels_by_name(optimizer_layers(optimizer.tx, optimizer.opt_state, labels))
    assert state == {f"[0].{moment}{path}.value": v for moment in ("mu", "nu") for path, v in experts.items()}

    # Layers in a list and stacked layers use the rows of the homes in the order of the tree.
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    home = np.stack([np.roll(np.arange(4), layer) for layer in range(4)])
    with pytest.raises(ValueError, match="home has 3 layers, but the model has 4"):
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


@pytest.mark.parametrize("stacked", [None, {}, {nnx.PARTITION_NAME: None}])
def test_expert_param_sharding_metadata_says_where_experts_lie(stacked):
    """Flax reports the sharding of single and stacked layers, and resharding a model by it leaves experts in place."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    mesh = expert_mesh(topology, fsdp=2)
    gating = dataclasses.replace(GATINGS["qwen3-moe"], top_k=TOP_K)

    def make(rngs):
        return MoELayer(topology, 4, 3, gating, mesh=mesh, fsdp_axis="fsdp", rngs=rngs)

    if stacked is None:
        model, lead = make(nnx.Rngs(0)), ()
    else:
        model, lead = nnx.vmap(make, transform_metadata=stacked)(nnx.Rngs(0).split(3)), (None,)
    specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    assert specs["experts"].get_raw_value() == jax.P(*lead, "node", "local", None, None, "fsdp")
    assert specs["router"].get_raw_value() == jax.P()
    sharding = jax.NamedSharding(mesh, specs["experts"].get_raw_value())
    assert model.experts.sharding.is_equivalent_to(sharding, model.experts.ndim)
    before = np.asarray(model.experts[...])
    state = nnx.state(model, ExpertParam)
    moved = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    assert moved["experts"].get_raw_value().sharding.is_equivalent_to(sharding, before.ndim)
    np.testing.assert_array_equal(moved["experts"][...], before)


# A stack of two layers over two data-parallel groups.
LAYERS = 2
SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
COPIES = ExpertParallel(mesh=expert_mesh(SMALL, data=2), topology=SMALL)
STACK_X, STACK_TARGET = RNG.normal(size=(2, 8, 6, 4)).astype(np.float32)


@nnx.jit
def train_step(model, optimizer, ids, plans):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def block(x, layer):
        params, rest, ids, plan = layer
        moe = nnx.merge(graph, params, rest)
        return x + moe(jnp.tanh(x), ids, plan, parallel=COPIES).output, None

    def loss(params):
        out, _ = jax.lax.scan(block, STACK_X, (params, rest, ids, plans))
        return jnp.square(out - STACK_TARGET).mean()

    value, grads = jax.value_and_grad(loss)(params)
    optimizer.update(model, grads)
    return value


def train(*, planned):
    """Train three updates, each with new routing; return experts, first moments, router and losses by expert id."""
    gating = dataclasses.replace(GATINGS["glm-4.5"], top_k=TOP_K)

    @nnx.vmap
    def stack(rngs):
        return MoELayer(SMALL, 4, 3, gating, shared_width=2, mesh=COPIES.mesh, rngs=rngs)

    model = stack(nnx.Rngs(0).split(LAYERS))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    losses = []
    for batch in range(3):
        ids = np.random.default_rng(batch).integers(0, 7, (LAYERS, *STACK_X.shape[:-1], TOP_K))
        ids[..., 1] = np.where(ids[..., 1] == ids[..., 0], 7, ids[..., 1])
        # For a planner the groups are further micro-batches of the batch: [data, L, ranks, tokens, K].
        load = load_of(np.swapaxes(ids.reshape(LAYERS, 2, 4, -1, TOP_K), 0, 1), SMALL)
        plan = random_plan(np.random.default_rng(batch), load, SMALL)
        if not planned:
            plan = compiled_planner("static", SMALL)(load, ())[0]
        reorder_experts(model, optimizer, plan.home, mesh=COPIES.mesh, topology=SMALL)
        of_layers = jax.tree.map(lambda leaf: np.swapaxes(leaf, 0, 1), layer_plans(plan, load))
        losses.append(train_step(model, optimizer, ids, of_layers))
    home = np.asarray(model.home[...])

    def by_expert(leaf):
        return np.stack([rows.reshape(8, -1)[home] for rows, home in zip(leaf[...], home, strict=True)])

    return {
        "losses": np.array(losses),
        "router": model.router[...],
        "experts": by_expert(model.experts),
        "moments": by_expert(optimizer.opt_state[0].mu["experts"]),
    }, home


@pytest.mark.long  # test_training and test_residents_training train under plans that move experts
def test_training_with_plans_and_reorders_equals_training_without():
    actual, home = train(planned=True)
    desired, at_birth = train(planned=False)
    assert (home != at_birth).any()
    assert (np.abs(desired["moments"]).max((1, 2)) > 0).all()
    assert_close(actual, desired)


def test_set_homes_rejects_homes_of_another_model():
    layer = nnx.clone(layer_of("softmax"))
    home = np.roll(np.arange(EXPERTS, dtype=np.int32), 3)
    for wrong in ([home] * 3, np.zeros((0, EXPERTS), np.int32), [home[:4]]):
        shape = re.escape(str(np.shape(wrong)))
        with pytest.raises(ValueError, match=rf"home has shape {shape}, but .* 1 MoE layers with 16 experts"):
            set_homes(layer, np.asarray(wrong))
    set_homes(layer, home[None])
    np.testing.assert_array_equal(layer.home[...], home)


@pytest.mark.slow
@pytest.mark.parametrize("replica_slots", [0, pytest.param(1, marks=pytest.mark.long)])
def test_moe_layer_live_in_a_scan_has_gradients(replica_slots):
    """Shardy (jaxlib 0.11) crashed if a scan's backward pass hoisted an empty array of replicas out of a shard_map."""
    topology = dataclasses.replace(SMALL, replica_slots=replica_slots)
    parallel = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:4]), topology=topology)
    gating = dataclasses.replace(GATINGS["qwen3-moe"], top_k=TOP_K)
    make = nnx.vmap(lambda rngs: MoELayer(topology, 4, 3, gating, mesh=parallel.mesh, rngs=rngs))
    graph, state = nnx.split(make(nnx.Rngs(0).split(LAYERS)))

    @jax.jit
    def loss(state):
        def block(x, layer):
            return x + nnx.merge(graph, layer)(x, parallel=parallel).output, None

        return jax.lax.scan(block, STACK_X, state)[0].sum()

    grads = jax.grad(loss, allow_int=True)(state)
    assert np.isfinite(grads["experts"][...]).all()
    assert np.abs(grads["experts"][...]).max() > 0
