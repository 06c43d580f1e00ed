"""The language model against an independent Qwen3-MoE forward pass in NumPy: live, in replay, and token by token."""

import collections
import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from experiments.rl.policy import POLICIES, TINY
from relibra_jax.contract.types import LayerPlan, RoutingReplay, Topology
from relibra_jax.execution.mesh import RANKS, expert_mesh
from relibra_jax.models import LanguageModel, make_model, token_log_probs
from relibra_jax.models.attention import Attention, attention_implementation
from relibra_jax.models.cache import NOWHERE, empty_cache, repeat_samples, shard_cache
from relibra_jax.models.language_model import abstract_model, model_maker
from relibra_jax.nnx import ExpertParallel, reorder_experts
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS

SIZES = {
    "width": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 6,
    "expert_width": 8,
    "vocabulary": 23,
}
CONFIG = dataclasses.replace(TINY, **SIZES)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)
MESH = expert_mesh(TOPOLOGY)
SAMPLES, LENGTH = 16, 7
SAFE = ExpertParallel(mesh=MESH, topology=TOPOLOGY)
LIVE = ExpertParallel(mesh=MESH, topology=dataclasses.replace(TOPOLOGY, replica_slots=0))
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, CONFIG.vocabulary, (SAMPLES, LENGTH)).astype(np.int32)
LENGTHS = RNG.integers(3, LENGTH + 1, SAMPLES)
MASK = np.arange(LENGTH) < LENGTHS[:, None]


@functools.cache
def policy():
    model = make_model(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    # With scales of one, the tests could not detect that a norm ignores its scale.
    rng = np.random.default_rng(1)

    def scale(leaf):
        return jax.device_put(rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32), leaf.sharding)

    norms = nnx.state(model, lambda path, _: path[-1] == "scale")
    assert len(jax.tree.leaves(norms)) == 5
    nnx.update(model, jax.tree.map(scale, norms))
    return model


@functools.cache
def live():
    run = nnx.jit(lambda policy: policy(TOKENS, MASK, parallel=LIVE))
    return jax.tree.map(np.asarray, run(policy()))


@functools.cache
def live_logits():
    return np.asarray(policy().logits(live().hidden))


