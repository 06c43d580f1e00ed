"""The claims of papers compared with what relibra_jax reaches, in one report: ``python -m experiments.claims``.

===============  =====================================================================================
`settings`       the studies to run: cells (a trace, a model, ranks) with their rows; a quick and a full form
`rows`           the rows of a cell, by name
`rivals`         the systems of others at their best
`cells`          running a cell, which gives numbers by row
`published`      the claims, with their published figures and the figure of relibra_jax, read from a cell
`own_loads`      baselines on the loads of their own publications
`measured`       kept measurements
`results`        everything that was run and read
`behind`         where relibra_jax is behind
`report`         the report as Markdown
`figures`        the figures of the report
`__main__`       the command
`part_gains`     what each part of ReLibra gains over its rivals, in many settings
`conditions`     the conditions of the published gains: ``python -m experiments.claims.conditions``
===============  =====================================================================================
"""
