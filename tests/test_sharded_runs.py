"""Runs over copies of the expert-parallel group, with dense parameters sharded: they learn what one group learns.

With training state in host memory they learn the same, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from support.runs import SIZES, SMALL

from experiments.aot.bytes import count_by_kind, group_axes
from experiments.aot.findings import read_compiled
from experiments.rl.configs import Train
from experiments.rl.stages import prepare_live
from experiments.rl.step import TrainingBatch, recompute, update
from experiments.rl.trainer import Trainer
from relibra_jax.evaluation import Ranks
from relibra_jax.execution.memory import HOST, to_host
from relibra_jax.models import pretrained_tensors
from relibra_jax.nnx import ExpertParam, PreparedBatch
from relibra_jax.nnx.host_state import is_training_state, on_device

pytestmark = pytest.mark.usefixtures("smallest_policy")
ONE_GROUP = {"ranks": Ranks(nodes=1, ranks_per_node=2)}
COPIES = {**ONE_GROUP, "data": 2, "fsdp": 2, "shard_dense": True}
LOOSE = 2e-4
"""The relative tolerance of what training changed: sums of float32 have another order, and AdamW divides by them."""


@pytest.fixture(scope="module", autouse=True)
def _first_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.state.FIRST_CAPACITIES", SIZES)
        yield


def new_trainer(copies, **changes):
    # As many tokens in a micro-batch of all ranks together, so that sums differ in their order alone.
    sizes = COPIES | {"micro_batches": 2} if copies else ONE_GROUP | {"micro_batches": 8}
    return Trainer(Train(**(SMALL | {"warmup_steps": 2, "steps": 1, "epochs": 1} | sizes | changes)), 0)


@functools.cache
def trained(copies, **changes):
    """Warm up for two updates, then learn once; return the trainer and the metrics of the steps."""
    trainer = new_trainer(copies, **changes)
    metrics = [trainer.warm_up(), trainer.warm_up(), trainer.learn()]
    return trainer, metrics


def is_learned(name):
    """Return whether a metric is a result of the run, and no time."""
    return not name.startswith(("speed/", "time/"))


@pytest.mark.parametrize("gather_once", [False, True])
def test_run_over_copies_with_sharded_dense_parameters_learns_the_same(gather_once):
    changes = {"gather_once": True} if gather_once else {}
    (one, of_one), (several, of_several) = trained(False), trained(True, **changes)
    for before, after in zip(of_one[:2], of_several[:2], strict=True):
        assert after["warmup/loss"] == pytest.approx(before["warmup/loss"], rel=1e-6)
    assert several.mesh.shape == {"data": 2, "fsdp": 2, "node": 1, "local": 2}
    # Both sample with the same keys, so up to rounding they learn from the same responses.
    assert of_several[2]["reward/mean"] == of_one[2]["reward/mean"]
    assert of_several[2]["policy/gradient_norm"] == pytest.approx(of_one[2]["policy/gradient_norm"], rel=1e-4)
    desired = dict(pretrained_tensors(one.state.agent.policy))
    for name, value in pretrained_tensors(several.state.agent.policy):
        np.testing.assert_allclose(
            value, desired[name], atol=LOOSE * np.abs(desired[name]).max(), err_msg=name
        )


@pytest.mark.slow
def test_sharded_parameters_and_their_optimizer_state_take_a_part_of_the_memory():
    trainer, _ = trained(True)
    ranks = 4  # fsdp and local
    for tree in (trainer.state.agent, trainer.state.optimizer):
        for path, leaf in jax.tree.leaves_with_path(nnx.state(tree)):
            kernel = any(
                name in jax.tree_util.keystr(path) for name in ("kernel", "embedding", "router", "head")
            )
            if kernel and leaf.ndim > 1:
                assert leaf.addressable_shards[0].data.size * ranks == leaf.size, path
    experts = jax.tree.leaves(nnx.state(trainer.state.agent, ExpertParam))
    assert all(leaf.sharding.spec[5] == "fsdp" for leaf in experts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "copies", [True, False], ids=["from copies to one group", "from one group to copies"]
)
def test_checkpoints_move_between_one_group_and_copies(tmp_path, copies):
    saved, restored = trained(copies)[0], new_trainer(not copies)
    with ocp.CheckpointManager(tmp_path) as manager:
        saved.state.save(manager)
        manager.wait_until_finished()
        restored.restore(manager)
    assert restored.state.step == 3
    desired = dict(pretrained_tensors(saved.state.agent.policy))
    for name, value in pretrained_tensors(restored.state.agent.policy):
        np.testing.assert_array_equal(value, desired[name], err_msg=name)


@pytest.mark.long  # test_host_state compares steps with those on the devices, and the next test reads the programs
def test_run_with_its_state_on_the_host_learns_the_same_bits(tmp_path):
    (devices, of_devices), (host, of_host) = trained(True), trained(True, state_memory=HOST)
    for before, after in zip(of_devices, of_host, strict=True):
        assert {name: before[name] for name in before if is_learned(name)} == {
            name: after[name] for name in after if is_learned(name)
        }
    with ocp.CheckpointManager(tmp_path) as manager:
        devices.state.save(manager)
        manager.wait_until_finished()
        restored = new_trainer(True, state_memory=HOST)
        restored.restore(manager)
    desired = dict(pretrained_tensors(devices.state.agent.policy))
    for trainer in (host, restored):
        for leaf in jax.tree.leaves(nnx.state(trainer.state.agent, nnx.Param)):
            assert leaf.sharding.memory_kind == HOST
        for name, value in pretrained_tensors(trainer.state.agent.policy):
            np.testing.assert_array_equal(value, desired[name], err_msg=name)


MOVES = {"device_put", "dynamic_slice", "dynamic_update_slice", "squeeze", "reshape", "broadcast_in_dim"}
"""What programs may do with arrays in host memory. XLA for GPUs runs anything else on the host's cores."""


