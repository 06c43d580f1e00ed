"""The fourth-power mean of lanes, by which searches judge the exchanges between nodes.

An exchange lasts as long as its longest lane. The maximum would be a poor guide for a search: few changes of a plan
change it, and counts from a sample of tokens do not tell which lane it is. A mean that weighs long lanes most changes
with every lane. With the sum of the busiest node instead, plans for four nodes took 0.2 to 1.2% longer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from relibra_jax.contract.types import Array


def fourth_power(rows: Float[Array, "*lanes"]) -> Float[jax.Array, "*lanes"]:
    """Return the fourth power of the rows of each lane."""
    return jnp.square(jnp.square(rows))


def waited_rows(
    fourth_powers: Float[Array, "*exchanges"], *, senders: int, nodes: int
) -> Float[jax.Array, "*exchanges"]:
    """Return the rows for which an exchange between nodes waits: one mean lane for each other node.

    Args:
        fourth_powers: the sum of fourth powers over all lanes of the exchange.
        senders: the number of ranks or nodes with lanes of their own to every other node.
        nodes: N, the number of nodes.

    >>> lanes = jnp.array([3.0, 3.0])  # of two nodes, to each other
    >>> float(waited_rows(fourth_power(lanes).sum(), senders=2, nodes=2))
    3.0
    """
    others = max(nodes - 1, 1)
    return others * jnp.sqrt(jnp.sqrt(fourth_powers / (senders * others)))
