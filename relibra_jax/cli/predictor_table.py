"""The part of ``relibra advise`` about predictors: its options, the table, and the numbers of the file."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from relibra_jax.cli.terminal import wide_table
from relibra_jax.evaluation.advice import Advice
from relibra_jax.evaluation.predictor_prices import PredictorPrice
from relibra_jax.evaluation.predictors import Network
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_not_negative

COLUMNS: Final = """\
predictor: what is known of the loads; all but the first and last rows copy by EPLB's rule and run on the true loads
accuracy: share of token copies predicted right; error: of the distribution, |expected share - share| x E, averaged
compute, comm.: the modelled time without, and with nothing but, exchanges of tokens and transfers of experts
overhead: modelled time of the predictor, or of sending the routes of the replay, as if nothing hid it"""


@checks_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Networks:
    """The networks that predict the experts of every token, which are compared with replay."""

    predictor_accuracy: tuple[float, ...] = (0.5, 0.7, 0.9)
    """Accuracies to try: the share of token copies whose expert a network predicts. Its errors are simulated."""
    predictor_cost: tuple[float, ...] = (0.001, 0.01, 0.1)
    """The forward time of each network, as a share of that of a layer's products. One number is for all networks. The
    defaults are assumptions, but for the first, which is that of the smallest network in the paper."""

    def networks(self) -> list[Network]:
        """Return the networks.

        Raises:
            ValueError: if an accuracy is not from 0 to 1, a cost is negative, or there are not as many costs as
                accuracies.
        """
        accuracies, costs = self.predictor_accuracy, self.predictor_cost
        for accuracy in accuracies:
            if not 0 <= accuracy <= 1:
                raise ValueError(f"predictor_accuracy={accuracy} must be from 0 to 1")
        for cost in costs:
            check_not_negative("predictor_cost", cost)
        if len(costs) == 1:
            costs *= len(accuracies)
        if len(costs) != len(accuracies):
            raise ValueError(
                f"predictor_cost has {len(costs)} values for {len(accuracies)} values of predictor_accuracy; give one"
                " for each, or one for all"
            )
        return list(map(Network, accuracies, costs))


def best_with_replay(advice: Sequence[Advice]) -> Advice:
    """Return the fastest strategy that plans from the true loads of the batch.

    Args:
        advice: the results of the strategies that fit the memory, among them one that plans from the true loads.
    """
    return min(
        (each for each in advice if each.strategy.foresight in ("batch", "micro-batch")),
        key=lambda each: each.seconds,
    )


def with_best(prices: Sequence[PredictorPrice], best: Advice) -> list[PredictorPrice]:
    """Add the best strategy with the true loads: what replay gives beyond a prediction for EPLB's rule.

    Args:
        prices: the prices of all predictors, the last of which is replay.
        best: the results of the strategy.
    """
    replay, seconds = prices[-1], best.seconds + prices[-1].overhead
    communication = best.exchange + best.transfers
    added = replay._replace(
        name="replay, best strategy",
        imbalance=best.imbalance,
        compute=best.seconds - communication,
        communication=communication,
        seconds=seconds,
        gain=prices[0].seconds / seconds - 1,
    )
    return [*prices, added]


def replica_slots_of(advice: Sequence[Advice]) -> int:
    """Return the replica slots of the fastest strategy that uses any; 0 if none does."""
    using = [each for each in advice if each.strategy.replica_slots]
    return min(using, key=lambda each: each.seconds).strategy.replica_slots if using else 0


def predictor_table(prices: Sequence[PredictorPrice], *, replica_slots: int, width: int) -> Table:
    """Make a table with one line for each predictor.

    Args:
        prices: the prices of the predictors.
        replica_slots: the number of replica slots on each rank.
        width: the width of the table, in characters.
    """
    table = wide_table(f"predictors of loads against replay, R={replica_slots}", width=width)
    table.add_column("predictor", no_wrap=True)
    for name in ("accuracy", "error", "imbalance", "compute", "comm.", "overhead", "time", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in prices:
        table.add_row(
            each.name,
            *("-" if share is None else f"{share:.1%}" for share in (each.accuracy, each.error)),
            f"{each.imbalance:.3f}",
            *(f"{part:.2f}s" for part in (each.compute, each.communication)),
            f"{each.overhead:.3f}s",
            f"{each.seconds:.2f}s",
            f"{each.gain:+.1%}",
        )
    return table


def predictor_numbers(
    prices: Sequence[PredictorPrice], missing: Mapping[str, str], best: Advice, *, replica_slots: int
) -> dict[str, Any]:
    """Return the numbers of the file.

    Args:
        prices: the prices of the predictors.
        missing: the reasons of the predictors that are not available, by name.
        best: the results of the best strategy with replay.
        replica_slots: the number of replica slots on each rank.
    """
    return {
        "replica_slots": replica_slots,
        "best_with_replay": best.strategy.label,
        "prices": [each._asdict() for each in prices],
        "not_available": dict(missing),
    }