def computed_on_host(jaxpr):
    """Yield the primitives that a program and its inner programs apply to arrays in host memory."""
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        for each in inner:
            yield from computed_on_host(each)
        spaces = [getattr(each.aval, "memory_space", None) for each in equation.invars]
        if not inner and jax.memory.Space.Host in spaces and equation.primitive.name not in MOVES:
            yield equation.primitive.name


def test_programs_compute_nothing_in_host_memory():
    trainer = new_trainer(True, state_memory=HOST, activation_memory=HOST)
    state, config = trainer.state, trainer.config
    tokens = np.ones((config.samples, 21), np.int32)
    samples = TrainingBatch(tokens, tokens > 0, weights=np.ones(tokens.shape, np.float32))
    batch, samples = prepare_live(state, config, samples)
    load = jnp.ones((config.model_config.moe_layers, config.model_config.num_experts), jnp.int32)
    graph, values = nnx.split((state.agent, state.optimizer))

    def run(values, samples):
        agent, optimizer = nnx.merge(graph, values)
        recomputed = recompute(on_device(agent, trainer.mesh), batch, samples, temperature=1.0)
        return recomputed, update(agent, optimizer, batch, samples, load), nnx.state((agent, optimizer))

    jaxpr = jax.make_jaxpr(run)(values, samples).jaxpr
    assert set(computed_on_host(jaxpr)) == set()
    assert set(
        computed_on_host(jax.make_jaxpr(jax.jit(lambda array: array + array))(to_host(tokens)).jaxpr)
    ) == {"add"}
    leaves = jax.tree.leaves(values, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    on_host = [each for each in jaxpr.invars if each.aval.memory_space == jax.memory.Space.Host]
    assert len(on_host) == sum(map(is_training_state, leaves)) + len(jax.tree.leaves(samples))


def test_samples_that_do_not_divide_over_all_copies_are_refused():
    with pytest.raises(ValueError, match=r"= 32 samples must divide evenly over 64 ranks x micro_batches=2"):
        Train(**SMALL, ranks=Ranks(nodes=1, ranks_per_node=8), data=4, fsdp=2)


def test_experts_that_are_gathered_once_need_copies_to_gather_from():
    with pytest.raises(ValueError, match=r"gather_once=True needs fsdp of at least 2"):
        Train(**SMALL, **ONE_GROUP, data=2, gather_once=True)


@pytest.mark.slow
def test_experts_that_are_gathered_once_are_sent_as_often_as_priced():
    """A program gathers the weights of two layers once, whatever the number of micro-batches, or twice in each."""
    trainer = new_trainer(True, gather_once=True)
    state, config, topology = trainer.state, trainer.config, trainer.config.topology
    tokens = np.ones((config.samples, 21), np.int32)
    samples = TrainingBatch(tokens, tokens > 0, weights=np.ones(tokens.shape, np.float32))
    batch, samples = prepare_live(state, config, samples)
    load = jnp.ones((config.model_config.moe_layers, config.model_config.num_experts), jnp.int32)
    graph, values = nnx.split((state.agent, state.optimizer))

    def gathered(once):
        parallel = dataclasses.replace(batch.parallel, gather_once=once)

        @jax.jit
        def run(values, samples):
            agent, optimizer = nnx.merge(graph, values)
            update(agent, optimizer, PreparedBatch(None, parallel), samples, load)
            return nnx.state((agent, optimizer))

        program, _ = read_compiled(run.lower(values, samples).compile())
        transfers = list(program.transfers())
        sent = count_by_kind(transfers, trainer.mesh.shape)
        # The sum over fsdp comes before that over data, which only sends parts.
        sums = [each for each in transfers if each.kind == "all-reduce" and 3 in each.operands[0][1][-3:-2]]
        widths = {group_axes(each.start, trainer.mesh.shape)[0]: each.operands[0][1][-2] for each in sums}
        return sent["dense", "all-gather", "fsdp"], widths

    experts = topology.home_slots * config.model_config.moe_layers * config.model_config.expert_size
    once, widths = gathered(True)
    assert once == 4 * experts // 2
    width = config.model_config.width
    assert widths == {"fsdp": width, "data": width // 2}
    each_time, _ = gathered(False)
    assert each_time == config.micro_batches * 2 * 4 * experts // 2


def test_fsdp_that_does_not_divide_the_width_is_refused():
    with pytest.raises(ValueError, match=r"fsdp=3 must divide the model's width 16"):
        Train(**(SMALL | {"prompts": 12}), ranks=Ranks(nodes=1, ranks_per_node=2), fsdp=3)
