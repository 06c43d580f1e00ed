"""The policy is Qwen3-MoE: an independent forward in NumPy agrees, live, in replay, and token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from experiments.rl.policy import (
    POLICIES,
    Policy,
    PolicyConfig,
    Replayed,
    live_parallel,
    make_policy,
    token_log_probs,
)
from relibra_jax.capacity import worst_case_capacities
from relibra_jax.execution.mesh import RANKS, expert_mesh
from relibra_jax.execution.moe import ExpertParallel
from relibra_jax.nnx.layer import reorder_experts
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.replay import expert_load
from relibra_jax.types import Assignment, Plan, RoutingReplay, Topology

CONFIG = PolicyConfig(width=16, layers=2, heads=4, kv_heads=2, head_width=6, expert_width=8, vocabulary=23)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)
MESH = expert_mesh(TOPOLOGY)
SAMPLES, LENGTH = 2, 7
SAFE = ExpertParallel(
    mesh=MESH,
    topology=TOPOLOGY,
    capacities=worst_case_capacities(SAMPLES * LENGTH, CONFIG.top_k, TOPOLOGY),
)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, CONFIG.vocabulary, (2, 4, SAMPLES, LENGTH)).astype(np.int32)
LENGTHS = RNG.integers(3, LENGTH + 1, TOKENS.shape[:-1])
MASK = np.arange(LENGTH) < LENGTHS[..., None]


@functools.cache
def policy():
    model = make_policy(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    # Scales that are all one would hide that they are not used.
    rng = np.random.default_rng(1)

    def scale(leaf):
        return jax.device_put(rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32), leaf.sharding)

    norms = nnx.state(model, lambda path, _: "norm" in str(path[-1]))
    assert len(jax.tree.leaves(norms)) == 5
    nnx.update(model, jax.tree.map(scale, norms))
    return model


@functools.cache
def live():
    run = nnx.jit(lambda policy: policy(TOKENS, MASK, parallel=SAFE))
    return jax.tree.map(np.asarray, run(policy()))


def oracle(model, tokens):
    """Logits ``[T, V]`` and expert ids ``[T, L, K]`` of one sample: loops, float64, nothing of the library."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model)))

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

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
        normed = norm(x, of_layer["attention_norm"])
        attended = np.zeros_like(x)
        for head in range(CONFIG.heads):
            shared = head // (CONFIG.heads // CONFIG.kv_heads)
            query = norm(normed @ of_layer["query"][:, head], of_layer["query_norm"])
            key = norm(normed @ of_layer["key"][:, shared], of_layer["key_norm"])
            value = normed @ of_layer["value"][:, shared]
            for t in range(len(tokens)):
                scores = np.array([rotate(query[t], t) @ rotate(key[s], s) for s in range(t + 1)])
                weights = softmax(scores / np.sqrt(CONFIG.head_width))
                attended[t] += weights @ value[: t + 1] @ of_layer["out"][head]
        x = x + attended
        normed = norm(x, of_layer["experts_norm"])
        experts = of_layer["experts"]["experts"].reshape(CONFIG.num_experts, 3, CONFIG.width, -1)
        for t, row in enumerate(normed):
            chance = softmax(row @ of_layer["experts"]["router"])
            best = np.argsort(-chance)[: CONFIG.top_k]
            chosen[t, layer] = best
            for expert in best:
                gate, up, down = experts[int(of_layer["experts"]["home"][expert])]
                hidden = row @ gate / (1 + np.exp(-row @ gate)) * (row @ up)
                x[t] += chance[expert] / chance[best].sum() * (down @ hidden)
    return norm(x, params["norm"]) @ params["head"], chosen


def test_live_forward_is_qwen3_moe():
    found = live()
    for place in [(0, 0, 0), (1, 2, 1), (1, 3, 0)]:
        length = LENGTHS[place]
        logits, ids = oracle(policy(), TOKENS[place][:length])
        np.testing.assert_allclose(found.logits[place][:length], logits, atol=1e-5 * np.abs(logits).max())
        np.testing.assert_array_equal(found.expert_ids[place][:length], ids)
    assert found.expert_ids.dtype == np.uint8
    assert found.router_logits.shape == (*TOKENS.shape, CONFIG.layers, CONFIG.num_experts)


