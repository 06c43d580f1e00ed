"""Tests of Tunix's GRPO with balanced layers, with Tunix from PyPI: models, recordings, errors and whole runs."""

import dataclasses
import itertools
import math
import warnings
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from relibra_jax import RoutingReplay, assign_samples, static
from relibra_jax.integrations.tunix.rows import ranks_first
from relibra_jax.integrations.tunix.settings import BatchSizes, check_sizes
from relibra_jax.nnx import expert_mesh

pytest.importorskip("tunix", reason="the extra tunix is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Tunix and its dependencies emit many warnings
    from support.tunix_runs import TOPOLOGY, balancer_of, cluster_of, history, prompts, train, tunix_model
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_learner
    from tunix.rl.rl_cluster import Mode, Role

    from relibra_jax.integrations.tunix.learner import BalancedExample, check_cluster, with_plan
    from relibra_jax.integrations.tunix.model import ROUTES, BalancedQwen3
    from relibra_jax.integrations.tunix.rollout import RecordingRollout

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, TOKENS = 16, 12


@pytest.fixture(autouse=True)
def _any_rank():
    # Tunix promotes ranks, and generates in its own thread, so the setting must apply to all threads.
    old_setting = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", old_setting)


@pytest.fixture(scope="module")
def prompt():
    tokens = np.random.default_rng(0).integers(3, 40, (SAMPLES, TOKENS))
    positions = np.broadcast_to(np.arange(TOKENS), tokens.shape)
    causal = np.broadcast_to(np.tril(np.ones((TOKENS, TOKENS), bool)), (SAMPLES, TOKENS, TOKENS))
    return tuple(map(jnp.asarray, (tokens, positions, causal)))


@nnx.jit
def forward(model, prompt, forced=None):
    tokens, positions, causal = prompt
    return model(tokens, positions, None, causal, forced_routed_experts=forced)[0]


@nnx.jit
def record(model, prompt):
    tokens, positions, causal = prompt
    cache = model.init_cache(*tokens.shape, jnp.float32)
    logits, cache = model(tokens, positions, cache, causal)
    return logits, cache[ROUTES]


@nnx.jit
def forward_under_plan(model, prompt, rows, batch, forced=None):
    model = nnx.merge(*nnx.split(model))
    model.follow(rows, batch.parallel)
    return forward(model, prompt, forced)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["NONE", "BLOCK", "DECODER"])
def test_balanced_qwen3_equals_tunix_and_records_routing(prompt, remat):
    tokens, positions, causal = prompt
    expected = nnx.jit(lambda model: model(tokens, positions, None, causal)[0])(tunix_model(remat))
    model = BalancedQwen3(tunix_model(remat), balancer_of().live)
    graph = nnx.graphdef(model)
    np.testing.assert_allclose(forward(model, prompt), expected, atol=3e-5)
    logits, routes = record(model, prompt)
    np.testing.assert_allclose(logits, expected, atol=3e-5)
    assert routes.shape == (SAMPLES, TOKENS, 2, 2)
    assert routes.min() >= 0
    assert (np.sort(routes)[..., 0] != np.sort(routes)[..., 1]).all()
    assert nnx.graphdef(model) == graph, "a call left something behind"


@pytest.mark.slow
def test_balanced_qwen3_uses_forced_experts(prompt):
    model = BalancedQwen3(tunix_model(), balancer_of().live)
    logits, routes = record(model, prompt)
    np.testing.assert_array_equal(forward(model, prompt, routes), forward(model, prompt))
    # Other experts for token 5 change its logits and those of later tokens, but not those of earlier tokens.
    other = np.array(routes)
    other[:, 5] = (other[:, 5] + 1) % 16
    changed = np.abs(np.asarray(forward(model, prompt, other) - logits)).max((0, 2))
    assert (changed[:5] < 1e-5).all()
    assert changed[5] > 1e-2
    # Without forced experts, token 5 uses live routing again. Experts may also be forced in only one layer.
    other[:, 5] = -1
    np.testing.assert_allclose(forward(model, prompt, other), logits, atol=1e-5)
    other[:, :, 0] = -1
    np.testing.assert_allclose(forward(model, prompt, other), logits, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"forced_routed_experts: expected shape \(16, 12, 2, 2\), found \(16, 12, 3, 2\)"
    ):
        forward(model, prompt, np.zeros((SAMPLES, TOKENS, 3, 2), np.int32))


