"""A check of the layer over several devices of this host, against a dense layer: outputs and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.contenders import Samples, plan_contender
from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts
from experiments.layer_gradients import layer_gradients
from pallas_kernels.compare import check_close
from pallas_kernels.implementation import why_not_hopper
from relibra_jax.contract.plan import home_layout, replica_count
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
    prepare_layer,
    rank_sharding,
)
from relibra_jax.execution.exchange_check import check_exchange
from relibra_jax.execution.mesh import RANKS
from relibra_jax.planning.sample_packing import pack_samples

TOP_K, SAMPLES_PER_RANK = 2, 4


def check_group(devices: int, exchange: str, *, rehearsal: bool = False) -> None:
    """Check one layer with replicas over the first devices of this host, under a ReLibra plan.

    Args:
        devices: the number of devices.
        exchange: the kind of exchange of tokens and replicas, ``padded`` or ``ragged``; ``fitted``, with the padded
            fetch; or ``remote``, with which a kernel pulls the replicas and the tokens use the padded exchange.
        rehearsal: whether to run on host devices at small sizes.

    Raises:
        ValueError: if there are too few devices, or if the output or a gradient differs from that of the dense layer.
    """
    if len(jax.devices()) < devices:
        raise ValueError(f"{devices} devices are needed, but there are {len(jax.devices())}")
    if exchange == "remote" and (reason := why_not_hopper(jax.devices()[0].device_kind)):
        print_facts(devices=devices, exchange=exchange, cannot_run=reason)
        return
    length, width, hidden = (64, 64, 64) if rehearsal else (512, 1024, 512)
    topology = Topology(num_nodes=1, ranks_per_node=devices, num_experts=4 * devices, replica_slots=1)
    batch = plan_contender(_draw(topology, length), "relibra", topology)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology, devices=jax.devices()[:devices]),
        topology=topology,
        capacities=batch.capacities,
        exchange="padded" if exchange == "remote" else exchange,
        fetch="padded" if exchange == "fitted" else exchange,
    )
    plan, ids = batch.batch_plan.micro_batch(0).layer(0), batch.expert_ids[0, 0]
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(*ids.shape[:-1], width)), jnp.bfloat16)
    gates = np.where(ids == EMPTY, 0, draw.uniform(0.5, 1, ids.shape)).astype(np.float32)
    matrices = draw.normal(size=(topology.num_experts, 3, width, hidden)) * width**-0.5
    weights = jnp.asarray(matrices, jnp.bfloat16)
    layout = np.asarray(home_layout(batch.batch_plan.plan.home[0], topology))

    @jax.jit
    def step(x, gates, experts, ids, prepared):
        return layer_gradients(x, gates, experts, ids=ids, layer=prepared, parallel=parallel)

    @jax.jit
    def dense_step(x, gates, weights):
        out, pull = jax.vjp(functools.partial(_dense_layer, ids), x, gates, weights)
        return out, *pull(out)

    token_sharding = jax.NamedSharding(parallel.mesh, jax.P(RANKS))
    tokens = jax.device_put((x, gates, jnp.asarray(ids)), token_sharding)
    experts = jax.device_put(weights[layout], rank_sharding(parallel.mesh))
    prepared = jax.jit(prepare_layer, static_argnums=2)(tokens[2], plan, parallel)
    run = functools.partial(step, tokens[0], tokens[1], experts, tokens[2], prepared)
    dense_operands = (array.astype(jnp.float32) for array in (x, jnp.asarray(gates), weights))
    result, expected = jax.device_get(run()), jax.device_get(dense_step(*dense_operands))
    expected = (*expected[:3], expected[3][layout])
    error = check_close(f"a layer over {devices} devices", result, expected)
    seconds = median_seconds({"layer": run}, 1 if rehearsal else 9, shortest=1e-4 if rehearsal else 0.02)
    print_facts(
        devices=devices,
        exchange=exchange,
        replicas=int(replica_count(batch.batch_plan.plan, topology).sum()),
        token_copies=int((ids != EMPTY).sum()),
        milliseconds=seconds["layer"].median * 1e3,
        **error._asdict(),
    )


def prove_exchange(devices: int) -> None:
    """Check whether a ragged exchange is right and faster over the first devices of this host, and keep the verdict."""
    topology = Topology(num_nodes=1, ranks_per_node=devices, num_experts=devices, replica_slots=0)
    verdict = check_exchange(expert_mesh(topology, devices=jax.devices()[:devices]))
    print_facts(devices=devices, **verdict._asdict())


def _draw(topology: Topology, length: int) -> Samples:
    """Return random samples whose tokens prefer a few experts."""
    draw, samples = np.random.default_rng(0), SAMPLES_PER_RANK * topology.num_ranks
    popular = draw.dirichlet(np.full(topology.num_experts, 0.3)) + 0.01
    scores = np.log(popular) + draw.gumbel(size=(samples, length, 1, topology.num_experts))
    ids = np.argsort(-scores, axis=-1)[..., :TOP_K].astype(np.int32)
    mask = np.ones((samples, length), bool)
    return Samples(ids, mask, pack_samples(mask.sum(1), topology, num_micro_batches=1))


def _dense_layer(ids, x, gates, weights):
    """Apply every expert to every token in float32, one expert at a time, and sum with the gates as weights."""
    out = jnp.zeros(x.shape, jnp.float32)
    with jax.default_matmul_precision("highest"):
        for expert, (gate, up, down) in enumerate(weights):
            share = jnp.where(ids == expert, gates, 0).sum(-1, keepdims=True)
            out += share * ((jax.nn.silu(x @ gate) * (x @ up)) @ down.T)
    return out
