"""Tests of dry runs: they count what a run counts, say all refusals, and need no devices."""

import dataclasses
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.model_memory import check_training_memory
from experiments.rl import dry_plan
from experiments.rl.configs import Train
from experiments.rl.dry_plan import find_trace, plan_batch
from experiments.rl.dry_run import DryRun, dry_run, find_hardware
from experiments.rl.dry_tables import print_dry_run, total_times
from experiments.rl.stages import stage_options
from experiments.rl.state import make_balancer, run_price, run_sizes, split_key
from experiments.rl.train import run_train
from experiments.run import main
from experiments.step_memory import counted_rows, memory_by_stage, rank_gigabytes
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.cost.cost_model import dense_gradient_bytes
from relibra_jax.evaluation import Ranks
from relibra_jax.nnx import expert_mesh
from relibra_jax.nnx.modelled_times import model_stage
from relibra_jax.traces.trace import some_layers

SIMPLE = {"planner": "static", "anneal_steps": 0}
"""Settings whose planning compiles quickly."""
QWEN3_30B = Train(
    **SIMPLE,
    model=Path("Qwen3-30B-A3B"),
    dtype="bfloat16",
    ranks=Ranks(nodes=2, ranks_per_node=8, replica_slots=0),
    warmup_steps=0,
    prompts=64,
    prompt_tokens=1024,
    response_tokens=7168,
)
QWEN3_235B = dataclasses.replace(
    QWEN3_30B,
    model=Path("Qwen3-235B-A22B"),
    ranks=Ranks(nodes=20, ranks_per_node=8, replica_slots=0),
    experts_over="4x8",
    shard_dense=True,
    state_memory="pinned_host",
    activation_memory="pinned_host",
    prompts=20,
    micro_batches=1,
)


def printed(dry):
    console = Console(file=io.StringIO(), width=150)
    status = print_dry_run(dry, console)
    return status, console.file.getvalue()


def test_a_dry_run_refuses_what_the_run_refuses_in_the_same_words(monkeypatch):
    config = dataclasses.replace(QWEN3_30B, ranks=Ranks(nodes=2, ranks_per_node=4, replica_slots=0))
    dry = dry_run(config, plan=False)
    assert dry.sizes == run_sizes(config)
    monkeypatch.setattr("experiments.model_memory.memory_of_a_device", lambda mesh: 80e9)
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: 2**50)
    with pytest.raises(ValueError, match=r"a device has 80\.0 GB") as raised:
        check_training_memory(config.model_name, run_sizes(config), expert_mesh(config.topology))
    assert dry.refusals == (str(raised.value),)
    assert "on each of 8 ranks (arrays of a layer 42.0, moments 41.3, " in dry.refusals[0]
    assert "it would need less with state_memory=pinned_host" in dry.refusals[0]
    status, text = printed(dry)
    total = max(sum(stage.values()) for stage in memory_by_stage(dry.sizes).values())
    assert status == 2
    assert f"refused: {raised.value}\n" in text
    # What is left is negative by as much as is lacking.
    assert f"{(80e9 - total) / 1e9:.3g}" in text
    assert f"{counted_rows(dry.sizes):,}" in text
    assert (
        dry_run(dataclasses.replace(QWEN3_30B, shard_dense=True, micro_batches=16), plan=False).refusals == ()
    )


def test_a_dry_run_names_all_refusals_at_once():
    config = dataclasses.replace(QWEN3_30B, task="coutn", writer="nowhere:writer")
    task, memory, writer = dry_run(config, plan=False).refusals
    assert task.startswith("task 'coutn' must be one of")
    assert "the backward stage needs" in memory
    assert "nowhere" in writer


