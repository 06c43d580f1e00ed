"""Compute the bytes that a device should send in a run of a program, from the sizes of its buffers alone.

    tokens     rows of D bfloat16, of every piece. They are sent out three times: in the forward pass, in its
               recomputation, and as the gradient of combine. They come back twice: in combine and as the gradient of
               dispatch. The recomputation omits combine
    gates      float32, one for each row inside the node and K for a row that crosses nodes. They are sent out twice,
               and their gradient comes back once
    replicas   bfloat16. They are fetched, fetched again in the backward pass, and their gradients return. In the padded
               fetch a rank sends its exports and its R slots in pieces, however often an expert is copied. A fetch by a
               kernel sends nothing; only the gradients return, padded
    stripes    every token and its gates, dealt inside the node as often as tokens are sent
    push       bfloat16, once per update for all layers: exports to pieces, pieces to nodes, pieces to slots
    return     the same in the other direction, in float32
    dense      gradients of attention (bfloat16) and router (float32), summed over all ranks in every layer

In padded exchanges among P devices, 1/P of the data stays on the device. Fitted exchanges send as much at most; where
exchanges inside nodes are ragged, those between nodes are fitted. For ragged exchanges the whole buffers are counted,
which is an upper bound.
"""

from experiments.aot.bytes import Axes, Content, Sent
from experiments.aot.stack import Model
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.routing.sizes import ExchangeSizes


def expected_sent(
    model: Model, parallel: ExpertParallel, *, layers: int, micro_batches: int = 1, updates: int = 1
) -> Sent:
    """Compute the bytes that a device should send, by content and network.

    Args:
        model: the sizes of the model.
        parallel: the mesh, topology, counted buffer sizes and kinds of exchange.
        layers: the number of layers of the stack.
        micro_batches: the number of micro-batches of an update.
        updates: the number of updates of a run.
    """
    topology, sizes = parallel.topology, parallel.capacities
    assert sizes is not None
    nodes, local = parallel.ranks
    total: dict[tuple[Content, Axes], float] = {}
    runs = updates * micro_batches * layers
    hops: list[tuple[Axes, int, ExchangeSizes, int]] = [("all", nodes * local, sizes.flat, 1)]
    if parallel.is_hierarchical(model.top_k):
        assert sizes.node is not None
        hops = [("node", nodes, sizes.node, model.top_k), ("local", local, sizes.local, 1)]
        if nodes == 1:
            hops = [("local", local, sizes.node, model.top_k)]
    pieces = parallel.pieces * runs
    for axes, ranks, rows, gates in hops:
        ragged = parallel.exchange == "ragged" and axes == "local"
        out, back = (rows.send, rows.receive) if ragged else ((ranks - 1) * rows.pair,) * 2
        total["tokens", axes] = pieces * (3 * out + 2 * back) * model.width * 2
        total["gates", axes] = pieces * (2 * out + back) * gates * 4
    if parallel.is_striped:
        dealt = model.tokens * (local - 1) / local
        values: dict[Content, int] = {"tokens": 5 * model.width * 2, "gates": 3 * model.top_k * 4}
        for content, size in values.items():
            total[content, "local"] = total.get((content, "local"), 0) + runs * dealt * size
    matrices = 3 * model.width * model.expert_width
    if slots := topology.replica_slots:
        experts: float = 3 * (sizes.exports + slots) * (local - 1) / local
        if parallel.fetch == "ragged":
            experts = 2 * sizes.export_copies + slots
        elif parallel.fetch == "remote":
            experts /= 3
        total["replicas", "local"] = runs * experts * matrices * 2
    if topology.resident_slots:
        assert sizes.push is not None
        inside = (sizes.push.exports + layers * topology.resident_slots) * (local - 1) / local
        between = (nodes - 1) * sizes.push.pair / local
        widths: dict[Content, int] = {"push": 2, "return": 4}
        for content, width in widths.items():
            total[content, "local"] = updates * inside * matrices * width
            total[content, "node"] = updates * between * matrices * width
    dense = 4 * model.width**2 * 2 + model.width * topology.num_experts * 4
    total["dense", "all"] = runs * 2 * dense * (topology.num_ranks - 1) / topology.num_ranks
    return {key: round(size) for key, size in total.items()}
