"""What pages quote of the output of commands is what these commands print, but for the times of a machine."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from relibra_jax.cli.main import main

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.long

MEASURED = re.compile(r"\b\d+ms\b")
"""Times that differ from run to run."""


def blocks(page, language):
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def lines(text):
    """Return the lines of a text with one space where there are several, and without measured times."""
    return [" ".join(MEASURED.sub("ms", line).split()) for line in text.splitlines() if line.strip("─ ")]


def printed(command):
    """Return what a command of a page prints, in a process of its own."""
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "python", command
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode in (0, 2), ran.stderr
    return ran.stdout + ran.stderr


def missing(quoted, output):
    """Return the quoted lines that an output does not have."""
    there = set(lines(output))
    assert lines(quoted), "nothing is quoted"
    return [line for line in lines(quoted) if line != "..." and line not in there]


def test_planner_guide_quotes_relibra_compare(tmp_path, monkeypatch):
    page = "docs/guides/write-a-planner.md"
    (tmp_path / "my_module.py").write_text(blocks(page, "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    command, table = next(block for block in blocks(page, "text") if block.startswith("$")).split("\n", 1)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert not main(shlex.split(command.removeprefix("$ relibra ")))
    assert not missing(table, output.getvalue())


def test_flax_guide_quotes_the_loop():
    page = "docs/guides/flax-loop.md"
    output = printed("python -m experiments.examples.flax_loop")
    assert not missing(blocks(page, "text")[0], output)
    record = (ROOT / "experiments/results/examples/flax_loop.txt").read_text().split("\n\n")[0]
    assert not missing("\n".join(record.splitlines()[2:]), output)


def test_configs_guide_quotes_the_dry_runs():
    page = "docs/guides/configs.md"
    command = next(block for block in blocks(page, "bash") if "--dry" in block)
    table = next(block for block in blocks(page, "text") if "modelled time of a step" in block)
    assert not missing(table, printed(command))
    row = r"^\| `(--nodes 1 .*?)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)"
    rows = re.findall(row, (ROOT / page).read_text(), re.MULTILINE)
    assert len(rows) == 3
    for options, *numbers in rows:
        output = printed(f"{command.strip()} {options}")
        seconds = re.findall(r"^ *together +([\d.]+) +[\d.]+ +[\d.]+ *$", output, re.MULTILINE)
        between = re.findall(r"^ {4}.*between copies +([\d.]+)", output, re.MULTILINE)
        assert [*seconds, *between] == numbers[:2], options
        assert f" {numbers[2]} " in output, options
