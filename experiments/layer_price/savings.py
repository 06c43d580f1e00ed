"""What a layer would save without an operation, in milliseconds of both passes.

    gates with rows      gates travel in the rows' exchange: no collective and no gathers of their own. Their bytes stay
    row per rank         inside a node a token goes to each rank once, not once for each copy. Fewer rows are packed and
                         cross links. Ragged exchanges then need a gather before the experts and a sum after them, which
                         lanes have anyway
    no zeros             send buffers and delivered rows without spare room, and without an empty lane for its own rank
    gathers in products  the experts' kernels read rows from where they arrive, and write them to where they leave
    hops in one gather   rows are packed for the links inside a node from where they arrive in it, and summed into the
                         lanes in which they cross back, without a buffer of arrived tokens
    no choices           the device does not wait for the host

A negative number is a loss.
"""

from collections.abc import Callable, Iterable

from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hop_rows import even_hops, visit_share
from relibra_jax.cost.layer_operations import Operation, layer_operations


def price_savings(run: CostModel, topology: Topology, tokens: int) -> dict[str, float]:
    """Price operations that a layer could do without.

    Args:
        run: the cost model, without ``auto``.
        topology: the expert-parallel group.
        tokens: the number of tokens of a rank.

    Returns:
        The milliseconds that each change saves in both passes; negative if it costs more.
    """
    cluster, rates = run.cluster, run.cluster.rates
    operations = [each for each in layer_operations(run, topology, tokens) if each.during != "batch"]

    def those(matches: Callable[[Operation], bool]) -> Iterable[Operation]:
        return (each for each in operations if matches(each))

    gates = sum(
        each.launches * cluster.launch_seconds + each.collectives * cluster.collective_seconds
        for each in those(lambda each: "gates" in each.name)
    )
    last = even_hops(run, topology, tokens)[-1].name
    copies = float(tokens * run.model.top_k)
    # Ranks of a node serve the tokens of as many ranks as there are nodes.
    ratio = topology.num_ranks * visit_share(topology, run.model.top_k, of_ranks=True) / run.model.top_k
    links = sum(
        each.inside / rates.fast
        for each in those(lambda each: each.name.startswith("exchange") and each.name.endswith(last))
    )
    packs = sum(
        (each.written + (0.0 if "back" in each.name else each.read)) / rates.memory
        for each in those(lambda each: each.name.startswith("pack") and each.name.endswith(last))
    )
    per_rank = (1 - ratio) * (links + packs)
    if run.exchange == "ragged":
        sums = next(each for each in reversed(operations) if each.name.startswith("sum"))
        row = sums.written / even_hops(run, topology, tokens)[0].elements
        per_rank -= 2 * 2 * (1 + ratio) * copies * row / rates.memory
    zeros = sum(
        (each.written - each.read) / rates.memory
        for each in those(lambda each: each.part == "rows" and each.name.startswith(("pack", "pick")))
    )
    fused = sum(
        each.seconds(cluster)
        for each in those(lambda each: each.name in (_named("pick", last), _named("pack back", last)))
    )
    joined = sum(
        each.seconds(cluster)
        for each in those(lambda each: each.name in ("pick between nodes", "pack back between nodes"))
    )
    choices = sum(each.seconds(cluster) for each in those(lambda each: each.choices > 0))
    seconds = {
        "gates with rows": gates,
        "row per rank": per_rank,
        "no zeros": zeros,
        "gathers in products": fused,
        "hops in one gather": joined,
        "no choices": choices,
    }
    return {name: 1e3 * value for name, value in seconds.items()}


def _named(name: str, hop: str) -> str:
    return f"{name} {hop}".strip()
