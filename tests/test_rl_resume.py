"""A run that cannot be resumed ends with one line and leaves its folder unchanged."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from support.damage import cut_in_half, files_under, flip_middle_bit

from experiments.rl.configs import Train
from experiments.rl.trainer import Trainer
from experiments.run import main

pytestmark = pytest.mark.usefixtures("smallest_policy")
# The run has two steps.
SHORT = {"task": "copy", "policy": "smallest", "warmup_steps": 2, "steps": 0, "evaluation_batches": 0}


def leave(folder, config):
    """Write the files of a run with checkpoints of steps 1 and 2 into ``folder``, without training."""
    trainer = Trainer(config, 0)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    with ocp.CheckpointManager(folder / "seed-0" / "checkpoints") as manager:
        for trainer.state.step in (1, 2):
            trainer.state.save(manager)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    folder = tmp_path_factory.mktemp("left")
    leave(folder, Train(**SHORT))
    return folder


@pytest.fixture
def folder(left, tmp_path):
    """Return a copy of the run, to be damaged."""
    return shutil.copytree(left, tmp_path / "copy")


def damage_experts(harm, checkpoints):
    """Damage the largest file of step 2, which has most of the arrays."""
    files = files_under(checkpoints / "2")
    harm(checkpoints / "2" / max(files, key=lambda path: len(files[path])))


@pytest.mark.parametrize("harm", [flip_middle_bit, cut_in_half])
def test_resume_rejects_a_damaged_checkpoint(harm, folder, capfd):
    checkpoints = folder / "seed-0" / "checkpoints"
    damage_experts(harm, checkpoints)
    before = files_under(folder)
    assert main(["demo", "--resume", str(folder)]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: step 2 in {checkpoints}: array '")
    assert line.endswith(f"; to try step 1, the newest before it, move {checkpoints / '2'} away")
    assert files_under(folder) == before


@pytest.mark.slow
def test_resume_with_no_verify_skips_the_digests(folder, capfd):
    layout = folder / "seed-0" / "checkpoints" / "2" / "layout" / "metadata"
    layout.write_text(layout.read_text().replace('"sha256": "', '"sha256": "0'))
    assert main(["demo", "--resume", str(folder)]) == 2
    assert "the layout cannot be read: it has changed since it was saved" in capfd.readouterr().err
    assert main(["demo", "--resume", str(folder), "--no-verify"]) == 0
    # The next start verifies again, because the setting is not saved.
    assert "verify" not in json.loads((folder / "config.json").read_text())


@pytest.mark.slow
def test_resume_prints_one_line_about_a_damaged_checkpoint(tmp_path):
    """The run has a process of its own, so that messages of threads and the garbage collector would be seen, too."""
    leave(tmp_path, Train())
    damage_experts(cut_in_half, tmp_path / "seed-0" / "checkpoints")
    command = [sys.executable, "-m", "experiments.run", "demo", "--resume", tmp_path]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    [line] = shown.stderr.splitlines()
    assert line.startswith(f"error: step 2 in {tmp_path}/seed-0/checkpoints: array '")
    assert (shown.returncode, shown.stdout) == (2, "")
