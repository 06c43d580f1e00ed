"""``relibra claims``: what papers claim beside what our plans reach, in one report.

===============  =====================================================================================
`settings`       what is run: cells (a trace, a model, ranks), their rows, sweeps; a quick and a full form
`rows`           the contenders of a cell by name
`cells`          a cell run: numbers by row
`published`      the claims with their published figures and how ours are read from a cell
`own_loads`      rivals on the kind of load that they publish
`measured`       kept measurements
`results`        everything that was run and read
`behind`         where ours is behind
`report`         the report as Markdown
`figures`        its figures
`command`        the command
===============  =====================================================================================
"""