@functools.cache
def replayed(planner):
    """The live run's routing as a replay under a plan of its own load."""
    ids = live().expert_ids
    replay = RoutingReplay(ids.reshape(-1, *ids.shape[3:]), MASK.reshape(-1, LENGTH))
    lies = Assignment(np.arange(len(replay.mask)).reshape(1, *LENGTHS.shape))
    load = expert_load(replay, lies, num_experts=CONFIG.num_experts)
    planner = PLANNERS[planner].planner
    state = planner.init(TOPOLOGY, CONFIG.layers, key=jax.random.key(0))
    plan, _ = jax.jit(planner.update)(load, state, TOPOLOGY)
    return Replayed(ids, Plan(plan.slot_expert[0], plan.home, plan.quota[0]), load[0])


@functools.cache
def moved():
    """The policy with its experts where relibra's plan wants them."""
    model = nnx.clone(policy())
    reorder_experts(model, None, replayed("relibra").plan.home, mesh=MESH, topology=TOPOLOGY)
    return model


@nnx.jit
def gradient_step(model, replay):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        output = nnx.merge(graph, params, rest)(TOKENS, MASK, parallel=SAFE, replay=replay)
        log_probs = token_log_probs(output.logits, TOKENS)
        return (log_probs * MASK).sum(), (output.logits, log_probs, output.expert_ids)

    return jax.grad(loss, has_aux=True)(params)


def by_expert(model, leaf):
    """Expert weights ``[L, E, ...]`` in order of their ids."""
    home = np.asarray(model.layers.experts.home[...])
    flat = np.asarray(leaf).reshape(*home.shape, -1)
    return np.take_along_axis(flat, home[..., None], axis=1)


def test_replay_is_the_live_forward_and_no_plan_changes_it():
    grads, (logits, log_probs, ids) = gradient_step(policy(), replayed("static"))
    wanted = np.where(MASK[..., None], live().logits, 0)
    np.testing.assert_allclose(np.where(MASK[..., None], logits, 0), wanted, atol=1e-6)
    np.testing.assert_array_equal(ids, live().expert_ids)
    chance = jax.nn.log_softmax(live().logits[1, 2, 0, 1])[TOKENS[1, 2, 0, 2]]
    np.testing.assert_allclose(log_probs[1, 2, 0, 2], chance, atol=1e-6)
    assert not log_probs[..., 0].any()

    replay = replayed("relibra")
    assert (np.asarray(replay.plan.slot_expert)[..., TOPOLOGY.home_slots :] >= 0).any()
    assert (np.asarray(replay.plan.home) != np.arange(CONFIG.num_experts)).any()
    planned, (logits, _, _) = gradient_step(moved(), replay)
    np.testing.assert_allclose(np.where(MASK[..., None], logits, 0), wanted, atol=2e-6)
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(grads))
    assert len(leaves) == 13
    for (path, leaf), other in zip(leaves, jax.tree.leaves(planned), strict=True):
        if path[-1].key == "experts":
            leaf, other = by_expert(policy(), leaf), by_expert(moved(), other)
        assert np.abs(leaf).max() > 0, path
        np.testing.assert_allclose(other, leaf, atol=5e-6 * np.abs(leaf).max(), err_msg=str(path))


def test_live_routing_under_a_plan_of_another_load():
    plan = replayed("relibra").plan
    found = nnx.jit(lambda policy, plan: policy(TOKENS[::-1], MASK[::-1], parallel=SAFE, plan=plan))(
        moved(), plan
    )
    np.testing.assert_array_equal(
        np.where(MASK[..., None, None], found.expert_ids[::-1], 0),
        np.where(MASK[..., None, None], live().expert_ids, 0),
    )
    wanted = np.where(MASK[..., None], live().logits, 0)
    np.testing.assert_allclose(np.where(MASK[..., None], found.logits[::-1], 0), wanted, atol=2e-6)


