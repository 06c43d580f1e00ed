"""Training state in host memory: updated there as on the devices, and used in the dtype of the computation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.rl.optimizer import make_optimizer
from experiments.rl.policy import Agent
from relibra_jax.contract.types import Topology
from relibra_jax.execution.gating import Gating
from relibra_jax.execution.memory import HOST
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import ModelConfig, make_model
from relibra_jax.nnx import ExpertParam, reorder_experts
from relibra_jax.nnx.host_state import apply_gradients, on_device, put_on_host

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
MESH = expert_mesh(TOPOLOGY, devices=jax.devices()[:4])
CONFIG = ModelConfig(
    vocabulary=32,
    width=16,
    layers=4,
    dense_layers=1,
    heads=4,
    kv_heads=2,
    head_width=8,
    num_experts=8,
    gating=Gating(top_k=2, scores="softmax"),
    expert_width=16,
    dense_width=32,
    dtype="bfloat16",
)


def build():
    """Make an agent, its optimizer, and gradients, on the devices."""
    policy = make_model(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0), shard_dense=True)
    agent = Agent(policy)
    tx = make_optimizer(1e-2, 1e-3, 1, moments="bfloat16")
    optimizer = nnx.Optimizer(agent, tx, wrt=nnx.Param)
    rng = np.random.default_rng(1)
    gradients = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding),
        nnx.state(agent, nnx.Param),
    )
    return agent, optimizer, gradients


@nnx.jit(donate_argnames=("agent", "optimizer"))
def step(agent, optimizer, gradients, factor):
    apply_gradients(agent, optimizer, gradients, MESH, factor=factor)


@functools.cache
def stepped(on_host):
    """Take three optimizer steps; return the agent and the optimizer."""
    agent, optimizer, gradients = build()
    if on_host:
        put_on_host(agent)
        put_on_host(optimizer)
    for _ in range(3):
        step(agent, optimizer, gradients, jnp.float32(0.5))
    return agent, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_a_factor_that_is_not_finite_skips_the_step(on_host):
    agent, optimizer = stepped(on_host)
    before = jax.device_get(nnx.as_pure(nnx.state((agent, optimizer))))
    for factor in (jnp.nan, jnp.inf):
        step(agent, optimizer, build()[2], jnp.float32(factor))
    after = jax.device_get(nnx.as_pure(nnx.state((agent, optimizer))))
    for (path, value), (_, other) in zip(
        jax.tree.leaves_with_path(before), jax.tree.leaves_with_path(after), strict=True
    ):
        np.testing.assert_array_equal(other, value, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_steps_on_the_host_are_those_on_the_devices():
    desired, actual = (jax.device_get(nnx.state(each)) for each in (stepped(False), stepped(True)))
    for (path, value), (_, other) in zip(
        jax.tree.leaves_with_path(desired), jax.tree.leaves_with_path(actual), strict=True
    ):
        np.testing.assert_array_equal(other, value, err_msg=jax.tree_util.keystr(path))
    moved = np.abs(np.asarray(actual[0]["policy"]["head"][...]) - jax.device_get(build()[0].policy.head[...]))
    assert moved.mean() > 0.01


def test_state_stays_on_the_host_and_keeps_its_shardings():
    agent, optimizer = stepped(True)
    before = nnx.state(build()[:2])
    for (path, leaf), old in zip(
        jax.tree.leaves_with_path(nnx.state((agent, optimizer))), jax.tree.leaves(before), strict=True
    ):
        name = jax.tree_util.keystr(path)
        trained = leaf.ndim and "home" not in name
        assert leaf.sharding.memory_kind == (HOST if trained else "device"), name
        if leaf.ndim:
            kept = old.sharding.with_memory_kind(leaf.sharding.memory_kind)
            assert leaf.sharding.is_equivalent_to(kept, leaf.ndim), name


def test_experts_move_on_the_host():
    home = np.stack([np.roll(np.arange(8), 1 + layer) for layer in range(3)]).astype(np.int32)
    moved = []
    for on_host in (False, True):
        agent, _, _ = build()
        if on_host:
            put_on_host(agent)
        reorder_experts(agent.policy, None, home, mesh=MESH, topology=TOPOLOGY)
        moved.append(jax.tree.leaves(nnx.state(agent, ExpertParam))[0])
    np.testing.assert_array_equal(*moved)
    assert moved[1].sharding.memory_kind == HOST
    assert (np.asarray(moved[1]) != jax.tree.leaves(nnx.state(build()[0], ExpertParam))[0]).any()


def test_devices_get_parameters_in_the_dtype_of_the_computation():
    agent, _, _ = build()
    put_on_host(agent)
    copy = nnx.jit(on_device, static_argnames="mesh")(agent, MESH)
    assert jax.tree.leaves(nnx.state(copy, ExpertParam))[0].dtype == jnp.bfloat16
    for (path, leaf), (_, old) in zip(
        nnx.to_flat_state(nnx.state(copy, nnx.Param)),
        nnx.to_flat_state(nnx.state(agent, nnx.Param)),
        strict=True,
    ):
        value = leaf.get_raw_value()
        assert value.sharding.memory_kind == "device"
        assert value.dtype == (old.get_metadata("compute_dtype", None) or jnp.float32), path
        np.testing.assert_array_equal(
            np.asarray(value, np.float32),
            np.asarray(old.get_raw_value()).astype(value.dtype).astype(np.float32),
        )


def test_dense_parameters_on_every_rank_are_in_the_dtype_of_the_computation_too():
    model = make_model(CONFIG, TOPOLOGY, mesh=MESH, key=jax.random.key(0))
    put_on_host(model)
    copy = nnx.jit(on_device, static_argnames="mesh")(model, MESH)
    assert copy.head[...].dtype == copy.layers.attention.query.kernel[...].dtype == jnp.bfloat16
    assert copy.layers.experts.router[...].dtype == copy.norm.scale[...].dtype == jnp.float32


def test_a_model_on_the_devices_is_its_own_copy():
    agent, _, _ = build()
    assert on_device(agent, MESH) is agent