def test_160_ranks_are_planned_without_devices(monkeypatch):
    def no_devices(count):
        raise AssertionError(f"a dry run asked for {count} devices")

    monkeypatch.setattr("experiments.rl.devices.host_devices", no_devices)
    monkeypatch.setattr(dry_plan, "DRAWN_SAMPLES", 8)
    monkeypatch.setattr(dry_plan, "PLANNED_LAYERS", 2)
    dry = dry_run(QWEN3_235B)
    planned = dry.planned
    assert dry.refusals == ()
    assert QWEN3_235B.num_ranks == 160
    assert (planned.layers, planned.trace.num_experts, planned.trace.synthetic) == (2, 128, True)
    assert planned.trace.replay.mask.sum(1).max() * planned.stretch == pytest.approx(8192)
    plan, static, balanced = total_times(planned)
    # The plan is static placement, whose striped load is counted in one column and estimated in the other.
    assert float(plan.total) == pytest.approx(float(static.total), rel=0.1)
    assert plan.total > balanced.total
    assert planned.phases["moves"].plan.total == 0
    # Four epochs of three passes each, and one recompute.
    updates, recompute = (planned.phases[name].plan for name in ("updates", "recompute"))
    assert float(updates.attention) == pytest.approx(float(12 * recompute.attention))
    status, text = printed(dry)
    assert status == 0
    assert "2 of 94 layers planned" in text
    assert "modelled for h100, tokens hierarchical, fitted" in text
    assert text.endswith("nothing was run\n")


def test_modelled_time_is_that_of_the_price_of_a_run():
    """The recompute shares the micro-batches of the updates. A run prices both together, a dry run each for itself."""
    config = Train(**SIMPLE, epochs=1)
    hardware, trace = find_hardware(config, None), find_trace(config.model_config, None)
    trace = trace._replace(replay=type(trace.replay)(*(leaf[: config.samples] for leaf in trace.replay)))
    longest = int(np.asarray(trace.replay.mask).sum(1).max())
    cost = run_price(config, hardware.cluster)
    stretch = (config.prompt_tokens + config.response_tokens) / longest
    cost = dataclasses.replace(cost, scale=stretch, stretch=stretch)
    mesh = expert_mesh(config.topology)
    balancer = make_balancer(config, mesh, cost, key=split_key(0)[2])
    planned = balancer.plan_stages(trace.replay, **stage_options(config))
    [price] = planned.prices
    times = model_stage(
        *(planned.plans[0], planned.batch, planned.stages[0], price, config.topology),
        previous_home=contiguous_homes(config.topology, config.model_config.moe_layers),
        moves=True,
    )
    dry = total_times(plan_batch(config, hardware, trace))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-9), dry, times)


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"fsdp": 2}, 2 * 2 * 3 * 2 / 2 + 2 * 2 / 2),
        ({"fsdp": 2, "gather_once": True}, 2 * (2 + 4) / 2 + 2 / 2),
        ({"fsdp": 2, "gather_once": True, "updates": 2, "micro_batches": 1}, 2 * 2 * (2 + 4) / 2 + 2 * 2 / 2),
        ({"fsdp": 2, "gather_once": True, "updates": 2, "recompute_micro_batches": 1}, 2 * 2 * 3 + 2 / 2),
        ({"data": 2}, 2 * 2 * 4 / 2),
    ],
)
def test_a_dry_run_prices_what_copies_exchange(changes, sent):
    """Bytes for each parameter of a rank's experts: two epochs of an update of two micro-batches, and a recompute.

    The recompute gathers experts in the stage of each update, unless it has its own.
    """
    ranks = Ranks(nodes=1, ranks_per_node=4, replica_slots=0)
    settings = SIMPLE | {"micro_batches": 2, "epochs": 2, "dtype": "bfloat16"} | changes
    config = Train(ranks=ranks, **settings)
    hardware = find_hardware(config, "h100")
    # Nothing but links between copies takes time.
    fast = dataclasses.replace(hardware.cluster, slow_bandwidth=1.0, network_efficiency=1.0)
    planned = plan_batch(config, hardware._replace(cluster=fast), find_trace(config.model_config, None))
    times = planned.phases["experts and dense gradients between copies"]
    model = run_price(config, fast).model
    experts = sent * config.topology.home_slots * model.expert_params
    dense = 2 * config.updates * dense_gradient_bytes(model) / 4 / 2
    assert float(times.plan.total) == pytest.approx(model.moe_layers * (experts + dense), rel=1e-4)
    assert times.plan == times.staying == times.balanced
    gathers = "fsdp" in changes and "gather_once" not in changes
    assert (planned.gather_once_saves > 0) == gathers
    if gathers:
        assert planned.gather_once_saves == pytest.approx(experts / 2 * model.moe_layers, rel=1e-4)
        sizes = run_sizes(config)
        needed = rank_gigabytes(dataclasses.replace(sizes, gather_once=True))
        _, text = printed(DryRun(config, hardware, sizes, (), (), planned))
        assert f"a rank would need {needed:.1f} GB (computed)" in text
        less = hardware._replace(memory=needed * 1e9 - 1)
        _, text = printed(DryRun(config, less, sizes, (), (), planned))
        assert "gather_once=True would save" not in text


