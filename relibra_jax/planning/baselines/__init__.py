"""Baseline planners: published systems other than ReLibra, each implemented from its source as a `Planner`.

Each module says what it leaves out or changes, and why. `relibra_jax.planning.planners.PLANNERS` lists all of them.
"""
