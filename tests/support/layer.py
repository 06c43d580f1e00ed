"""A helper that runs one layer from end to end: it prepares, fetches and computes."""

from relibra_jax.contract.types import Plan
from relibra_jax.execution import fetch_replicas, moe_layer, prepare_layer, push_residents


def run_layer(x, ids, gates, experts, plan, parallel, *, expert_mlp=None):
    """Return the output of one layer of one micro-batch.

    The function also pushes the residents of this layer. So if it is differentiated, the residents' gradients are part
    of the experts' gradients.

    Args:
        x: the tokens ``[B, *tokens, D]``.
        ids, gates: the experts and gates of the tokens, ``[B, *tokens, K]``.
        experts: the home experts ``[N, G, H, 3, D, F]``.
        plan: the layer plan ``[*data, ...]``.
        parallel: the mesh, topology, buffer sizes and exchanges with which the layer executes the plan.
        expert_mlp: the function with which every rank computes its rows, as for `moe_layer`.
    """
    layer = prepare_layer(ids, plan, parallel)
    if parallel.topology.resident_slots:
        first = (0,) * len(parallel.data_shape)
        slots, home = plan.slot_expert[first], plan.home[first]
        of_batch = Plan(slots[None, None], home[None], slots[None, None])
        layer = layer._replace(residents=push_residents([experts], of_batch, parallel).layer(0))
    layer_experts, x = fetch_replicas(experts, layer, x, parallel)
    return moe_layer(x, ids, gates, layer_experts, layer, parallel, expert_mlp=expert_mlp).output