def test_the_command_prints_a_dry_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--dry", "--no-replay"]) == 0
    text = capsys.readouterr().out
    assert "tiny model" in text
    assert "updates follow no plan" in text
    assert main(["demo", "--dry", "--no-replay", "--task", "coutn"]) == 2
    assert "refused: task 'coutn' must be one of" in capsys.readouterr().out
    assert main(["demo", "--cluster", "h100"]) == 2
    assert capsys.readouterr().err == "error: --cluster h100 is for --dry\n"
    assert list(tmp_path.iterdir()) == []


def test_a_trace_must_have_the_routing_of_the_model(monkeypatch):
    monkeypatch.setattr(dry_plan, "DRAWN_SAMPLES", 8)
    model = Train().model_config
    assert find_trace(model, None).name == find_trace(model, "recorded").name == "recorded_trace.npz"
    olmoe = dataclasses.replace(model, num_experts=64, gating=QWEN3_30B.model_config.gating)
    assert find_trace(olmoe, None).note.endswith("; the calibration is for 128 experts, top-8")
    two = dataclasses.replace(model, layers=2)
    assert find_trace(two, None).replay.expert_ids.shape[2] == 2
    assert some_layers(find_trace(model, None), 2).note == find_trace(two, None).note
    with pytest.raises(
        ValueError, match=r"^trace recorded: 16 experts, top-2, but the model has 128 experts, top-8$"
    ):
        find_trace(QWEN3_30B.model_config, "recorded")


@pytest.mark.parametrize("empty", [8, 256])
def test_a_dry_run_refuses_a_trace_whose_batch_has_no_tokens(tmp_path, capsys, empty):
    """The batch has 256 samples: those of the trace, or drawn ones if it has fewer."""
    lengths, rows = np.array([0] * empty), np.zeros((0, 2, 2), np.uint8)
    if empty == 256:
        lengths, rows = np.append(lengths, 1), np.array([[[0, 1]] * 2], np.uint8)
    path = tmp_path / "empty.npz"
    np.savez(path, num_experts=np.int32(16), routed_experts=rows, lengths=lengths)
    assert main(["demo", "--dry", "--trace", str(path)]) == 2
    assert capsys.readouterr().err == (
        "error: trace empty.npz has no tokens in the 256 samples of a batch, so there is no load to balance\n"
    )


def test_a_published_model_needs_no_folder_until_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert QWEN3_30B.lacks_checkpoint
    assert (QWEN3_30B.model_config.layers, QWEN3_30B.model_config.vocabulary) == (48, 151936)
    with pytest.raises(
        ValueError, match=r"Qwen3-30B-A3B: there is no such folder; a run needs the checkpoint"
    ):
        run_train(QWEN3_30B, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        ValueError,
        match=r"there is no such folder, and the published models .*; did you mean Qwen3-30B-A3B ",
    ):
        Train(model=Path("Qwen3-30B-A3"))
    with pytest.raises(ValueError, match=r"^cluster 'h10' must be one of .*; did you mean h100\?"):
        dry_run(Train(), cluster="h10")
