"""The rules by which ``auto`` chooses the path of tokens and the kind of their exchange.

Layers run by these rules (`relibra_jax.execution.parallel`), and cost models price by them (`relibra_jax.cost`).
"""

from typing import Final

AUTO: Final = "auto"
"""The value that lets the library choose what suits the mesh and the model."""
PATHS: Final = ("flat", "hierarchical")
MOST_RAGGED_RANKS: Final = 8
"""The largest number of ranks for which XLA runs a ragged exchange on GPUs in one kernel.

Beyond this number, hangs and slow paths have been reported.
"""


def choose_exchange(ranks: int, *, crosses_nodes: bool, on_gpu: bool) -> str:
    """Choose the kind of an exchange: ragged between at most `MOST_RAGGED_RANKS` GPUs of one node, else padded.

    Args:
        ranks: the number of ranks that exchange rows.
        crosses_nodes: whether some of them are in different nodes.
        on_gpu: whether they are GPUs.

    >>> choose_exchange(8, crosses_nodes=False, on_gpu=True), choose_exchange(2, crosses_nodes=True, on_gpu=True)
    ('ragged', 'padded')
    """
    return "ragged" if on_gpu and not crosses_nodes and ranks <= MOST_RAGGED_RANKS else "padded"


def choose_path(num_nodes: int, top_k: int) -> str:
    """Choose the path of tokens: hierarchical if there are several nodes and a token has several experts, else flat.

    >>> choose_path(2, 8), choose_path(2, 1), choose_path(1, 8)
    ('hierarchical', 'flat', 'flat')
    """
    return "hierarchical" if num_nodes > 1 and top_k > 1 else "flat"
