"""The examples for other people's loops run, and show what they say."""

import numpy as np

from experiments.examples import flax_loop, torch_arrays
from relibra_jax.types import EMPTY


def test_a_plain_flax_loop_learns_under_plans(capsys):
    losses = flax_loop.main(steps=3)
    assert losses[-1] < losses[0]
    imbalances = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert max(imbalances) < 1.1


def test_numpy_arrays_go_in_and_come_out(capsys):
    assignment, plan = torch_arrays.main()
    assert all(type(leaf) is np.ndarray for leaf in (*assignment, *plan))
    held = assignment.sample[assignment.sample != EMPTY]
    assert sorted(held.tolist()) == list(range(torch_arrays.SAMPLES))
    assert float(capsys.readouterr().out.split()[-1]) < 1.1