@pytest.mark.slow
def test_balanced_qwen3_logits_are_the_same_under_a_plan(prompt):
    balancer = balancer_of(micro_batches=1)
    model = BalancedQwen3(tunix_model(), balancer.live)
    logits, routes = record(model, prompt)
    batch = balancer.prepare(model, None, RoutingReplay(np.asarray(routes), np.ones((SAMPLES, TOKENS), bool)))
    assert (batch.batch_plan.plan.home != np.arange(16)).any(), "nothing moved"
    rows = ranks_first(batch.micro_batch(0), balancer.parallel.mesh)
    np.testing.assert_allclose(forward(model, prompt), logits, atol=3e-5)  # live, at the new homes
    np.testing.assert_allclose(forward_under_plan(model, prompt, rows, batch), logits, atol=3e-5)
    forced = np.array(routes)
    np.testing.assert_allclose(forward_under_plan(model, prompt, rows, batch, forced), logits, atol=3e-5)
    forced[:, 3:] = -1
    np.testing.assert_allclose(forward_under_plan(model, prompt, rows, batch, forced), logits, atol=3e-5)
    forced[0, 0] = (forced[0, 0] + 1) % 16  # experts that the plan does not contain for this token
    assert np.isnan(forward_under_plan(model, prompt, rows, batch, forced)).any()


@pytest.mark.slow
def test_with_plan_follows_the_example_and_keeps_the_model(prompt):
    balancer = balancer_of(micro_batches=1)
    model = BalancedQwen3(tunix_model(), balancer.live)
    logits, routes = record(model, prompt)
    replay = RoutingReplay(np.asarray(routes), np.ones((SAMPLES, TOKENS), bool))
    batch = balancer.prepare(model, None, replay)
    example = BalancedExample(
        prompt, ranks_first(batch.micro_batch(0), balancer.parallel.mesh), batch.parallel
    )
    graph, loss = nnx.graphdef(model), nnx.jit(with_plan(lambda model, prompt, _: forward(model, prompt)))
    np.testing.assert_allclose(loss(model, example, None), logits, atol=3e-5)
    np.testing.assert_allclose(loss(model, BalancedExample(prompt), None), logits, atol=3e-5)
    assert nnx.graphdef(model) == graph
    shifted = (
        replay.expert_ids + 3
    ) % 16  # a batch with different hot experts, for which the balancer moves experts
    balancer.prepare(model, None, replay._replace(expert_ids=shifted))
    assert np.isnan(loss(model, example, None)).all(), "the old plan does not match the new homes"
    np.testing.assert_allclose(loss(model, BalancedExample(prompt), None), logits, atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "the model has num_experts=8, but the topology has 16"),
        ({"rope_theta": 10_000}, "rope_theta=10000 must be 1000000: Tunix's Qwen3 uses 1000000 regardless"),
        (
            {"shd_config": qwen3.ShardingConfig.get_default_sharding()},
            r"shd_config names the mesh axes fsdp, tp, but the mesh has node, local: use rank_shardings\(\)",
        ),
    ],
)
def test_balanced_qwen3_rejects_models_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        BalancedQwen3(tunix_model(**changes), balancer_of().live)


def test_balanced_qwen3_rejects_data_axes():
    topology = dataclasses.replace(TOPOLOGY, num_nodes=1)
    live = balancer_of(topology=topology, mesh=expert_mesh(topology, data=2)).live
    with pytest.raises(
        ValueError, match=r"mesh \{'data': 2, 'node': 1, 'local': 4\}: Tunix distributes sequences over one"
    ):
        BalancedQwen3(tunix_model(), live)


