"""Tests of the Balancer: batches prepared in one call, training in any loop, and errors for every misuse of a loop."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.plans import random_routing

from experiments.examples import flax_loop
from relibra_jax import (
    BALANCE,
    Batch,
    BatchPlan,
    Placement,
    Planner,
    RoutingReplay,
    Topology,
    assign_samples,
    count_batch,
    eplb,
    expert_load,
    fill_unfinished,
    place_experts,
    plan_batch,
    relibra,
    sample_load,
    static,
)
from relibra_jax.contract.types import EMPTY
from relibra_jax.cost import CLUSTERS, MODELS, CostModel
from relibra_jax.execution import parallel as parallel_module
from relibra_jax.execution.exchange import KINDS
from relibra_jax.execution.gating import GATINGS
from relibra_jax.execution.prepared_layer import prepare_layers
from relibra_jax.nnx import (
    Balancer,
    ExpertParallel,
    MoELayer,
    accumulate_gradients,
    expert_mesh,
    get_homes,
    logical_params,
    restore_training,
    save_training,
    set_homes,
)
from relibra_jax.nnx import batch_planner as batch_planner_module
from relibra_jax.nnx.derived_cost import derive_cost
from relibra_jax.nnx.way_prices import allowed_way, cost_in_way, run_in_way
from relibra_jax.routing.exchange_rules import Way, exchange_choices
from relibra_jax.routing.sizes import check_capacities

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
LAYERS, SAMPLES, TOKENS, WIDTH, HIDDEN, TOP_K, MICRO_BATCHES = 2, 10, 6, 8, 6, 2, 2
GATING = dataclasses.replace(GATINGS["qwen3-moe"], top_k=TOP_K)
IN_ORDER = {"assign": None, "num_layers": LAYERS, "num_micro_batches": MICRO_BATCHES}
EPLB = eplb()
REORDERING = relibra(place=functools.partial(place_experts, steps=20))
ASSIGN = functools.partial(assign_samples, steps=10)
GPU_CHOICES = exchange_choices(on_gpu=True)


class Stack(nnx.Module):
    """A residual stack of mixture-of-experts layers."""

    def __init__(self, topology, **options):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [MoELayer(topology, WIDTH, HIDDEN, GATING, rngs=rngs, **options) for _ in range(LAYERS)]
        )

    def __call__(self, x, replay, layers, parallel):
        for number, layer in enumerate(self.layers):
            ids = None if layers is None else replay.expert_ids[..., number, :]
            plan = None if layers is None else layers.layer(number)
            x = x + layer(jnp.tanh(x), ids, plan, parallel=parallel, mask=replay.mask).output
        return x


TRACES = []  # the buffer sizes with which the step was traced, one entry per trace


@nnx.jit
def train_step(model, optimizer, batch, sequences):
    TRACES.append(batch.parallel.capacities)

    def loss_of(model, sequences, layers):
        x, replay = sequences
        out = model(x, replay, layers, batch.parallel)
        loss = (jnp.square(out - 1).sum(-1) * replay.mask).sum() / (SAMPLES * TOKENS)
        return loss, loss

    gradients, losses = accumulate_gradients(model, loss_of, batch, sequences)
    optimizer.update(model, gradients)
    return losses.sum()


@functools.cache
def batches():
    """Inputs and routing of six batches. With ten samples some places of the ranks stay empty."""
    rng = np.random.default_rng(0)
    sizes = {"samples": SAMPLES, "tokens": TOKENS, "layers": LAYERS, "experts": 8, "top_k": TOP_K}
    return [
        (rng.normal(size=(SAMPLES, TOKENS, WIDTH)).astype(np.float32), random_routing(rng, **sizes))
        for _ in range(6)
    ]


class Run:
    """A model, its optimizer and its balancer."""

    def __init__(
        self,
        planner=EPLB,
        topology=TOPOLOGY,
        axes=None,
        options=IN_ORDER,
        striped=None,
        fetch="auto",
        path="auto",
        **layer,
    ):
        devices = topology.num_ranks * int(np.prod(list((axes or {}).values())))
        self.mesh = expert_mesh(topology, devices=jax.devices()[:devices], **(axes or {}))
        self.model = Stack(topology, **({"mesh": self.mesh} | layer))
        self.optimizer = nnx.Optimizer(self.model, OPTIMIZER, wrt=nnx.Param)
        how = {"striped": striped, "fetch": fetch, "path": path}
        parallel = ExpertParallel(mesh=self.mesh, topology=topology, **how)
        self.balancer = Balancer(planner, parallel, key=jax.random.key(0), **options)

    def prepare(self, number=0, **options):
        return self.balancer.prepare(self.model, self.optimizer, batches()[number][1], **options)

    def train(self, first, last):
        """Train on some batches and return their losses."""
        losses = []
        for number in range(first, last):
            batch = self.prepare(number)
            losses.append(
                float(train_step(self.model, self.optimizer, batch, batch.to_ranks(batches()[number])))
            )
        return losses

    def logical(self):
        """Return the parameters as NumPy arrays, with experts in the order of their ids."""
        home = get_homes(self.model)
        leaves = []
        for layer, row in zip(self.model.layers, home, strict=True):
            leaves.append(np.asarray(layer.experts[...]).reshape(8, 3, WIDTH, HIDDEN)[row])
            leaves.append(np.asarray(layer.router[...]))
        return leaves


OPTIMIZER = optax.adamw(1e-2, eps=1e-3)


@functools.cache
def trained():
    """Return an uninterrupted run over all batches, and its losses."""
    run = Run()
    return run, run.train(0, 6)


@pytest.mark.long
def test_balancer_training_equals_static_placement():
    run, losses = trained()
    still = Run(static())
    np.testing.assert_allclose(still.train(0, 6), losses, rtol=2e-6)
    assert losses[-1] < losses[0]
    assert (get_homes(run.model) != get_homes(still.model)).any()
    for actual, desired in zip(still.logical(), run.logical(), strict=True):
        np.testing.assert_allclose(actual, desired, atol=5e-5)


@pytest.mark.long  # test_residents_training trains over the same axes, with residents
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "fsdp": 2}])
def test_balancer_trains_the_same_over_data_and_fsdp_axes(axes):
    topology = dataclasses.replace(TOPOLOGY, num_nodes=1)
    run = Run(topology=topology, axes=axes, fsdp_axis="fsdp" if "fsdp" in axes else None)
    np.testing.assert_allclose(run.train(0, 2), trained()[1][:2], rtol=2e-6)
    batch = run.prepare(2)
    valid = batch.layers().token_tables.valid
    assert valid.shape == (2, LAYERS, *axes.values(), 1, 2)
    assert valid.all()
    sequences = batch.to_ranks(np.arange(SAMPLES) + 1)
    assert sequences.sharding.is_equivalent_to(
        jax.NamedSharding(run.mesh, jax.P(None, (*axes, "node", "local"))), 2
    )
    assert sorted(np.asarray(sequences)[np.asarray(sequences) > 0].tolist()) == list(range(1, SAMPLES + 1))


def test_prepare_puts_a_model_on_the_mesh():
    run = Run(mesh=None)
    assert run.model.layers[0].experts.sharding.num_devices == 1
    np.testing.assert_allclose(run.train(0, 1), trained()[1][:1], rtol=2e-6)
    sharding = run.model.layers[0].experts.sharding
    assert sharding == jax.NamedSharding(run.mesh, jax.P("node", "local"))
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(nnx.state(run.optimizer))} == {run.mesh}


def test_train_step_compiles_once_for_equal_sizes():
    _, losses = trained()
    before = len(TRACES)
    assert before > 0
    assert Run().train(0, 2) == losses[:2]
    assert len(TRACES) == before


def test_to_ranks_puts_sequences_on_the_ranks_of_their_samples():
    run = Run()
    batch = run.prepare()
    sample = np.asarray(batch.batch_plan.assignment.sample).reshape(MICRO_BATCHES, -1)
    sequences = np.asarray(batch.to_ranks({"number": np.arange(SAMPLES) + 1})["number"])
    np.testing.assert_array_equal(sequences, np.where(sample == EMPTY, 0, sample + 1))
    assert sorted(sample[sample != EMPTY].tolist()) == list(range(SAMPLES))


@pytest.mark.slow
def test_prepare_assigns_samples_unless_assign_is_none():
    run = Run(static(), options=IN_ORDER | {"assign": assign_samples})
    sample = np.asarray(run.prepare().batch_plan.assignment.sample)
    assert sorted(sample[sample != EMPTY].tolist()) == list(range(SAMPLES))
    assert (sample.ravel() != np.asarray(Run(static()).prepare().batch_plan.assignment.sample).ravel()).any()


@pytest.mark.parametrize(("choice_seconds", "expected"), [(0.0, "fitted"), (1.0, "padded")])
def test_prepare_chooses_the_exchange_of_gpus_by_price(monkeypatch, choice_seconds, expected):
    """Where a choice of a length costs more than the rows that it saves, exchanges are padded."""
    monkeypatch.setattr(parallel_module, "exchange_choices", lambda on_gpu, ragged: GPU_CHOICES)
    run = Run()
    cost = derive_cost(run.model, num_layers=LAYERS, mesh=run.mesh)
    cluster = dataclasses.replace(cost.cluster, choice_seconds=choice_seconds)
    run = Run(options=IN_ORDER | {"cost": dataclasses.replace(cost, cluster=cluster)})
    batch = run.prepare()
    assert batch.parallel.exchange == run.balancer.cost.exchange == expected
    assert expected in str(batch.parallel.kinds(TOP_K))


@pytest.mark.parametrize(("fast", "slow", "striped"), [(1e6, 1e15, False), (1e15, 1e6, True)])
def test_prepare_chooses_striping_by_price_and_keeps_it(monkeypatch, fast, slow, striped):
    """Where dealing tokens inside a node costs more than level lanes save, layers are not striped."""
    monkeypatch.setattr(parallel_module, "choose_striping", lambda topology, top_k, path: True)
    monkeypatch.setattr(parallel_module, "may_stripe", lambda topology, top_k: True)
    run = Run()
    cost = derive_cost(run.model, num_layers=LAYERS, mesh=run.mesh)
    rates = {"fast_bandwidth": fast, "slow_bandwidth": slow, "memory_bandwidth": 1e15}
    cost = dataclasses.replace(cost, cluster=dataclasses.replace(cost.cluster, **rates))
    run, resumed = (Run(options=IN_ORDER | {"cost": cost}) for _ in range(2))
    batch = run.prepare()
    assert batch.parallel.is_striped == run.balancer.cost.striped == striped
    held = np.asarray(expert_load(batches()[0][1], batch.batch_plan.assignment, num_experts=8))
    assert np.array_equal(batch.batch_plan.load, held) != striped
    np.testing.assert_array_equal(np.asarray(batch.batch_plan.load).sum(3), held.sum(3))
    resumed.balancer.state = run.balancer.state
    assert resumed.balancer.parallel.striped == striped
    assert resumed.balancer.cost.striped == striped
    other = Run(options=IN_ORDER | {"cost": run.balancer.cost})
    assert other.balancer.parallel.striped == striped
    named = Run(options=IN_ORDER, striped=not striped)
    named.balancer.state = run.balancer.state
    assert named.balancer.parallel.striped == (not striped)


@pytest.mark.long
def test_a_state_from_gpus_keeps_what_a_cpu_can_run():
    """The exchange is chosen again, all else is kept."""
    run = run_with_waits(1e6)
    run.prepare()
    state, here = run.balancer.state, run_with_waits(1e6)
    _, *choices = state.way
    here.balancer.state = state._replace(way=np.array([KINDS.index("fitted"), *choices], np.int32))
    assert here.balancer.state.way.tolist() == [KINDS.index("padded"), *choices]
    lone = dataclasses.replace(TOPOLOGY, num_nodes=4, ranks_per_node=1)
    alone = ExpertParallel(mesh=expert_mesh(lone, devices=jax.devices()[:4]), topology=lone)
    far = Way("padded", striped=True, replicas=True, across_nodes=True)
    assert not allowed_way(far, alone).striped
    assert not allowed_way(far, dataclasses.replace(alone, across_nodes=False)).across_nodes
    assert here.balancer.parallel == run.balancer.parallel


def run_with_waits(wait_seconds, planner=REORDERING, fetch="auto", **cluster_changes):
    """Return a run on a cluster whose ranks compute slowly, and wait for each other at every exchange."""
    cost = derive_cost(Run().model, num_layers=LAYERS, mesh=Run().mesh)
    cluster = dataclasses.replace(
        cost.cluster, matmul_flops=1e3, wait_seconds=wait_seconds, **cluster_changes
    )
    cost = dataclasses.replace(cost, cluster=cluster)
    return Run(planner, options=IN_ORDER | {"cost": cost}, fetch=fetch)


@pytest.mark.long
def test_prepare_leaves_out_replica_slots_where_waits_cost_more_than_balance_gains(capsys):
    """The choice is that of the first batch. A balancer that continues from its state makes the same plans."""
    run = run_with_waits(1e6)
    batch = run.prepare()
    assert "replica slots are left out" in capsys.readouterr().err
    assert batch.parallel.topology.replica_slots == run.balancer.parallel.topology.replica_slots == 0
    assert np.shape(batch.batch_plan.plan.slot_expert)[-1] == TOPOLOGY.held_slots
    train_step(run.model, run.optimizer, batch, batch.to_ranks(batches()[0]))
    early, resumed = run_with_waits(1e6), run_with_waits(1e6)
    resumed.balancer.state = run.balancer.state
    assert resumed.balancer.parallel == run.balancer.parallel
    set_homes(resumed.model, run.balancer.state.home)
    again = resumed.prepare(1).batch_plan
    for leaves in zip(*map(jax.tree.leaves, (run.prepare(1).batch_plan, again)), strict=True):
        np.testing.assert_array_equal(*leaves)
    run.balancer.state = early.balancer.state
    assert run.balancer.parallel.topology == TOPOLOGY, "before its first batch nothing was chosen"


@pytest.mark.long
def test_prepare_puts_replicas_on_other_nodes_where_attention_hides_their_transfer(capsys):
    """The layers then fetch replicas from all ranks, and a balancer that continues from the state does so too."""
    run = run_with_waits(0.0, fetch="emulated", slow_bandwidth=20.0, matmul_efficiency=0.02)
    batch = run.prepare()
    assert "replicas may be on other nodes" in capsys.readouterr().err
    assert batch.parallel.across_nodes
    assert run.balancer.cost.price(TOPOLOGY).across_nodes
    plan = batch.batch_plan.plan
    home_node, copied = np.asarray(plan.home) // 4, np.asarray(plan.slot_expert)[..., TOPOLOGY.held_slots :]
    on_node = [copied[:, layer, node] for layer in range(LAYERS) for node in range(2)]
    away = [home_node[number // 2] != number % 2 for number in range(len(on_node))]
    assert any(there[slots[slots != EMPTY]].any() for slots, there in zip(on_node, away, strict=True))
    assert np.isfinite(train_step(run.model, run.optimizer, batch, batch.to_ranks(batches()[0])))
    resumed = run_with_waits(0.0, fetch="emulated")
    resumed.balancer.state = run.balancer.state
    assert resumed.balancer.parallel == run.balancer.parallel


@pytest.mark.slow
def test_prepare_chooses_nothing_if_the_plan_is_not_valid(monkeypatch):
    run = run_with_waits(1e6)
    with monkeypatch.context() as patch:
        patch.setattr(batch_planner_module, "check_plans", raise_not_valid)
        with pytest.raises(ValueError, match="not valid"):
            run.prepare()
    assert run.balancer.parallel.topology == TOPOLOGY
    assert run.balancer.state.way.tolist() == [EMPTY] * 4
    assert run.prepare().parallel.topology.replica_slots == 0


def raise_not_valid(*plans, **options):
    raise ValueError("not valid")


def test_balancer_state_with_an_unknown_way_is_rejected_whole():
    balancer = Run().balancer
    state = balancer.state
    with pytest.raises(ValueError, match=r"way: \[9, 1, 1, 0\]"):
        balancer.state = state._replace(way=np.array([9, 1, 1, 0], np.int32), home=state.home[::-1])
    np.testing.assert_array_equal(balancer.state.home, state.home)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "other"), [("auto", "flat"), ("flat", "auto")])
def test_balancer_state_may_be_set_in_a_run_with_another_path(path, other):
    """What nodes exchange has sizes on one path only; on another one, they are counted anew."""
    before, after = Run(static(), path=path), Run(static(), path=other)
    before.prepare()
    after.balancer.state = before.balancer.state
    before.balancer.discard()
    same, batch = (run.prepare(1) for run in (before, after))
    chex.assert_trees_all_equal(*(jax.device_get(each.batch_plan) for each in (same, batch)))
    assert (batch.parallel.capacities.node is None) == (other == "flat")


@pytest.mark.parametrize(("planner", "wait_seconds"), [(REORDERING, 0.0), (EPLB, 1e6)])
def test_prepare_keeps_replica_slots_that_pay_and_those_of_planners_as_published(planner, wait_seconds):
    run = run_with_waits(wait_seconds, planner)
    batch = run.prepare()
    assert batch.parallel.topology == TOPOLOGY
    assert (np.asarray(batch.batch_plan.plan.slot_expert)[..., TOPOLOGY.held_slots :] != EMPTY).any()


def counts_of(number):
    replay = batches()[number][1]
    return Batch(np.asarray(sample_load(replay, num_experts=8)), replay.mask.sum(1))


@pytest.mark.long
def test_plan_ahead_starts_the_search_of_the_next_batch():
    options = IN_ORDER | {"assign": ASSIGN, "cost": "balance"}
    ahead, afresh = Run(REORDERING, options=options), Run(REORDERING, options=options)
    finished = np.arange(SAMPLES) < 7
    load, lengths, *_ = counts_of(0)
    before = get_homes(ahead.model)
    with ThreadPoolExecutor(1) as beside:  # as during a rollout; counts of unfinished samples are not read
        unknown = Batch(np.where(finished[:, None, None], load, 0), np.where(finished, lengths, 0))
        beside.submit(ahead.balancer.plan_ahead, unknown, finished).result()
    np.testing.assert_array_equal(get_homes(ahead.model), before)
    # The pure functions behind plan_ahead and prepare, with the random keys of a balancer.
    planner_key, key = jax.random.split(jax.random.key(0))
    state = REORDERING.init(TOPOLOGY, LAYERS, key=planner_key)
    now, _, early = jax.random.split(key, 3)[jnp.array([1, 0, 2])]
    plan = functools.partial(
        plan_batch,
        planner=REORDERING,
        topology=TOPOLOGY,
        stages=MICRO_BATCHES,
        cost=dataclasses.replace(BALANCE, sequences="padded"),
        assign=ASSIGN,
        state=state,
    )
    actual, _ = plan(fill_unfinished(unknown, finished), key=early, rounds=4)
    start = Placement(actual.plan.home, jnp.full((LAYERS, 2, 2, 0), EMPTY, jnp.int32))
    desired, _ = plan(Batch(load, lengths), key=now, rounds=2, start=start)
    first = ahead.prepare()
    for name in ("assignment", "plan"):
        chex.assert_trees_all_equal(
            *(jax.device_get(getattr(each, name)) for each in (first.batch_plan, desired))
        )
    assert (first.batch_plan.plan.home != afresh.prepare().batch_plan.plan.home).any()
    # A warm start serves one batch; the next one starts without.
    for run in (ahead, afresh):
        run.balancer.discard()
    ahead.balancer.state = afresh.balancer.state
    set_homes(ahead.model, afresh.balancer.state.home)
    second, other = ahead.prepare(1), afresh.prepare(1)
    np.testing.assert_array_equal(second.batch_plan.plan.home, other.batch_plan.plan.home)


@pytest.mark.slow
def test_plan_ahead_is_dropped_after_prepare_or_discard(monkeypatch):
    options = IN_ORDER | {"cost": "balance"}
    run, plain = Run(REORDERING, options=options), Run(REORDERING, options=options)
    search = batch_planner_module.plan_on_host

    def late(*arguments, **options):
        monkeypatch.setattr(batch_planner_module, "plan_on_host", search)
        run.prepare()
        return search(*arguments, **options)

    monkeypatch.setattr(batch_planner_module, "plan_on_host", late)
    run.balancer.plan_ahead(counts_of(0), np.ones(SAMPLES, bool))
    plain.prepare()
    for each in (run, plain):
        each.balancer.discard()
    run.balancer.plan_ahead(counts_of(0), np.ones(SAMPLES, bool))
    run.balancer.discard()
    np.testing.assert_array_equal(*(each.prepare(1).batch_plan.plan.home for each in (run, plain)))


def test_plan_ahead_rejects_planners_and_counts_that_do_not_fit():
    counts = counts_of(0)
    everything = np.ones(SAMPLES, bool)
    with pytest.raises(ValueError, match="the planner has no `reorder` and `replicate`"):
        Run().balancer.plan_ahead(counts, everything)
    balancer = Run(REORDERING).balancer
    with pytest.raises(ValueError, match="none of 10 samples has finished"):
        balancer.plan_ahead(counts, ~everything)
    with pytest.raises(ValueError, match=r"sample_load: expected shape \(10, 2, 8\), found \(10, 1, 8\)"):
        balancer.plan_ahead(counts._replace(sample_load=counts.sample_load[:, :1]), everything)


def test_prepare_without_a_replay_routes_live():
    run = Run()
    before = get_homes(run.model)
    batch = run.balancer.prepare(run.model, run.optimizer, None, mask=batches()[0][1].mask)
    assert batch.layers() is None
    assert batch.parallel.capacities is None
    assert batch.parallel.topology.replica_slots == 0
    np.testing.assert_array_equal(get_homes(run.model), before)
    loss = train_step(run.model, run.optimizer, batch, batch.to_ranks(batches()[0]))
    assert np.isfinite(loss)
    with pytest.raises(ValueError, match="needs mask, the tokens of each sample"):
        run.balancer.prepare(run.model, run.optimizer, None)


def test_prepare_rejects_a_second_batch_before_an_update():
    run = Run()
    run.prepare(0)
    with pytest.raises(
        ValueError,
        match=r"no step since the previous batch was prepared \(it is still at step 0\): .* Balancer\.discard\(\)",
    ):
        run.prepare(1)
    run.balancer.discard()
    run.prepare(1)


def test_prepared_batch_is_rejected_after_the_next_prepare():
    run = Run()
    old = run.prepare(0)
    sequences = old.to_ranks(batches()[0])
    train_step(run.model, run.optimizer, old, sequences)
    train_step(run.model, run.optimizer, old, sequences)  # a batch may have several updates
    run.prepare(1)
    with pytest.raises(ValueError, match=r"this is batch 1 of its balancer, .* for batch 2"):
        train_step(run.model, run.optimizer, old, sequences)
    with pytest.raises(ValueError, match="this is batch 1"):
        old.to_ranks(batches()[0])


def test_to_ranks_rejects_another_number_of_samples():
    batch = Run().prepare()
    with pytest.raises(ValueError, match=r"samples\['tokens'\]: shape \(7, 3\), but the batch has 10"):
        batch.to_ranks({"tokens": np.zeros((7, 3))})


def test_prepare_rejects_a_model_with_other_homes():
    run = Run()
    home = get_homes(run.model)
    home[1, [2, 5]] = home[1, [5, 2]]
    set_homes(run.model, home)
    with pytest.raises(
        ValueError, match=r"layer 1, expert 2: the model has it in home slot 5, .* expects it in home slot 2"
    ):
        run.prepare()


def wrong_replays():
    ids, mask = batches()[0][1]
    yield RoutingReplay(ids[:, :, :1], mask), "the replay has 1 MoE layers, but the Balancer has num_layers=2"
    outside = ids.copy()
    outside[mask.nonzero()[0][0], mask.nonzero()[1][0], 1, 0] = 8
    yield RoutingReplay(outside, mask), r"sample \d+, token \d+, layer 1: expert id 8 is outside 0..7"
    yield RoutingReplay(ids[:, :0], mask[:, :0]), "has no token positions"
    yield RoutingReplay(ids, None), "mask must be bool"
    yield (
        RoutingReplay(ids[:1], mask[:1]),
        r"stages\[0\]: 1 samples are fewer than its 2 micro-batches",
    )


@pytest.mark.parametrize("case", range(5))
def test_prepare_rejects_a_replay_of_another_model(case):
    run, (replay, message) = Run(), list(wrong_replays())[case]
    with pytest.raises(ValueError, match=message):
        run.balancer.prepare(run.model, run.optimizer, replay)


MALFORMED = {
    "home slots of one rank swapped": (
        lambda plan: plan._replace(
            slot_expert=plan.slot_expert.at[0, 0, 0, 0, :2].set(plan.slot_expert[0, 0, 0, 0, 1::-1])
        ),
        "home slot of expert . holds .",
    ),
    "homes of another batch": (
        lambda plan: plan._replace(home=jnp.roll(plan.home, 1, axis=1)),
        "home slot of expert . holds .",
    ),
    "an expert twice on a rank": (
        lambda plan: plan._replace(
            slot_expert=plan.slot_expert.at[0, 0, 0, 0, 2].set(plan.slot_expert[0, 0, 0, 0, 0])
        ),
        "micro-batch 0, layer 0, node 0, local rank 0: holds expert . twice",
    ),
    "a quota on an empty slot": (
        lambda plan: plan._replace(quota=plan.quota.at[0, 0, 0, 0, 2].add(1)),
        "quota 1 on an empty slot",
    ),
    "negative quotas whose sums hold": (
        lambda plan: plan._replace(quota=plan.quota.at[0, 0, 0, 0, 0].set(-1)),
        "quota -1 is negative",
    ),
    "one quota changed": (
        lambda plan: plan._replace(quota=plan.quota.at[0, 0, 0, 0, 0].add(1)),
        "quotas sum to",
    ),
    "an unknown expert": (
        lambda plan: plan._replace(slot_expert=plan.slot_expert.at[0, 0, 0, 0, 2].set(2**31 - 1)),
        "expert 2147483647 is outside 0..7",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_prepare_rejects_a_malformed_plan_before_anything_moves(case):
    change, message = MALFORMED[case]
    honest = static()

    def update(request, state, topology):
        plan, state = honest.update(request, state, topology)
        return change(plan._replace(home=jnp.asarray(plan.home))), state

    run = Run(Planner(honest.init, update))
    before = run.logical()
    with pytest.raises(ValueError, match=message):
        run.prepare()
    for actual, desired in zip(run.logical(), before, strict=True):
        np.testing.assert_array_equal(actual, desired)


def copy_of(model):
    copy = nnx.clone(model)
    nnx.update(copy, jax.tree.map(jnp.copy, nnx.state(copy)))
    return copy


@pytest.mark.parametrize(
    "topology",
    [TOPOLOGY, pytest.param(dataclasses.replace(TOPOLOGY, num_nodes=1), marks=pytest.mark.slow)],
    ids=["the same ranks", "others"],
)
def test_restore_training_continues_the_run(topology, tmp_path):
    """A restored run continues bit for bit on the same ranks, and within tolerance on others. Copies are restored."""
    first, second = Run(), Run(topology=topology)
    other_copy = copy_of(second.model)
    losses = first.train(0, 2)
    second.train(0, 1)  # restoring overwrites these updates
    copies = [copy_of(first.model), other_copy]
    with ocp.CheckpointManager(tmp_path) as manager:
        saved, restored = (
            {"copies": [copy], "extra": {"epoch": epoch}} for copy, epoch in zip(copies, (3, 0), strict=True)
        )
        nnx.update(copies[0], jax.tree.map(lambda leaf: leaf + 1, nnx.state(copies[0], nnx.Param)))
        assert save_training(manager, 2, first.model, first.optimizer, first.balancer, **saved)
        manager.wait_until_finished()
        actual = restore_training(manager, second.model, second.optimizer, second.balancer, **restored)
    assert actual == (2, {"epoch": 3})
    jax.tree.map(np.testing.assert_array_equal, *map(logical_params, copies))
    with ocp.CheckpointManager(tmp_path) as manager:
        set_homes(copies[0], np.roll(get_homes(first.model), 1, 1))
        with pytest.raises(ValueError, match=r"copies\[0\] has its experts at other homes"):
            save_training(manager, 3, first.model, first.optimizer, first.balancer, **saved)
    assert losses == trained()[1][:2]
    same = topology == TOPOLOGY
    np.testing.assert_allclose(second.train(2, 4), trained()[1][2:4], rtol=0 if same else 2e-6)
    if same:
        run = Run()
        run.train(0, 4)
        for actual_leaf, desired in zip(second.logical(), run.logical(), strict=True):
            np.testing.assert_array_equal(actual_leaf, desired)


@pytest.mark.slow
def test_restore_training_carries_the_history_of_relibra_to_another_number_of_nodes(tmp_path):
    first, second = Run(REORDERING), Run(REORDERING, topology=dataclasses.replace(TOPOLOGY, num_nodes=1))
    first.train(0, 1)
    with ocp.CheckpointManager(tmp_path) as manager:
        save_training(manager, 1, first.model, first.optimizer, first.balancer)
        manager.wait_until_finished()
        restore_training(manager, second.model, second.optimizer, second.balancer)
    saved, restored = (run.balancer.state.planner.history for run in (first, second))
    np.testing.assert_allclose(restored.load, np.sum(saved.load, 1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(restored.over_nodes(4).load.sum((1, 2)), 1, rtol=1e-6)
    assert int(restored.batches) == 1
    np.testing.assert_allclose(second.train(1, 2), trained()[1][1:2], rtol=2e-6)


def test_save_training_rejects_a_path(tmp_path):
    run = Run()
    # In tests the check of type annotations raises first, with its own message.
    with pytest.raises((ValueError, TypeError), match="CheckpointManager"):
        save_training(str(tmp_path), 1, run.model, run.optimizer, run.balancer)


def test_balancer_state_of_another_planner_is_rejected():
    state = Run(static()).balancer.state
    with pytest.raises(ValueError, match="balancer state, planner: expected"):
        Run().balancer.state = state


@pytest.mark.slow
def test_flax_loop_is_balanced_and_learns(capsys):
    losses = flax_loop.main(batches=2)
    imbalances = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0]
    assert max(imbalances) < 1.05


@pytest.mark.slow
def test_flax_loop_trains_where_samples_do_not_fill_all_ranks(monkeypatch):
    monkeypatch.setattr(flax_loop, "SAMPLES", 30)
    losses = flax_loop.main(batches=2)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_flax_loop_equals_static_placement(capsys):
    losses = flax_loop.main(batches=2)
    capsys.readouterr()
    np.testing.assert_allclose(flax_loop.main(batches=2, planner=static()), losses, rtol=1e-5)
    imbalances = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert min(imbalances) > 1.2


def test_prepare_rejects_parameters_that_are_not_finite(tmp_path):
    """The sequences of another batch of equal size make the step NaN, and the host raises before the next batch."""
    run = Run()
    other, replay = batches()[1]
    batch = run.prepare(0)
    assert np.isnan(train_step(run.model, run.optimizer, batch, batch.to_ranks((other, replay))))
    message = r"parameter layers\.0\.\w+ is not finite: an earlier step ran with sequences of another batch"
    with pytest.raises(ValueError, match=message):
        run.prepare(1)
    with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=message):
        save_training(manager, 1, run.model, run.optimizer, run.balancer)


def test_accumulate_gradients_rejects_other_micro_batches():
    run = Run()
    batch = run.prepare()
    x, replay = batch.to_ranks(batches()[0])
    half = jax.tree.map(lambda leaf: leaf[:, :4], (x, replay))
    with pytest.raises(
        ValueError, match=r"x: shape \(4, 6, 8\), .* prepared with 8 sequences per micro-batch"
    ):
        train_step(run.model, run.optimizer, batch, half)
    with pytest.raises(ValueError, match=r"samples\[0\]: shape \(10, .* 2 micro-batches: .*to_ranks"):
        train_step(run.model, run.optimizer, batch, batches()[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches=0 and num_layers=2 must be at least 1"),
        ({"num_layers": 0}, "num_micro_batches=2 and num_layers=0 must be at least 1"),
    ],
)
def test_balancer_rejects_numbers_below_one(options, message):
    with pytest.raises(ValueError, match=message):
        Run(options=IN_ORDER | options)


def test_prepare_rejects_other_types_of_replay_and_model():
    run = Run()
    # In tests the check of type annotations raises first, with its own message.
    with pytest.raises((ValueError, TypeError), match="RoutingReplay"):
        run.balancer.prepare(run.model, run.optimizer, batches()[0][1].expert_ids)
    with pytest.raises(ValueError, match="the model, a Linear, contains no MoELayer"):
        run.balancer.prepare(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), None, batches()[0][1])
    home = get_homes(run.model)
    home[0, 3] = home[0, 2]
    with pytest.raises(ValueError, match=r"home, layer 0, home slot 2: owned by 2 experts, not by one"):
        set_homes(run.model, home)


def test_prepared_batch_is_a_pytree_with_static_settings():
    batch = Run().prepare()
    leaves, structure = jax.tree.flatten(batch)
    again = jax.tree.unflatten(structure, leaves)
    assert again.parallel == batch.parallel
    assert isinstance(again.batch_plan, BatchPlan)
    with pytest.raises(ValueError, match="to_ranks runs on the host: call it outside jit"):
        again.to_ranks(np.zeros((SAMPLES, 1)))


@pytest.mark.slow
def test_prepare_from_counts_does_not_choose_striped_layers(monkeypatch):
    """On a single node, layers that are not striped by rule are priced striped, too, which routes alone allow."""
    monkeypatch.setattr(parallel_module, "may_stripe", lambda topology, top_k: True)
    monkeypatch.setattr(
        batch_planner_module, "cheapest_way", lambda plans, batch, parallel, ways, *_: ways[-1]
    )
    topology = dataclasses.replace(TOPOLOGY, num_nodes=1)
    run, counted = Run(topology=topology), Run(topology=topology)
    assert run.prepare().parallel.is_striped
    counts = count_batch(batches()[0][1], topology)
    batch = counted.balancer.prepare(counted.model, counted.optimizer, None, counts=counts)
    assert not batch.parallel.is_striped


def test_the_path_of_a_node_is_priced_with_its_exchange(monkeypatch):
    """Ragged exchanges send the copies of a token, and others the token, to each rank once."""
    kinds = ("ragged", *GPU_CHOICES)
    monkeypatch.setattr(parallel_module, "exchange_choices", lambda on_gpu, ragged: kinds)
    topology = dataclasses.replace(TOPOLOGY, num_nodes=1)
    parallel = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:2]), topology=topology)
    cost = CostModel(cluster=CLUSTERS["h100"], model=MODELS["qwen3-30b-a3b"])
    for exchange, path in zip(kinds, ("flat", "hierarchical", "hierarchical"), strict=True):
        way = Way(exchange, striped=False, replicas=True, across_nodes=False)
        priced, runs = cost_in_way(cost, way, parallel), run_in_way(parallel, way).kinds(8)
        assert priced.path == runs.path == path
        assert priced.exchange == runs.exchange == exchange


@pytest.mark.slow
def test_prepare_from_counts_plans_as_from_the_replay_and_fits_its_routes():
    """Steps prepare the layers of their micro-batches, and compute what they compute from the replay."""
    whole, counted, both = (Run(striped=False) for _ in range(3))
    x, replay = batches()[0]
    counts = count_batch(replay, TOPOLOGY)
    batch, planned = whole.prepare(), both.prepare(counts=counts)
    from_counts = counted.balancer.prepare(counted.model, counted.optimizer, None, counts=counts)
    for other in (planned, from_counts):
        chex.assert_trees_all_equal(jax.device_get(batch.batch_plan), jax.device_get(other.batch_plan))
    assert planned.parallel.capacities == batch.parallel.capacities
    np.testing.assert_array_equal(planned.visits, batch.visits)
    chex.assert_trees_all_equal(jax.device_get(planned.layers()), jax.device_get(batch.layers()))
    assert (from_counts.visits >= batch.visits).all()
    check_capacities(from_counts.parallel.capacities, batch.parallel.capacities)
    with pytest.raises(ValueError, match="prepared from counts alone, so it has no prepared layers"):
        from_counts.layers()

    @nnx.jit
    def forward(model, batch, x, replay):
        ids = jnp.where(replay.mask[..., None, None], replay.expert_ids.astype(jnp.int32), EMPTY)
        layers = prepare_layers(ids, batch.batch_plan.layer_plans(), batch.parallel)
        return model(x[0], jax.tree.map(lambda leaf: leaf[0], replay), layers.layer(0), batch.parallel)

    outputs = [
        forward(run.model, each, *each.to_ranks((x, replay)))
        for run, each in ((whole, batch), (counted, from_counts))
    ]
    np.testing.assert_array_equal(*outputs)
    assert np.isfinite(outputs[0]).all()


def test_prepare_refuses_counts_that_do_not_fit():
    replay = batches()[0][1]
    counts = count_batch(replay, TOPOLOGY)
    load, lengths = counts.sample_load.copy(), counts.lengths.copy()
    load[3, 1, 4] += 1
    lengths[2] -= 1
    run, fewer = Run(striped=False), RoutingReplay(replay.expert_ids, replay.mask & (np.arange(TOKENS) > 0))

    def prepare(counts, replay=None, run=run):
        run.balancer.prepare(run.model, run.optimizer, replay, counts=counts)

    for changed, message in (
        (
            {"sample_load": load},
            r"counts, sample 3, layer 1: \d tokens with \d+ token copies, but .* 2 copies a token",
        ),
        (
            {"lengths": lengths},
            r"counts, sample 2, layer 0: \d tokens with \d+ token copies, but .* 2 copies a token",
        ),
        (
            {"sample_load": load[:, :1]},
            r"counts.sample_load: expected shape \(10, 2, 8\), found \(10, 1, 8\)",
        ),
        (
            {"sample_load": load - 9},
            r"counts.sample_load\[0, 0, 0\] is -\d, but a count must not be negative",
        ),
        (
            {"routes": counts.routes._replace(expert_ids=counts.routes.expert_ids[..., :1])},
            "counts.routes has 1 experts a token, but its counts 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(counts._replace(**changed))
    with pytest.raises(
        ValueError, match=r"sample \d: counts of \d tokens, but the replay has \d real tokens"
    ):
        prepare(counts, fewer)
    with pytest.raises(ValueError, match="which of 2 ranks of a node dispatches a token of striped layers"):
        prepare(counts, run=Run(striped=True))
    with pytest.raises(ValueError, match="mask and capacities are for live routing"):
        run.balancer.prepare(run.model, run.optimizer, None, counts=counts, mask=np.ones((SAMPLES, 5), bool))
    prepare(counts)