def test_token_by_token_is_the_whole_sequence():
    parallel = live_parallel(SAFE, SAMPLES, CONFIG.top_k)

    @nnx.jit
    def run(policy):
        def step(cache, token):
            tokens, mask, position = token
            start = jnp.full(LENGTHS.shape, position)
            output, cache = policy.extend(tokens, mask, cache, start, parallel=parallel)
            return cache, output

        columns = (jnp.moveaxis(jnp.asarray(array)[..., None], -2, 0) for array in (TOKENS, MASK))
        cache = policy.empty_cache(LENGTHS.shape, LENGTH, MESH)
        _, output = jax.lax.scan(step, cache, (*columns, jnp.arange(LENGTH)))
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.squeeze(4), 0, 3), output)

    found = run(moved())
    wanted = np.where(MASK[..., None], live().logits, 0)
    np.testing.assert_allclose(np.where(MASK[..., None], found.logits, 0), wanted, atol=2e-6)
    np.testing.assert_array_equal(found.expert_ids[MASK], live().expert_ids[MASK])


def test_parameters_lie_on_the_mesh_and_do_not_depend_on_it():
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
    one = make_policy(CONFIG, alone, mesh=mesh, key=jax.random.key(0))
    many = make_policy(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    for leaf, other in zip(*(jax.tree.leaves(nnx.state(model)) for model in (one, many)), strict=True):
        np.testing.assert_allclose(np.ravel(leaf), np.ravel(other), rtol=1e-6)


def test_sizes_and_dtypes_of_other_configurations():
    config = dataclasses.replace(CONFIG, tied=True, dtype="bfloat16", kv_heads=4)
    model = nnx.eval_shape(lambda: Policy(config, TOPOLOGY, rngs=nnx.Rngs(0)))
    found = nnx.eval_shape(lambda model: model(TOKENS, MASK, parallel=SAFE), model)
    assert (found.logits.dtype, found.logits.shape) == (np.float32, (*TOKENS.shape, CONFIG.vocabulary))
    assert found.router_logits.dtype == np.float32
    assert model.head is None
    for config in POLICIES.values():
        topology = dataclasses.replace(TOPOLOGY, num_experts=config.num_experts)
        nnx.eval_shape(lambda config=config, topology=topology: Policy(config, topology, rngs=nnx.Rngs(0)))


def test_misfits_are_refused_before_anything_is_compiled():
    def call(*args, **options):
        options.setdefault("parallel", SAFE)
        nnx.eval_shape(lambda model: model(*args, **options), policy())

    replay = replayed("relibra")
    small = dataclasses.replace(SAFE, capacities=worst_case_capacities(SAMPLES * LENGTH - 1, 2, TOPOLOGY))
    with pytest.raises(ValueError, match=r"buffer rows: 208, this batch needs 224"):
        call(TOKENS, MASK, parallel=small)
    with pytest.raises(ValueError, match=r"tokens: expected \[\*\(2, 4\), b, T\], found shape \(4, 2, 7\)"):
        call(TOKENS[0], MASK[0])
    with pytest.raises(ValueError, match=r"mask: expected shape \(2, 4, 2, 7\), found \(2, 4, 2, 6\)"):
        call(TOKENS, MASK[..., 1:])
    with pytest.raises(ValueError, match=r"expert_ids: expected shape \(2, 4, 2, 7, 2, 2\), found"):
        call(TOKENS, MASK, replay=replay._replace(expert_ids=replay.expert_ids[..., :1, :]))
    with pytest.raises(ValueError, match=r"plan.home: expected shape \(2, 16\), found \(1, 16\)"):
        call(TOKENS, MASK, replay=replay._replace(plan=replay.plan._replace(home=replay.plan.home[:1])))
    with pytest.raises(ValueError, match=r"load: expected shape \(2, 2, 4, 16\), found \(1, 2, 4, 16\)"):
        call(TOKENS, MASK, replay=replay._replace(load=replay.load[:1]))
    with pytest.raises(ValueError, match="a replay brings its plan"):
        call(TOKENS, MASK, replay=replay, plan=replay.plan)
    with pytest.raises(ValueError, match="policy of 16 experts, topology of 32"):
        make_policy(CONFIG, dataclasses.replace(TOPOLOGY, num_experts=32), mesh=MESH, key=jax.random.key(0))
    with pytest.raises(ValueError, match="heads=4 must be a multiple of kv_heads=3"):
        PolicyConfig(kv_heads=3)
    with pytest.raises(ValueError, match="head_width=7 must be even"):
        PolicyConfig(head_width=7)
