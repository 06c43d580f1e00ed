"""``make quick``: run the tests that are nearest to what has changed, for at most a minute.

Changed is what git would commit now, or the last commit if that is nothing. A test is near if few imports lie between
its module and a changed one. Tests that the minute leaves no time for are skipped, and counted as such.
"""

import collections
import os
import subprocess
import sys
import time

import pytest
from support.imports import ROOT, imports_of, module_name, with_packages

FOLDERS = ("relibra_jax", "pallas_kernels", "experiments", "tests")
SECONDS = 60.0
MOST_FILES = 40
"""Collecting more would take a good part of the minute."""
STARTED = "RELIBRA_QUICK_STARTED"
"""The environment variable with the time at which the tests were started."""


def changed_files():
    """Return the Python files that have changed."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()

    files = git("diff", "--name-only", "HEAD") + git("ls-files", "--others", "--exclude-standard")
    files = files or git("diff", "--name-only", "HEAD~1")
    return [ROOT / name for name in files if name.endswith(".py") and (ROOT / name).exists()]


def distances(changed):
    """Return all files that import changed ones, with the number of imports between them, nearest first."""
    files = {module_name(path): path for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    importers = collections.defaultdict(set)
    for module, path in files.items():
        for name in with_packages(imports_of(path)):
            importers[name].add(module)
    found = dict.fromkeys(map(module_name, changed), 0)
    queue = collections.deque(found)
    while queue:
        module = queue.popleft()
        for importer in importers[module] - set(found):
            found[importer] = found[module] + 1
            queue.append(importer)
    return {files[module]: distance for module, distance in found.items() if module in files}


def pytest_runtest_setup(item):
    """Skip tests for which the time has run out. This module is a plugin of pytest."""
    if time.time() - float(os.environ[STARTED]) > SECONDS:
        pytest.skip("the minute is over")


def main():
    near = distances(changed_files())
    tests = [path for path in near if path.name.startswith("test_")]
    examples = [path for path, distance in near.items() if distance == 0 and "tests" not in path.parts]
    if not tests + examples:
        print("nothing that has changed is tested by Python tests")
        return 0
    chosen = [*examples, *sorted(tests, key=near.__getitem__)][:MOST_FILES]
    print(
        f"{len(chosen)} files import what has changed; nearest first: {chosen[0].relative_to(ROOT)}",
        flush=True,
    )
    paths = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, STARTED: str(time.time()), "PYTHONPATH": paths}
    fast = ["-m", "not slow and not long"]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "quick", *fast]
    return subprocess.run([*command, *map(str, chosen)], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
