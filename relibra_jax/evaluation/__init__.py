"""Comparison of planners on traces: balance, traffic, memory, and measured and modelled time.

`compare` runs planners on the same batches and returns an `Outcome` for each. ``relibra compare``, ``plan`` and
``advise``, the report on the claims of papers and other experiments draw from it.

==================  ===================================================================================
`settings`          the settings as plain values: ranks, batching, costs
`batches`           the batches of a trace
`setting`           what every planner of a comparison is given
`planned`           runs of a planner over successive batches
`prices`            crossings and modelled times of a batch
`columns`           what a column of a comparison is
`outcome`           the outcome of a planner: its plans, and all columns
`comparison`        the comparison
`variants`          each part of ReLibra alone, and alternatives
`strategies`        the strategies among which ``relibra advise`` chooses
`advice`            which strategy pays
`thresholds`        from which size and skew it pays
`group_sizes`       what groups of fewer nodes gain
`predictors`        what systems without replay can know of the loads
`predictor_prices`  what a prediction gains, and what it costs
`layer_timeline`    what every rank does in one layer
==================  ===================================================================================
"""

from relibra_jax.evaluation.batches import Batches
from relibra_jax.evaluation.comparison import compare, run_planner
from relibra_jax.evaluation.outcome import COLUMNS, Outcome, table_columns
from relibra_jax.evaluation.planned import PlannedBatch
from relibra_jax.evaluation.setting import Setting, make_setting
from relibra_jax.evaluation.settings import Batching, Costs, Ranks
from relibra_jax.evaluation.variants import ablation
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

__all__ = [
    "COLUMNS",
    "Batches",
    "Batching",
    "Costs",
    "Outcome",
    "PlannedBatch",
    "Ranks",
    "Setting",
    "Trace",
    "ablation",
    "compare",
    "make_setting",
    "read_trace",
    "run_planner",
    "table_columns",
]