def portions(sizes):
    """Return the number of prompts of each portion that Tunix's own loop passes to the trainer for one update."""
    portion_sizes, learner = [], mock.MagicMock(_eval_iter_steps=0)

    def record_portion(micro_batches, micro_batch_sizes, mode):
        if micro_batches:
            portion_sizes.append(sum(micro_batch_sizes))
        return []

    learner._process_accumulated_batches = record_portion
    rl_learner.RLLearner._prepare_data(
        learner,
        iterator=({"prompts": np.array(["1="] * sizes.train_micro_batch_size)} for _ in itertools.count()),
        proceed_num_steps=sizes.num_micro_batches,
        sample_repeat=1,
        batch_repeat=1,
        service_target_batch_size=math.lcm(
            sizes.rollout_micro_batch_size, sizes.compute_logps_micro_batch_size
        ),
        data_queue=mock.MagicMock(),
        mode=Mode.EVAL,  # this mode does not depend on the steps of a trainer
    )
    return portion_sizes


@pytest.mark.parametrize("mini", [4, 12])
@pytest.mark.parametrize("train", [1, 2, 4])
def test_learner_rejects_sizes_with_several_plans_an_update(mini, train):
    for rollout, logps in itertools.product([1, 2, 3, 4, 6, 12, 24], repeat=2):
        sizes = BatchSizes(mini, train, rollout, logps)
        portion_sizes = portions(sizes)
        assert sum(portion_sizes) == mini
        options = {"num_ranks": 1, "num_micro_batches": mini // train, "scores_policies": True}
        if len(portion_sizes) == 1:
            check_sizes(sizes, num_generations=2, **options)
        else:
            with pytest.raises(ValueError, match=f"one update of .* would need {len(portion_sizes)} plans"):
                check_sizes(sizes, num_generations=2, **options)


@pytest.fixture(scope="module")
def cluster():
    return cluster_of(balancer_of())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "balancer", "message"),
    [
        ({"offload_to_cpu": True}, {}, "offload_to_cpu=True must be False"),
        (
            {"role_to_mesh": {role: Mesh(np.array(jax.devices()), "x") for role in Role}},
            {},
            r"role_to_mesh\[ACTOR\] must be the balancer's mesh",
        ),
        (
            {"training": {"max_seq_token_per_tpu": 64}},
            {},
            "max_seq_token_per_tpu=64 must be None: with it, Tunix packs the sequences again",
        ),
        (
            {"training": {"data_sharding_axis": ("fsdp",)}},
            {},
            r"data_sharding_axis=\('fsdp',\) must be \(\('node', 'local'\),\)",
        ),
        ({}, {"assign": assign_samples}, "assign must be None: Tunix decides which samples"),
        (
            {},
            {"topology": dataclasses.replace(TOPOLOGY, resident_slots=1)},
            "resident_slots=1 must be 0: Tunix's update does not push residents",
        ),
        (
            {},
            {"topology": dataclasses.replace(TOPOLOGY, num_nodes=1, ranks_per_node=8)},
            "the actor was made with another balancer's live",
        ),
    ],
)
def test_check_cluster_rejects_settings(cluster, changes, balancer, message):
    options = changes.get("training", {})
    default = cluster.cluster_config.training_config
    training = dataclasses.replace(default, gradient_accumulation_steps=None, **options)
    changes = {name: value for name, value in changes.items() if name != "training"}
    config = dataclasses.replace(cluster.cluster_config, training_config=training, **changes)
    other = SimpleNamespace(
        cluster_config=config, rollout=cluster.rollout, actor_trainer=cluster.actor_trainer
    )
    check_cluster(cluster, balancer_of())
    with pytest.raises(ValueError, match=message) as error:
        check_cluster(other, balancer_of(**balancer))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_check_cluster_rejects_other_rollouts_and_models(cluster):
    stock = cluster_of(balancer_of(), stock=True)
    with pytest.raises(ValueError, match="rollout_engine='vanilla' does not record the routing"):
        check_cluster(stock, balancer_of())
    other = SimpleNamespace(
        cluster_config=cluster.cluster_config, rollout=cluster.rollout, actor_trainer=stock.actor_trainer
    )
    with pytest.raises(ValueError, match="the actor is a Qwen3, not a BalancedQwen3"):
        check_cluster(other, balancer_of())
    with pytest.raises(ValueError, match="rollout_actor must be a BalancedQwen3, not a Qwen3"):
        cluster_of(balancer_of(), stock=True, rollout_engine=RecordingRollout)


