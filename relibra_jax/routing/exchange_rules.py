"""The rules by which ``auto`` chooses the path of tokens and the kinds of exchange.

Layers run by these rules (`relibra_jax.execution.parallel`), and cost models price by them (`relibra_jax.cost`).
"""

from typing import Final, NamedTuple

from relibra_jax.contract.types import Topology

AUTO: Final = "auto"
"""The value that lets the library choose what suits the mesh and the model."""
PATHS: Final = ("flat", "hierarchical")
"""The ways of a token to its experts: each of its copies by itself, or once to every node. On a single node, a token
goes once to every rank under hierarchical dispatch."""
IN_LANES: Final = ("padded", "fitted")
"""The kinds of token exchange whose buffers have a lane of equal length for every rank."""
REPLICA_FETCH: Final = "padded"
"""The fetch of replicas that ``auto`` chooses."""
STRIPED_EXPERTS: Final = 4
"""The least number of experts of a token with which layers may be striped by rule. To deal a token costs as much inside
a node as one of its copies."""


class Way(NamedTuple):
    """A way of running layers that can be chosen for a model. Every batch of a run has the same."""

    exchange: str
    """The kind of token exchange."""
    striped: bool
    """Whether layers are striped (`relibra_jax.routing.striping`)."""
    replicas: bool
    """Whether ranks exchange replicas."""
    across_nodes: bool
    """Whether replicas may be on other nodes than their experts."""


def exchange_choices(*, on_gpu: bool, ragged: bool = False) -> tuple[str, ...]:
    """Return the exchanges of tokens among which ``auto`` chooses: a `relibra_jax.nnx.Balancer` takes the one under
    which its first batch is priced lowest, everything else the first.

    With few tokens, a padded exchange on GPUs is faster than the choice of a length by the host. A fitted exchange is a
    collective inside a branch. XLA:CPU begins that collective after the copies of its branch. It may begin another
    collective meanwhile, in an order that differs between processes, which gloo then aborts.

    Args:
        on_gpu: whether the ranks are GPUs.
        ragged: whether a ragged exchange has been measured as right and faster on these GPUs
            (`relibra_jax.execution.exchange_check`).

    >>> exchange_choices(on_gpu=True), exchange_choices(on_gpu=False)
    (('fitted', 'padded'), ('padded',))
    """
    lanes = ("fitted", "padded") if on_gpu else ("padded",)
    return ("ragged", *lanes) if ragged else lanes


def between_nodes(exchange: str) -> str:
    """Return the exchange between nodes of hierarchical layers with a kind of exchange inside them.

    A ragged one works only inside a node.

    >>> [between_nodes(kind) for kind in ("padded", "fitted", "ragged", "emulated")]
    ['padded', 'fitted', 'fitted', 'fitted']
    """
    return "fitted" if exchange in ("ragged", "emulated") else exchange


def choose_striping(topology: Topology, top_k: int, path: str) -> bool:
    """Choose whether layers are striped: if nodes have several ranks, and tokens enough experts (`STRIPED_EXPERTS`).

    On a single node under hierarchical dispatch they are not. A token is sent there to few ranks, and to deal it costs
    as much as to send it to one of them, which is more than level lanes save.

    It is the rule of a `relibra_jax.nnx.Balancer`, which prices its first batch in the other way too, and of
    `relibra_jax.evaluation`. Layers and prices by themselves are not striped.

    Args:
        topology: the expert-parallel group.
        top_k: K, the number of experts of a token.
        path: the path of tokens, ``flat`` or ``hierarchical``.

    >>> nodes = [Topology(num_nodes=n, ranks_per_node=8, num_experts=32, replica_slots=0) for n in (1, 2)]
    >>> [choose_striping(each, 8, "hierarchical") for each in nodes], choose_striping(nodes[1], 1, "flat")
    ([False, True], False)
    """
    several = topology.num_nodes > 1 or path == "flat"
    return several and may_stripe(topology, top_k)


def may_stripe(topology: Topology, top_k: int) -> bool:
    """Return whether striping may pay: if nodes have several ranks, and tokens enough experts."""
    return topology.ranks_per_node > 1 and top_k >= STRIPED_EXPERTS


def ragged_on_a_node(exchange: str) -> str:
    """Return the message for hierarchical dispatch with a ragged exchange on a single node, which no layer runs."""
    return (
        f"exchange={exchange!r} puts the copies of a token where experts read them, so on a single node it needs"
        " path='flat', or use another exchange"
    )


def choose_path(topology: Topology, top_k: int, exchange: str) -> str:
    """Choose the path of tokens: hierarchical if there are several ranks and a token has several experts, else flat.

    On a single node it is flat, too, if the exchange puts rows where experts read them, so that a token would need
    another gather where it arrives.

    Args:
        topology: the expert-parallel group.
        top_k: K, the number of experts of a token.
        exchange: the kind of token exchange.

    >>> node = Topology(num_nodes=1, ranks_per_node=8, num_experts=32, replica_slots=0)
    >>> [choose_path(node, *each) for each in ((8, "fitted"), (8, "ragged"), (1, "fitted"))]
    ['hierarchical', 'flat', 'flat']
    """
    if top_k == 1 or topology.num_ranks == 1:
        return "flat"
    return "hierarchical" if topology.num_nodes > 1 or exchange in (*IN_LANES, "needed") else "flat"
