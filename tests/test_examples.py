"""The example for trainers that are not in JAX runs, and shows what it says; the Flax loop is in test_balancer.py."""

import jax
import numpy as np
import pytest

from experiments.examples import torch_arrays
from relibra_jax.types import EMPTY


@pytest.mark.slow
def test_numpy_arrays_go_in_and_come_out(capsys):
    batch_plan = torch_arrays.main()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(batch_plan))
    sample = batch_plan.assignment.sample
    assert sorted(sample[sample != EMPTY].tolist()) == list(range(torch_arrays.SAMPLES))
    assert float(capsys.readouterr().out.split()[-1]) < 1.1
