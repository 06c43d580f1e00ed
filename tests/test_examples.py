"""The examples for trainers outside JAX run and print what they promise; test_balancer.py tests the Flax loop."""

import chex
import jax
import numpy as np
import pytest

from experiments.examples import counts, torch_arrays
from relibra_jax.contract.types import EMPTY


@pytest.mark.slow
def test_torch_arrays_takes_and_returns_numpy_arrays(capsys):
    batch_plan = torch_arrays.main()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(batch_plan))
    sample = batch_plan.assignment.sample
    assert sorted(sample[sample != EMPTY].tolist()) == list(range(torch_arrays.SAMPLES))
    assert float(capsys.readouterr().out.split()[-1]) < 1.1


@pytest.mark.slow
def test_counts_of_workers_plan_as_all_routes(capsys):
    plan_from_counts, plan_from_routes = counts.main()
    chex.assert_trees_all_equal(plan_from_counts, plan_from_routes)
    routes_bytes, counts_bytes = (
        int(word.replace(",", "")) for word in capsys.readouterr().out.split() if "," in word[1:-1]
    )
    assert routes_bytes > 50 * counts_bytes
