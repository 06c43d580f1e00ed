"""Baseline planners: other published systems, each written from its source to the `Planner` contract.

Each module says what it leaves out or changes, and why.
"""
