"""The README is the product's face: its example runs and prints what it says, its files and commands exist."""

import doctest
import re
from pathlib import Path

from experiments.configs import Compare

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_example_prints_what_it_says():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.attempted >= 7
    assert result.failed == 0


def test_named_files_exist():
    tree = re.search(r"```text\n(relibra_jax/.*?)```", TEXT, re.DOTALL)
    assert tree
    folder = Path()
    for line in tree.group(1).splitlines():
        name = line.split()[0]
        path = folder / name if line.startswith(" ") else Path(name)
        assert (ROOT / path).exists(), path
        if not line.startswith(" ") and name.endswith("/"):
            folder = path
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_named_options_exist():
    known = {
        "nodes",
        "ranks-per-node",
        "replica-slots",
        "micro-batch-size",
        "batch-size",
        "order",
        "ablation",
        "out",
    }
    known |= {"samples-per-rank", "dispatch", "model", "planner", "tokens-per-rank"}
    used = set(re.findall(r" --([a-z-]+)", TEXT))
    assert used <= known, used - known
    assert Compare().cluster.nodes == 2
