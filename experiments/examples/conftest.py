"""Examples for other trainers need packages that are not dependencies of ours."""

import importlib.util

collect_ignore = [
    f"{package}_reorder.py" for package in ("torch", "maxtext") if importlib.util.find_spec(package) is None
]