def oracle(model, tokens):
    """Compute logits ``[T, V]`` and expert ids ``[T, L, K]`` of one sample, in float64 loops without the library."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model)))

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale["scale"]

    def softmax(x):
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    def rotate(x, position):
        pairs = x[: x.size // 2] + 1j * x[x.size // 2 :]
        pairs = pairs * np.exp(1j * position * 10_000.0 ** (-np.arange(pairs.size) / pairs.size))
        return np.concatenate([pairs.real, pairs.imag])

    x = params["embedding"][tokens]
    chosen = np.zeros((len(tokens), CONFIG.layers, CONFIG.top_k), int)
    for layer in range(CONFIG.layers):
        of_layer = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        attention = of_layer["attention"]
        normalised = norm(x, of_layer["attention_norm"])
        attention_output = np.zeros_like(x)
        for head in range(CONFIG.heads):
            shared = head // (CONFIG.heads // CONFIG.kv_heads)
            query = norm(normalised @ attention["query"]["kernel"][:, head], attention["query_norm"])
            key = norm(normalised @ attention["key"]["kernel"][:, shared], attention["key_norm"])
            value = normalised @ attention["value"]["kernel"][:, shared]
            for t in range(len(tokens)):
                scores = np.array([rotate(query[t], t) @ rotate(key[s], s) for s in range(t + 1)])
                weights = softmax(scores / np.sqrt(CONFIG.head_width))
                attention_output[t] += weights @ value[: t + 1] @ attention["out"]["kernel"][head]
        x = x + attention_output
        normalised = norm(x, of_layer["experts_norm"])
        experts = of_layer["experts"]["experts"].reshape(CONFIG.num_experts, 3, CONFIG.width, -1)
        for t, row in enumerate(normalised):
            chance = softmax(row @ of_layer["experts"]["router"])
            best = np.argsort(-chance)[: CONFIG.top_k]
            chosen[t, layer] = best
            for expert in best:
                gate, up, down = experts[int(of_layer["experts"]["home"][expert])]
                hidden = row @ gate / (1 + np.exp(-row @ gate)) * (row @ up)
                x[t] += chance[expert] / chance[best].sum() * (down @ hidden)
    return norm(x, params["norm"]) @ params["head"], chosen


@pytest.mark.slow
def test_language_model_live_equals_qwen3_moe():
    output = live()
    for sample in (0, 13, 14):
        length = LENGTHS[sample]
        logits, ids = oracle(policy(), TOKENS[sample, :length])
        tolerance = 1e-5 * np.abs(logits).max()
        np.testing.assert_allclose(live_logits()[sample, :length], logits, atol=tolerance)
        np.testing.assert_array_equal(output.expert_ids[sample, :length], ids)
    assert output.expert_ids.dtype == np.uint8
    assert output.router_logits.shape == (*TOKENS.shape, CONFIG.layers, CONFIG.num_experts)


@functools.cache
def replayed(planner):
    """Return the routing of the live run, and layer plans for its load with all samples left in place."""
    ids, planner = live().expert_ids, PLANNERS[planner].planner
    state = planner.init(TOPOLOGY, CONFIG.layers, key=jax.random.key(0))
    stage = Stage(1, start=assign_in_order(SAMPLES, TOPOLOGY, num_micro_batches=1))

    @jax.jit
    def plan(replay, state):
        (batch_plan,), _ = plan_batch(replay, planner, state, TOPOLOGY, stages=[stage])
        return batch_plan

    batch_plan = plan(RoutingReplay(ids, MASK), state)
    assert np.asarray(batch_plan.assignment.sample).ravel().tolist() == list(range(SAMPLES))
    return ids, jax.device_get(batch_plan).micro_batch(0)


@functools.cache
def reordered_policy():
    """Return the policy with its experts at the homes of relibra's plan."""
    model = nnx.clone(policy())
    reorder_experts(model, None, replayed("relibra")[1].home, mesh=MESH, topology=TOPOLOGY)
    return model


@nnx.jit
def gradient_step(model, ids, plans):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        model = nnx.merge(graph, params, rest)
        output = model(TOKENS, MASK, ids, plans, parallel=SAFE)
        log_probs = token_log_probs(model, output.hidden, TOKENS, parallel=SAFE)
        return (log_probs * MASK).sum(), (model.logits(output.hidden), log_probs, output.expert_ids)

    return jax.grad(loss, has_aux=True)(params)


def by_expert(model, leaf):
    """Return expert weights ``[L, E, ...]`` in the order of expert ids."""
    home = np.asarray(model.layers.experts.home[...])
    flat = np.asarray(leaf).reshape(*home.shape, -1)
    return np.take_along_axis(flat, home[..., None], axis=1)


@pytest.mark.slow
def test_language_model_replay_equals_live_under_every_plan():
    grads, (logits, log_probs, ids) = gradient_step(policy(), *replayed("static"))
    expected = np.where(MASK[..., None], live_logits(), 0)
    np.testing.assert_allclose(np.where(MASK[..., None], logits, 0), expected, atol=1e-6)
    np.testing.assert_array_equal(ids, live().expert_ids)
    chance = jax.nn.log_softmax(live_logits()[12, 1])[TOKENS[12, 2]]
    np.testing.assert_allclose(log_probs[12, 2], chance, atol=1e-6)
    assert not log_probs[:, 0].any()

    ids, plans = replayed("relibra")
    assert (plans.slot_expert[..., TOPOLOGY.held_slots :] >= 0).any()
    assert (plans.home != np.arange(CONFIG.num_experts)).any()
    planned, (logits, _, _) = gradient_step(reordered_policy(), ids, plans)
    np.testing.assert_allclose(np.where(MASK[..., None], logits, 0), expected, atol=2e-6)
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(grads))
    assert len(leaves) == 13
    for (path, leaf), other in zip(leaves, jax.tree.leaves(planned), strict=True):
        if path[-1].key == "experts":
            leaf, other = by_expert(policy(), leaf), by_expert(reordered_policy(), other)
        assert np.abs(leaf).max() > 0, path
        np.testing.assert_allclose(other, leaf, atol=5e-6 * np.abs(leaf).max(), err_msg=str(path))


