"""Run by test_two_processes.py, twice at the same time: one process a node, four devices each.

The checks are those of test_moe.py, test_training.py and test_balancer.py, on a mesh whose node axis is the process.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import test_balancer
import test_moe
import test_training

from relibra_jax import RoutingReplay, static
from relibra_jax.execution import check_same_plan, expert_mesh
from relibra_jax.execution.parallel import PATHS
from relibra_jax.nnx import get_homes

NUMBER, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def node_axis_is_the_process():
    mesh = expert_mesh(test_moe.topology_of("2x4", 2))
    owner = [[device.process_index for device in row] for row in mesh.devices]
    assert owner == [[0] * 4, [1] * 4], owner


def plans_do_not_change_the_mathematics():
    for name in ("static", "eplb", "relibra"):
        for path in PATHS:
            test_moe.test_plans_do_not_change_the_mathematics(path, name)


def both_hold_the_same_plan_or_stop():
    plan = test_moe.plans("2x4", 2, "relibra")
    check_same_plan(plan)
    other = plan._replace(quota=plan.quota + NUMBER)
    with pytest.raises(ValueError, match=r"plan: processes \[1\] of 2 hold another one than process 0"):
        check_same_plan(other)


def training_goes_on_where_it_stopped():
    with jax.enable_x64(True):
        first, second = test_training.Run(2, 4), test_training.Run(2, 4)
        first.train(0, 3)
        first.save(FOLDER, 3)
        assert second.restore(FOLDER) == 3
        assert (second.home != np.arange(test_training.EXPERTS)).any()
        second.train(3, 6)
        wanted = test_training.train_dense()[5]
        assert test_training.largest_difference(second.logical(), wanted) < test_training.TOLERANCE


def batches_are_prepared_and_trained_on():
    topology = dataclasses.replace(test_balancer.TOPOLOGY, ranks_per_node=4)
    run, still = (
        test_balancer.Run(topology=topology),
        test_balancer.Run(static(), topology=topology, mesh=None),
    )
    losses = run.train(0, 3)
    np.testing.assert_allclose(still.train(0, 3), losses, rtol=2e-6)
    assert losses[-1] < losses[0]
    before = run.balancer.state.home
    ids, mask = test_balancer.batches()[3 + NUMBER][1]  # another one on each process
    with pytest.raises(ValueError, match=r"plan: processes \[1\] of 2 hold another one than process 0"):
        run.balancer.prepare(run.model, run.optimizer, RoutingReplay(ids, mask))
    np.testing.assert_array_equal(get_homes(run.model), before)
    run.train(3, 4)


jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, NUMBER)
for check in (
    node_axis_is_the_process,
    both_hold_the_same_plan_or_stop,
    plans_do_not_change_the_mathematics,
    training_goes_on_where_it_stopped,
    batches_are_prepared_and_trained_on,
):
    check()
    print(f"passed: {check.__name__}", flush=True)