@pytest.mark.slow
def test_learner_rejects_two_plans_before_an_update(cluster):
    sizes = {"rollout_micro_batch_size": 2, "compute_logps_micro_batch_size": 2}
    with pytest.raises(ValueError, match="one update of mini_batch_size=4 prompts would need 2 plans"):
        train(balancer_of(), training=sizes)
    with pytest.raises(ValueError, match="a rollout of 12 samples must be a multiple of the 8 ranks"):
        cluster.rollout.generate(["1+1="] * 12, cluster.cluster_config.rollout_config)


@pytest.mark.slow
def test_recording_rollout_keeps_a_key_as_seed(cluster):
    config = dataclasses.replace(cluster.cluster_config.rollout_config, seed=jax.random.PRNGKey(0))
    first, again = (cluster.rollout.generate(["1+1="] * 8, config).text for _ in range(2))
    assert first == again
    routes = cluster.rollout.take_routes()
    assert routes.shape == (16, 32, 2, 2)
    np.testing.assert_array_equal(routes[:8, :8], routes[8:, :8])
    with pytest.raises(RuntimeError, match="no recorded routes"):
        cluster.rollout.take_routes()


@pytest.mark.long
def test_learner_learns_what_tunix_learns():
    losses, stock = train(balancer_of(), stock=True)
    static_losses, static_cluster = train(balancer_of(static()))
    with mock.patch.object(
        BalancedQwen3, "follow", autospec=True, side_effect=BalancedQwen3.follow
    ) as follow:
        # With check_rows, the loss is NaN if a step computes different rows than planned.
        relibra_losses, relibra_cluster = train(balancer_of(check_rows=True))
    assert follow.called
    step = relibra_cluster.actor_trainer.jit_train_and_eval_step()[0]
    assert step.func.jitted_fn._cache_size() == 1, "one program for all plans"
    assert np.abs(losses[1:]).min() > 1e-3
    np.testing.assert_allclose(static_losses, losses, atol=1e-5)
    np.testing.assert_allclose(relibra_losses, static_losses, atol=1e-5)
    runs = [
        nnx.state(cluster.actor_trainer.model.embedder)
        for cluster in (stock, static_cluster, relibra_cluster)
    ]
    for other in runs[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other, runs[0])
    assert max(history(relibra_cluster, "balance", "imbalance")) < 1.1
    assert min(history(static_cluster, "balance", "imbalance")) > 1.3
    assert sum(history(relibra_cluster, "balance", "experts_moved")) > 0
    assert sum(history(static_cluster, "balance", "experts_moved")) == 0


@pytest.mark.long
def test_learner_runs_several_updates_and_rollouts():
    # There are two batches of eight prompts, two rollouts per batch and two updates per rollout, with evaluations.
    options = {"steps": 8, "data": prompts(2, 8), "algorithm": {"num_iterations": 2}}
    evaluated = {"eval_ds": prompts(1, start=50), "training": {"eval_every_n_steps": 2}}
    losses, cluster = train(balancer_of(), **options, **evaluated)
    static_losses, _ = train(balancer_of(static()), **options)
    assert losses.shape == (8,)
    np.testing.assert_allclose(losses, static_losses, atol=1e-5)
    assert cluster.actor_trainer.metrics_logger.metric_exists("actor", "loss", "eval")