@pytest.mark.slow
def test_language_model_routes_live_under_a_plan_of_another_load():
    plans = replayed("relibra")[1]._replace(load=None)
    run = nnx.jit(lambda policy, plans: policy(TOKENS[::-1], MASK[::-1], layers=plans, parallel=SAFE))
    output = run(reordered_policy(), plans)
    np.testing.assert_array_equal(
        np.where(MASK[..., None, None], output.expert_ids[::-1], 0),
        np.where(MASK[..., None, None], live().expert_ids, 0),
    )
    expected = np.where(MASK[..., None], live_logits(), 0)
    np.testing.assert_allclose(
        np.where(MASK[..., None], policy().logits(output.hidden)[::-1], 0), expected, atol=2e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("fewest_read", [2, pytest.param(64, marks=pytest.mark.long)])
def test_language_model_token_by_token_equals_the_whole_sequence(fewest_read, monkeypatch):
    """The result depends neither on the cache columns of a sample's tokens nor on the number of columns read."""
    monkeypatch.setattr("relibra_jax.models.cache.FEWEST_READ", fewest_read)
    rng, columns = np.random.default_rng(3), 11
    token_columns = np.array([np.sort(rng.choice(columns, LENGTH, replace=False)) for _ in range(SAMPLES)])
    tokens, mask = np.zeros((2, SAMPLES, columns), np.int32)
    np.put_along_axis(tokens, token_columns, TOKENS, axis=1)
    np.put_along_axis(mask, token_columns, MASK, axis=1)

    @nnx.jit
    def run(policy):
        def step(cache, column):
            output, cache = policy.extend(*column, cache, parallel=LIVE)
            return cache, output

        cache = policy.empty_cache(SAMPLES, columns, LIVE)
        by_column = (jnp.asarray(array).T[..., None] for array in (tokens, mask.astype(bool)))
        return jax.lax.scan(step, cache, tuple(by_column))[1]

    output = run(reordered_policy())
    logits, ids = (
        np.take_along_axis(
            np.moveaxis(leaf[:, :, 0], 0, 1),
            token_columns.reshape(SAMPLES, LENGTH, *[1] * (leaf.ndim - 3)),
            axis=1,
        )
        for leaf in map(np.asarray, (policy().logits(output.hidden), output.expert_ids))
    )
    expected = np.where(MASK[..., None], live_logits(), 0)
    np.testing.assert_allclose(np.where(MASK[..., None], logits, 0), expected, atol=2e-6)
    np.testing.assert_array_equal(ids[MASK], live().expert_ids[MASK])
    # The experts do not compute gaps.
    rows = np.asarray(output.slot_rows).sum((2, 3, 4))
    np.testing.assert_array_equal(rows, CONFIG.top_k * np.repeat(mask.sum(0)[:, None], CONFIG.layers, 1))


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_language_model_decoding_writes_the_cache_in_place(dense_layers):
    """The compiled program writes only slices into arrays of the cache's size."""
    room = 300
    config = dataclasses.replace(CONFIG, dense_layers=dense_layers, dense_width=24)
    make = model_maker(config, TOPOLOGY, MESH, fsdp_axis=None, shard_dense=False)
    graph, state, _ = abstract_model(make, MESH)
    cache = jax.eval_shape(lambda: LanguageModel.empty_cache(nnx.merge(graph, state), SAMPLES, room, LIVE))

    def decode(state, tokens, cache):
        def next_token(carry):
            tokens, cache = carry
            model = nnx.merge(graph, state)
            output, cache = model.extend(tokens, jnp.ones_like(tokens, bool), cache, parallel=LIVE)
            return jnp.argmax(model.logits(output.hidden), -1).astype(jnp.int32), cache

        return jax.lax.while_loop(lambda carry: (carry[0] > 0).any(), next_token, (tokens, cache))

    tokens = jax.ShapeDtypeStruct((SAMPLES, 1), jnp.int32)
    program = jax.jit(decode, donate_argnums=2).lower(state, tokens, cache).compile().as_text()
    of_layer = rf"\d+,{CONFIG.kv_heads},{room},{CONFIG.head_width}"
    pattern = re.compile(rf"= f32\[(?:\d+,)?{of_layer}\]\S* ([\w-]+)\(")
    written = collections.Counter(pattern.findall(program))
    assert written.pop("dynamic-update-slice") == 2 * (2 if dense_layers else 1)
    # Attention reads slices. The operations inside a fusion show what the fusion writes.
    reads = {"parameter", "get-tuple-element", "bitcast", "dynamic-slice"}
    assert set(written) <= {*reads, "fusion"}, written


def test_repeat_samples_copies_on_the_rank_of_each_sample():
    cache = empty_cache(CONFIG, SAMPLES, 5, LIVE)
    keys = np.random.default_rng(0).normal(size=cache.keys.shape).astype(np.float32)
    cache = shard_cache(cache._replace(keys=keys, values=-keys, positions=cache.positions * 0 + 3), LIVE)
    repeat = jax.jit(functools.partial(repeat_samples, copies=2, room=7, parallel=LIVE))
    actual = repeat(cache)
    np.testing.assert_array_equal(actual.keys[:, :, :, :5], np.repeat(keys, 2, axis=1))
    np.testing.assert_array_equal(actual.values, -np.asarray(actual.keys))
    assert (actual.positions[:, :5] == 3).all()
    assert (actual.positions[:, 5:] == NOWHERE).all()
    assert actual.keys.sharding.is_equivalent_to(cache.keys.sharding, 5)
    program = repeat.lower(cache).compile().as_text()
    assert not re.findall(r"all-\w+|collective-\w+", program)


def test_make_model_parameters_do_not_depend_on_the_mesh():
    model = policy()
    shape = (CONFIG.layers, 2, 4, TOPOLOGY.home_slots, 3, CONFIG.width, CONFIG.expert_width)
    assert model.layers.experts.experts.shape == shape
    for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model))):
        if path[-1].key == "experts":
            assert leaf.sharding.spec == PartitionSpec(None, *RANKS), path
        else:
            assert leaf.sharding.is_fully_replicated, path
    alone = Topology(num_nodes=1, ranks_per_node=1, num_experts=16, replica_slots=0)
    mesh = expert_mesh(alone, devices=jax.devices()[:1])
    single_rank_model = make_model(CONFIG, alone, mesh=mesh, key=jax.random.key(0))
    eight_rank_model = make_model(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    for leaf, other in zip(
        *(jax.tree.leaves(nnx.state(model)) for model in (single_rank_model, eight_rank_model)), strict=True
    ):
        np.testing.assert_allclose(np.ravel(leaf), np.ravel(other), rtol=1e-6)


def test_sizes_and_dtypes_of_other_configurations():
    config = dataclasses.replace(CONFIG, tied=True, dtype="bfloat16", kv_heads=4)
    model = nnx.eval_shape(lambda: LanguageModel(config, TOPOLOGY, rngs=nnx.Rngs(0)))
    output = nnx.eval_shape(lambda model: model(TOKENS, MASK, parallel=SAFE), model)
    assert (output.hidden.dtype, output.hidden.shape) == (jnp.bfloat16, (*TOKENS.shape, CONFIG.width))
    logits = nnx.eval_shape(LanguageModel.logits, model, output.hidden)
    assert (logits.dtype, logits.shape) == (np.float32, (*TOKENS.shape, CONFIG.vocabulary))
    assert output.router_logits.dtype == np.float32
    assert model.head is None
    for config in POLICIES.values():
        topology = dataclasses.replace(TOPOLOGY, num_experts=config.num_experts)
        nnx.eval_shape(
            lambda config=config, topology=topology: LanguageModel(config, topology, rngs=nnx.Rngs(0))
        )


@functools.cache
def abstract_policy():
    return nnx.eval_shape(lambda: LanguageModel(CONFIG, TOPOLOGY, rngs=nnx.Rngs(0)))


@pytest.fixture
def without_type_checks():
    """Disable the type checks of the tests, as for users: functions then check shapes themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_inconsistent_shapes_are_rejected_before_compilation(without_type_checks):
    def call(*args, **options):
        nnx.eval_shape(lambda model: model(*args, **options, parallel=SAFE), abstract_policy())

    ids = np.zeros((*TOKENS.shape, 2, 2), np.uint8)
    slots, experts = np.zeros((2, 2, 4, TOPOLOGY.slots), np.int32), np.zeros((2, 2, 4, 16), np.int32)
    plans = LayerPlan(slots, np.zeros((2, 16), np.int32), slots, experts)
    with pytest.raises(
        ValueError,
        match=r"expected \[B, ...\] with B a multiple of 8 ranks \(2 x 4\) and no empty axis, found .*6, 7",
    ):
        call(TOKENS[:6], MASK[:6])
    with pytest.raises(ValueError, match=r"mask: expected shape \(16, 7\), found \(16, 6\)"):
        call(TOKENS, MASK[:, 1:])
    with pytest.raises(
        ValueError, match=r"expert_ids: expected shape \(16, 7, 2, 2\), found \(16, 7, 1, 2\)"
    ):
        call(TOKENS, MASK, ids[:, :, :1], plans)
    with pytest.raises(ValueError, match=r"layers.home: expected shape \(2, 16\), found \(1, 16\)"):
        call(TOKENS, MASK, ids, plans._replace(home=plans.home[:1]))
    with pytest.raises(ValueError, match=r"load: expected shape \(2, 2, 4, 16\), found \(1, 2, 4, 16\)"):
        call(TOKENS, MASK, ids, plans._replace(load=plans.load[:1]))
    with pytest.raises(ValueError, match="but expert_ids is None: live routing counts its own load"):
        call(TOKENS, MASK, layers=plans)
    with pytest.raises(ValueError, match="the config has 16 experts, but the topology has 32"):
        make_model(CONFIG, dataclasses.replace(TOPOLOGY, num_experts=32), mesh=MESH, key=jax.random.key(0))
    with pytest.raises(ValueError, match="heads=4 must be a multiple of kv_heads=3"):
        dataclasses.replace(TINY, kv_heads=3)
    with pytest.raises(ValueError, match="head_width=7 must be even"):
        dataclasses.replace(TINY, head_width=7)


def test_causal_attention_equals_attention_with_an_explicit_mask(monkeypatch):
    attention = Attention(CONFIG, rngs=nnx.Rngs(0))
    x = jnp.asarray(RNG.normal(size=(4, 9, CONFIG.width)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(9)[None], (4, 9))

    def attention_output(attention, x):
        output, _ = attention(x, positions, None, None, parallel=SAFE)
        return (output**2).sum(), output

    def run():
        return nnx.jit(nnx.value_and_grad(attention_output, argnums=(0, 1), has_aux=True))(attention, x)

    causal = run()
    whole = jax.nn.dot_product_attention

    def with_mask(query, key, value, *, mask, is_causal, implementation):
        assert mask is None
        assert is_causal
        assert implementation == "xla"
        mask = jnp.tril(jnp.ones((9, 9), bool))[None, None]
        return whole(query, key, value, mask=mask)

    monkeypatch.setattr(jax.nn, "dot_product_attention", with_mask)
    for leaf, other in zip(*map(jax.tree.leaves, (causal, run())), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5)


def test_cudnn_is_chosen_for_the_heads_it_supports():
    gpu = types.SimpleNamespace(platform="gpu")
    mesh = types.SimpleNamespace(devices=np.array([[gpu]]))
    parallel = types.SimpleNamespace(mesh=mesh)
    half = dataclasses.replace(CONFIG, dtype="bfloat16", head_width=128)
    assert attention_implementation(half, parallel) == "cudnn"
    assert attention_implementation(half, SAFE) == "xla"
    for field in ({"dtype": "float32"}, {"head_width": 12}, {"head_width": 256}):
        assert attention_implementation(dataclasses.replace(half, **field), parallel) == "xla", field
