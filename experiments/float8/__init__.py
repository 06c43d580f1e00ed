"""Float8: the experts of overloaded ranks computed in float8, in passes from which nothing is learned.

``python -m experiments.float8 error`` measures the errors that this causes, and ``python -m experiments.float8 time``
models how much time it could save (docs/guides/low-precision.md).

================  ====================================================================================================
`hot_ranks`       the rule for which ranks are overloaded, and models whose layers follow it
`grouped_mlp`     the grouped MLP with products of float8
`rounding`        rounding to float8 in blocks
`policy_error`    the errors of log-probabilities and ratios
`recompute_time`  the modelled time of a recompute
================  ====================================================================================================
"""
