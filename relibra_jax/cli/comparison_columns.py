"""The columns of a comparison: their meanings, and the text of each cell, for the terminal and for the HTML page."""

from typing import Final

from relibra_jax.cli.outcomes import Outcome

COLUMNS: Final = {
    "imbalance": "max / mean of rank load over the batch; 1 is perfect",
    "attn": "imbalance of tokens over ranks, which attention feels",
    "error": "mean error of an expert's expected load, relative to the mean load, as in MoE-GPS (arXiv 2506.07366);"
    " 0 for planners that see the true loads",
    "crossings": "what the slow network carries per token at dispatch (tokens, or token copies with flat dispatch), for"
    " the mean and the busiest rank",
    "repl": "replicas of a layer in one micro-batch, on average",
    "resid": "residents of a layer, on average",
    "GB": "modelled memory of a rank",
    "plan": "measured time to plan one batch, after compilation",
    "exchange": "part of time: dispatch and combine",
    "push": "part of time: residents' weights and gradients",
    "reorder": "part of time: experts moved to new homes",
    "time": "modelled time of a batch",
    "share": "modelled time of a perfectly balanced batch with uniform routing, divided by this row's time; above 100%"
    " if fewer tokens cross. Planning is taken to be hidden",
    "overlap": "share if every exchange overlapped the compute of its layer, in both runs; nothing runs so",
    "left": "how far time is above a lower bound for any plan, which is the most that a better plan could gain. The"
    " bound is a relaxation: it pads nothing, and it is loose for crossings",
}
"""What each column means, in the order of the table."""
OF_RESIDENTS: Final = ("resid", "push")
"""The columns that are left out where there are no resident slots."""


def explain_columns(names: list[str]) -> str:
    """Return the meanings of some columns, one to a line."""
    return "\n".join(f"{name}: {COLUMNS[name]}" for name in names)


def outcome_cells(outcome: Outcome, *, residents: bool) -> dict[str, str]:
    """Return the cells of one row, by column.

    Args:
        outcome: the outcome of the row's planner.
        residents: whether there are resident slots, for which two more columns are shown.
    """
    parts = outcome.modelled_parts
    cells = {
        "imbalance": f"{outcome.imbalance:.4f}",
        "attn": f"{outcome.attention_imbalance:.2f}",
        "error": f"{outcome.forecast_error:.0%}",
        "crossings": f"{outcome.crossings:.2f}/{outcome.crossings_busiest:.2f}",
        "repl": f"{outcome.replicas:.1f}",
        "resid": f"{outcome.residents:.1f}",
        "GB": f"{outcome.rank_memory / 1e9:.1f}",
        "plan": f"{outcome.plan_seconds * 1e3:.0f}ms",
        "exchange": f"{parts['exchange']:.2f}s",
        "push": f"{parts['push']:.2f}s",
        "reorder": f"{parts['reorder']:.2f}s",
        "time": f"{outcome.modelled_seconds:.2f}s",
        "share": f"{outcome.share_of_balanced:.1%}",
        "overlap": f"{outcome.share_overlapped:.1%}",
        "left": f"{outcome.left:.0%}",
    }
    return {name: cell for name, cell in cells.items() if residents or name not in OF_RESIDENTS}


def balanced_cells(outcome: Outcome, columns: list[str]) -> dict[str, str]:
    """Return the cells of the perfectly balanced run, which stands below all rows.

    Args:
        outcome: the outcome of any planner on the same batches.
        columns: the columns of the table.
    """
    seconds = outcome.modelled_seconds * outcome.share_of_balanced
    cells = {
        "imbalance": "1.0000",
        "attn": "1.00",
        "time": f"{seconds:.2f}s",
        "share": "100%",
        "overlap": "100%",
    }
    return {name: cells.get(name, "") for name in columns}
