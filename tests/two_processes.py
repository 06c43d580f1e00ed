"""The program of test_two_processes.py, which runs it in two processes: one per node, with four devices each.

The checks are those of test_moe.py, test_training.py and test_balancer.py, on a mesh whose node axis is the process.
"""

import contextlib
import dataclasses
import io
import re
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import test_balancer
import test_moe
import test_pretrained
import test_training
from jax.experimental import multihost_utils
from support.damage import cut_in_half, flip_bit_of

from pallas_kernels.grouped_dot.api import IMPLEMENTATIONS
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.verdicts import Verdict
from relibra_jax import RoutingReplay, static
from relibra_jax.contract.types import Topology
from relibra_jax.execution import ExpertParallel, check_same_plan, expert_mesh, rank_sharding
from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.models import load_pretrained, save_pretrained
from relibra_jax.models.tensor_files import TensorFiles
from relibra_jax.nnx import get_homes
from relibra_jax.routing.exchange_rules import PATHS

NUMBER, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def node_axis_is_the_process():
    mesh = expert_mesh(test_moe.topology_of("2x4", 2))
    owner = [[device.process_index for device in row] for row in mesh.devices]
    assert owner == [[0] * 4, [1] * 4], owner


def all_trust_a_kernel_or_none():
    """The settings of a layer agree, here as if CPUs ran the kernels. What one process trusts alone, both leave out."""
    mesh, topology = expert_mesh(test_moe.topology_of("2x4", 2)), test_moe.topology_of("2x4", 2)
    rows = np.zeros((8, 64), jax.numpy.bfloat16)

    def choose(trusted):
        """Return what this process chooses, and what it prints, if ``trusted`` are the kernels that pass here."""

        def verdict(name):
            return Verdict(name in trusted, "" if name in trusted else "it hung for 180 s")

        output = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(output):
            patch.setattr("pallas_kernels.agreement.find_verdict", verdict)
            patch.setattr(
                "pallas_kernels.agreement.reasons_not_to_check", lambda: {"mosaic": None, "triton": None}
            )
            patch.setattr("pallas_kernels.agreement.PLATFORM", "cpu")
            patch.setattr("pallas_kernels.verdicts._AGREED", {})
            for name in ("_why_not_mosaic", "_why_not_triton"):
                patch.setattr(f"pallas_kernels.implementation.{name}", lambda *_: None)
            ExpertParallel(mesh=mesh, topology=topology)
            chosen = choose_implementation(
                None, IMPLEMENTATIONS, jax.numpy.asarray(rows), rows.dtype, k=64, n=64
            )
        return chosen, output.getvalue()

    reason = "processes [1] of 2" + NUMBER * ": it hung for 180 s"
    line = "pallas_kernels: implementation {!r} is not chosen because it has not passed its check ({}); run "
    chosen, output = choose({"mosaic", "triton"} if NUMBER == 0 else {"triton"})
    assert (chosen, output.count("\n")) == ("triton", 1)
    assert output.startswith(line.format("mosaic", reason)), output
    chosen, output = choose({"mosaic", "triton"} if NUMBER == 0 else set())
    assert (chosen, output.count("\n")) == ("xla", 2)
    assert line.format("triton", reason) in output, output


def plans_do_not_change_the_mathematics():
    for name in ("static", "eplb", "relibra"):
        for path in PATHS:
            test_moe.test_moe_layer_equals_the_dense_reference_for_every_planner(path, name)


def both_hold_the_same_plan_or_stop():
    plan = test_moe.plans("2x4", 2, "relibra")
    check_same_plan(plan)
    other = plan._replace(quota=plan.quota + NUMBER)
    with pytest.raises(ValueError, match=r"plan: processes \[1\] of 2 differ from process 0"):
        check_same_plan(other)


def training_goes_on_where_it_stopped():
    with jax.enable_x64(True):
        first, second = test_training.Run(2, 4), test_training.Run(2, 4)
        first.train(0, 3)
        first.save(FOLDER, 3)
        assert second.restore(FOLDER) == 3
        assert (second.home != np.arange(test_training.EXPERTS)).any()
        second.train(3, 6)
        expected = test_training.train_dense()[5]
        assert test_training.largest_difference(second.logical(), expected) < test_training.TOLERANCE


def a_damaged_checkpoint_stops_both():
    """Both processes raise, even if only one of them reads the damaged part."""
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=8, replica_slots=0)
    options = {"layers": 0, "mesh": expert_mesh(topology), "topology": topology}
    noise = np.frombuffer(np.random.default_rng(0).bytes(2 * 4 * 4000), np.float32).reshape(2, 4, 1, 1000)
    tree = jax.make_array_from_callback(noise.shape, rank_sharding(options["mesh"]), lambda at: noise[at])
    folder = FOLDER.with_name("damaged")
    folder.mkdir(exist_ok=True)
    with ocp.CheckpointManager(folder) as manager:
        for step in (1, 2, 3):
            save_checkpoint(manager, step, tree, np.arange(8)[None], **options)
        manager.wait_until_finished()
        for step, harm in ((2, lambda path: flip_bit_of(noise[1, 2], path)), (3, cut_what_process_1_wrote)):
            if NUMBER == 0:
                harm(folder / str(step))
            multihost_utils.sync_global_devices(f"damaged {step}")
            with pytest.raises(ValueError, match=f"step {step} in .*; to try step {step - 1}, the newest"):
                restore_checkpoint(manager, tree, step=step, **options)
        restored = restore_checkpoint(manager, tree, step=1, **options).tree
    for shard in restored.addressable_shards:
        assert np.asarray(shard.data).tobytes() == noise[shard.index].tobytes()


