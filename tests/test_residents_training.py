"""Tests that training with residents equals that of a dense model, over batches, updates, reorders and a restore."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.dense import mixture
from support.plans import random_planner, random_routing

from relibra_jax import Topology
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY
from relibra_jax.execution import check_residents, expert_mesh
from relibra_jax.execution.gating import GATINGS, balance_loss, gates_at
from relibra_jax.nnx import (
    Balancer,
    ExpertParallel,
    MoELayer,
    accumulate_gradients,
    check_executed,
    get_homes,
    prepare_residents,
    restore_training,
    save_training,
)
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes

LAYERS, SAMPLES, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 2, 16, 4, 6, 5, 8, 2
MICRO_BATCHES, UPDATES, BATCHES = 2, 2, 8
GATING = dataclasses.replace(GATINGS["qwen3-moe"], top_k=TOP_K)
BALANCE, LARGEST = 0.1, 0.05
TX = optax.chain(optax.clip_by_global_norm(LARGEST), optax.adamw(3e-3, eps=1e-5))
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=EXPERTS, replica_slots=1, resident_slots=2)
SIZES = Capacities(
    rows=64,
    flat=ExchangeSizes(pair=32, own=32, send=32, receive=64),
    node=ExchangeSizes(pair=32, own=32, send=32, receive=32),
    local=ExchangeSizes(pair=32, own=32, send=32, receive=64),
    exports=2,
    export_copies=2,
    push=PushSizes(exports=4, pair=6, own=4),
)
"""Buffer sizes that are large enough for every batch, so that one step serves all."""


@functools.cache
def data():
    """Return the inputs and routing of all batches, each with different hot experts."""
    rng = np.random.default_rng(0)
    sizes = {"samples": SAMPLES, "tokens": TOKENS, "layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K}
    return [(rng.normal(size=(SAMPLES, TOKENS, WIDTH)), random_routing(rng, **sizes)) for _ in range(BATCHES)]


class Model(nnx.Module):
    """A residual stack of mixture-of-experts layers."""

    def __init__(self, topology, mesh, **options):
        options |= {"mesh": mesh, "rngs": nnx.Rngs(0)}
        self.layers = nnx.List([MoELayer(topology, WIDTH, HIDDEN, GATING, **options) for _ in range(LAYERS)])

    def __call__(self, x, replay, layers, parallel):
        logits, rows = [], []
        for number, moe in enumerate(self.layers):
            ids = replay.expert_ids[..., number, :]
            moe_output = moe(x, ids, layers.layer(number), parallel=parallel, mask=replay.mask)
            x = x + moe_output.output
            logits.append(moe_output.router_logits)
            rows.append(moe_output.slot_rows)
        return x, logits, jnp.stack(rows)


@nnx.jit(static_argnames=("update",))
def train_step(model, optimizer, batch, sequences, batch_load, residents, *, update):
    """Run one update of a batch, on every second one of its micro-batches in order."""

    def objective(model, sequences, layers):
        x, replay = sequences
        out, logits, slot_rows = model(x, replay, layers, batch.parallel)
        loss = (jnp.square(out - 1).sum(-1) * replay.mask).sum() / (SAMPLES * TOKENS)
        of_layer = functools.partial(balance_loss, gating=GATING, mask=replay.mask)
        uneven = sum(of_layer(each, batch_load[layer]) for layer, each in enumerate(logits))
        return loss + BALANCE * uneven, (loss, slot_rows)

    share = slice(update * MICRO_BATCHES, (update + 1) * MICRO_BATCHES)
    gradients, (losses, slot_rows) = accumulate_gradients(
        *(model, objective, batch, sequences),
        micro_batches=share,
        residents=residents,
        step=optimizer.step[...],
    )
    optimizer.update(model, gradients)
    return losses.sum(), optax.tree.norm(gradients), slot_rows


class Run:
    """A run on a mesh of ranks, with check_rows in its layers."""

    def __init__(self, topology=TOPOLOGY, axes=None, param_dtype=jnp.float64, gather_once=False, **layer):
        devices = topology.num_ranks * int(np.prod(list((axes or {}).values())))
        mesh = expert_mesh(topology, devices=jax.devices()[:devices], **(axes or {}))
        self.model = Model(topology, mesh, param_dtype=param_dtype, **layer)
        self.optimizer = nnx.Optimizer(self.model, TX, wrt=nnx.Param)
        self.balancer = Balancer(
            PLANNER,
            ExpertParallel(
                mesh=mesh,
                topology=topology,
                capacities=SIZES if topology == TOPOLOGY else None,
                check_rows=True,
                gather_once=gather_once,
            ),
            num_layers=LAYERS,
            num_micro_batches=MICRO_BATCHES * UPDATES,  # of each group
            key=jax.random.key(0),
            assign=None,
        )
        self.order = []

    def train(self, first, last, *, share_push=False):
        """Train on some batches and return the losses of their updates."""
        losses = []
        for number in range(first, last):
            x, replay = data()[number]
            batch = self.balancer.prepare(self.model, self.optimizer, replay)
            sequences = batch.to_ranks((np.asarray(x, self.model.layers[0].experts.dtype), replay))
            load = batch.batch_plan.load.sum((0, 2, 3))
            slot_rows = []
            for update in range(UPDATES):
                residents = PUSH(self.model, self.optimizer, batch) if share_push else None
                if share_push:
                    plan = batch.batch_plan.plan
                    check_residents(residents, self.optimizer.step[...], plan, batch.parallel.topology)
                    self.residents = residents
                loss, norm, rows_of_update = train_step(
                    *(self.model, self.optimizer, batch, sequences, load, residents), update=update
                )
                losses.append(float(loss))
                slot_rows.append(rows_of_update)
                self.norm = float(norm)
            check_executed(np.concatenate(slot_rows), batch)
            self.batch = batch
            self.order.append(np.asarray(batch.batch_plan.assignment.sample))
        return losses

    def logical(self):
        """Return the parameters as NumPy arrays, with experts in the order of their ids."""
        return [
            {"experts": np.asarray(moe.experts[...]).reshape(EXPERTS, 3, WIDTH, HIDDEN)[row]}
            | {"router": np.asarray(moe.router[...])}
            for moe, row in zip(self.model.layers, get_homes(self.model), strict=True)
        ]


PLANNER = random_planner()
PUSH = nnx.jit(prepare_residents)


def train_dense(params, order):
    """Run the same updates on a dense model, with the samples of each update."""

    @jax.jit
    def step(params, opt_state, x, ids, mask, batch_load):
        def loss_of(params):
            y, uneven = x, 0.0
            for layer, weights in enumerate(params):
                logits = y @ weights["router"]
                uneven += balance_loss(logits, batch_load[layer], gating=GATING, mask=mask)
                chosen = jnp.where(mask[..., None], ids[:, :, layer], EMPTY)
                gates = gates_at(logits, chosen, GATING)
                y = y + mixture(y, chosen, gates, weights["experts"])
            loss = (jnp.square(y - 1).sum(-1) * mask).sum() / (SAMPLES * TOKENS)
            return loss + BALANCE * uneven, loss

        gradients, loss = jax.grad(loss_of, has_aux=True)(params)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = TX.init(params), []
    for (x, replay), sample in zip(data(), order, strict=False):
        ids = np.asarray(replay.expert_ids, np.int32)
        real_ids = np.where(replay.mask[..., None, None], ids, EXPERTS)
        load = np.stack(
            [np.bincount(real_ids[:, :, layer].ravel(), minlength=EXPERTS + 1) for layer in range(LAYERS)]
        )
        for chosen in np.split(sample, UPDATES):
            mask = replay.mask & np.isin(np.arange(SAMPLES), chosen)[:, None]
            params, opt_state, loss = step(params, opt_state, x, ids, mask, load[:, :EXPERTS])
            losses.append(float(loss))
    return params, losses


def largest_difference(actual, desired):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)


@pytest.fixture(scope="module")
def whole():
    """The initial parameters of an uninterrupted run, the run, and its losses."""
    with jax.enable_x64(True):
        run = Run()
        first = run.logical()
        return first, run, run.train(0, BATCHES)


@pytest.mark.slow
def test_training_with_residents_equals_a_dense_model(whole):
    first, run, losses = whole
    with jax.enable_x64(True):
        params, desired = train_dense(jax.tree.map(jnp.asarray, first), run.order)
    np.testing.assert_allclose(losses, desired, rtol=1e-9)
    assert largest_difference(run.logical(), params) < 1e-9
    assert run.norm > LARGEST, "clipping has to bite"
    assert largest_difference(run.logical(), first) > 0.01
    resident = np.asarray(resident_experts(run.batch.batch_plan.plan, TOPOLOGY))
    assert (resident != EMPTY).mean() > 0.3


@pytest.mark.slow
def test_training_with_residents_continues_from_its_checkpoint(whole, tmp_path):
    with jax.enable_x64(True):
        run, other = Run(), Run()
        run.train(0, 2)
        with ocp.CheckpointManager(tmp_path) as manager:
            save_training(manager, 2, run.model, run.optimizer, run.balancer)
            manager.wait_until_finished()
            restore_training(manager, other.model, other.optimizer, other.balancer)
        assert other.train(2, 4) == whole[2][2 * UPDATES : 4 * UPDATES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "ranks_per_node", "gather_once"),
    [
        ({"data": 2, "fsdp": 2}, 1, False),
        ({"data": 2, "fsdp": 2}, 1, True),
        pytest.param({"data": 2}, 2, False, marks=pytest.mark.long),
        pytest.param({"fsdp": 2}, 2, False, marks=pytest.mark.long),
    ],
)
def test_training_with_residents_is_the_same_over_data_and_fsdp_axes(axes, ranks_per_node, gather_once):
    with jax.enable_x64(True):
        topology = dataclasses.replace(TOPOLOGY, ranks_per_node=ranks_per_node)
        fsdp_axis = "fsdp" if "fsdp" in axes else None
        run = Run(topology, axes=axes, fsdp_axis=fsdp_axis, gather_once=gather_once)
        first = run.logical()
        losses = run.train(0, 2)
        # The micro-batches of a copy are consecutive: the first halves of all copies are one update.
        of_copies = (each.reshape(2 ** len(axes), UPDATES, -1) for each in run.order)
        order = [each.swapaxes(0, 1).reshape(UPDATES, -1) for each in of_copies]
        params, desired = train_dense(jax.tree.map(jnp.asarray, first), order)
    np.testing.assert_allclose(losses, desired, rtol=1e-9)
    assert largest_difference(run.logical(), params) < 1e-9


@pytest.mark.long
def test_prepare_residents_serves_one_update_only(whole):
    with jax.enable_x64(True):
        run = Run()
        assert run.train(0, 1, share_push=True) == whole[2][:UPDATES]
        plan = run.batch.batch_plan.plan
        with pytest.raises(ValueError, match="pushed at optimizer step 1, but the optimizer is at step 2"):
            check_residents(run.residents, run.optimizer.step[...], plan, TOPOLOGY)


@pytest.mark.long
def test_residents_in_bfloat16_keep_gradients_in_float32():
    """Sums over micro-batches are float32, so that residents lose no more precision than home experts."""
    options = {"param_dtype": jnp.float32, "dtype": jnp.bfloat16}
    run, without = Run(**options), Run(dataclasses.replace(TOPOLOGY, resident_slots=0), **options)
    np.testing.assert_allclose(run.train(0, 3), without.train(0, 3), rtol=5e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(run.model, nnx.Param))} == {jnp.dtype("float32")}
    assert largest_difference(run.logical(), without.logical()) < 3e-3
    assert PUSH(run.model, run.optimizer, run.batch).weights.dtype == jnp.bfloat16
