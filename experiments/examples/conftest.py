"""Doctest collection: skip the examples whose packages are not installed, as they are not our dependencies."""

import importlib.util

collect_ignore = [
    f"{package}_reorder.py" for package in ("torch", "maxtext") if importlib.util.find_spec(package) is None
]