def cut_what_process_1_wrote(folder):
    for path in (folder / "state" / "ocdbt.process_1" / "d").iterdir():
        cut_in_half(path)


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
    ids, mask = test_balancer.batches()[3 + NUMBER][1]  # a different batch on each process
    with pytest.raises(ValueError, match=r"plan: processes \[1\] of 2 differ from process 0"):
        run.balancer.prepare(run.model, run.optimizer, RoutingReplay(ids, mask))
    np.testing.assert_array_equal(get_homes(run.model), before)
    run.train(3, 4)


def routes_stay_with_the_process_that_has_them():
    """Each process has the routes of every second sample, and both prepare what they prepare from all of them."""
    topology = dataclasses.replace(test_balancer.TOPOLOGY, ranks_per_node=4)
    whole, part = test_balancer.Run(topology=topology), test_balancer.Run(topology=topology)
    own = np.arange(NUMBER, test_balancer.SAMPLES, 2)[::-1]
    for number in range(2):
        x, replay = test_balancer.batches()[number]
        losses = []
        for run in (whole, part):
            mine = run is part
            rows = own if mine else np.arange(test_balancer.SAMPLES)
            options = {"own": own} if mine else {}
            routes = RoutingReplay(*(np.asarray(leaf)[rows] for leaf in replay))
            batch = run.balancer.prepare(run.model, run.optimizer, routes, **options)
            inputs = batch.to_ranks((x[rows], routes), **options)
            losses.append(float(test_balancer.train_step(run.model, run.optimizer, batch, inputs)))
            np.testing.assert_array_equal(batch.from_ranks(inputs[0], **options), x[rows])
        np.testing.assert_allclose(*losses, rtol=1e-6)
    wrong = routes.expert_ids + np.uint8(100 * NUMBER)
    message = (r"checking the routes of a batch: failed on processes \[1\] of 2", "expert id 1")[NUMBER]
    with pytest.raises(ValueError, match=message):
        part.balancer.prepare(part.model, part.optimizer, routes._replace(expert_ids=wrong), own=own)
    first = RoutingReplay(*(np.asarray(leaf)[:5] for leaf in replay))
    with pytest.raises(ValueError, match="own: sample 0 of 10 is with 2 processes"):
        part.balancer.prepare(part.model, part.optimizer, first, own=np.arange(5))


def checkpoints_are_read_in_part_and_saved_together():
    """Each process reads only the experts of its node, and all tensors are restored."""
    folder, reads, read = test_pretrained.FOLDER / "glm4_moe", set(), TensorFiles.read

    def count(files, name, rows=()):
        if ".experts." in name:
            assert (name, rows) not in reads
            reads.add((name, rows))
        return read(files, name, rows)

    home = test_pretrained.some_homes("glm4_moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFiles, "read", count)
        model = load_pretrained(folder, test_pretrained.mesh(), test_pretrained.TOPOLOGY, home=home)
    own = {
        (layer, expert)
        for layer in range(2)
        for expert in np.flatnonzero(home[layer] // 8 == NUMBER).tolist()
    }
    assert {
        tuple(int(part) - one for part, one in zip(re.findall(r"\d+", name), (1, 0), strict=False))
        for name, _ in reads
    } == own
    saved = FOLDER.with_name("saved")
    save_pretrained(model, saved)
    test_pretrained.assert_same_bits(test_pretrained.read_all(saved), test_pretrained.separate("glm4_moe"))


def a_checkpoint_that_one_cannot_write_or_read_stops_both():
    """Both processes raise: one with its own error, the other with a message that has the first one's number."""
    folder, options = test_pretrained.FOLDER / "mixtral", (test_pretrained.mesh(), test_pretrained.TOPOLOGY)
    model, unwritten = load_pretrained(folder, *options), FOLDER.with_name("unwritten")
    for what, error, run in (
        ("save_file", OSError("no space left"), lambda: save_pretrained(model, unwritten)),
        ("TensorFiles.shapes", ValueError("no such shard"), lambda: load_pretrained(folder, *options)),
    ):

        def fail(*_, error=error, **__):
            raise error

        error_type, match = ValueError, r"ing .*: failed on processes \[0\] of 2"
        with pytest.MonkeyPatch.context() as patch:
            if NUMBER == 0:
                error_type, match = type(error), str(error)
                patch.setattr(f"relibra_jax.models.tensor_files.{what}", fail)
            with pytest.raises(error_type, match=match):
                run()
    assert not unwritten.exists()


jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, NUMBER)
for check in (
    node_axis_is_the_process,
    all_trust_a_kernel_or_none,
    both_hold_the_same_plan_or_stop,
    plans_do_not_change_the_mathematics,
    training_goes_on_where_it_stopped,
    a_damaged_checkpoint_stops_both,
    batches_are_prepared_and_trained_on,
    routes_stay_with_the_process_that_has_them,
    checkpoints_are_read_in_part_and_saved_together,
    a_checkpoint_that_one_cannot_write_or_read_stops_both,
):
    check()
    print(f"passed: {check.__name__}", flush=True)
