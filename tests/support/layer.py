"""One layer from end to end: prepared, fetched and computed in one go."""

from relibra_jax.execution import fetch_replicas, moe_layer, prepare_layer, push_residents
from relibra_jax.types import Plan


def run_layer(x, ids, gates, experts, plan, parallel):
    """The output of one layer of one micro-batch.

    Residents are pushed for this layer alone, inside whatever is differentiated: their gradients are the experts'.

    Args:
        x: tokens ``[B, *tokens, D]``.
        ids, gates: their experts and gates ``[B, *tokens, K]``.
        experts: the home experts ``[N, G, H, 3, D, F]``.
        plan: the layer plan ``[*copies, ...]``.
        parallel: how plans are run.
    """
    layer = prepare_layer(ids, plan, parallel)
    if parallel.topology.resident_slots:
        first = (0,) * len(parallel.copies)
        slots, home = plan.slot_expert[first], plan.home[first]
        of_batch = Plan(slots[None, None], home[None], slots[None, None])
        layer = layer._replace(residents=push_residents([experts], of_batch, parallel)[0])
    layer_experts, x = fetch_replicas(experts, layer, x, parallel)
    return moe_layer(x, ids, gates, layer_experts, layer, parallel).output
