"""The computed memory: parameters equal the model cards, states those of a run, and updates what XLA allocates."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.aot.whole_settings import Whole, sizes_of
from experiments.model_memory import check_training_memory, num_parameters, published_sizes, table_row
from experiments.published import PUBLISHED
from experiments.rl.configs import Train
from experiments.rl.objective import Losses
from experiments.rl.optimizer import make_optimizer
from experiments.rl.policy import TINY, Agent
from experiments.rl.state import run_sizes
from experiments.rl.step import TrainingBatch, update
from experiments.step_memory import RunSizes, host_bytes, memory_by_stage, rank_gigabytes, rank_parameters
from relibra_jax import Topology
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.execution.memory import HOST
from relibra_jax.models import make_model
from relibra_jax.models.hf_config import model_config
from relibra_jax.nnx import Balancer, ExpertParallel, expert_mesh
from relibra_jax.planning.planners import PLANNERS

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "checkpoints.md").read_text()
WITHIN = 0.1
"""The relative error that is allowed for the memory of an update."""


def make_topology(nodes=1, ranks=4, **changes):
    return Topology(
        **({"num_nodes": nodes, "ranks_per_node": ranks, "num_experts": 16, "replica_slots": 2} | changes)
    )


# The numbers are those of the model cards. The rounded numbers of GLM-4.5 include layers for multi-token prediction,
# which are not loaded.
@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("OLMoE-1B-7B", 6.92, 0.01),
        ("GPT-OSS-20B", 20.91, 0.01),
        ("GPT-OSS-120B", 116.83, 0.01),
        ("Qwen3-30B-A3B", 30.5, 0.05),
        ("Qwen3-235B-A22B", 235, 0.5),
        ("Mixtral-8x7B", 46.7, 0.05),
        ("GLM-4.5", 355, 5),
        ("GLM-4.5-Air", 106, 1),
    ],
)
def test_num_parameters_equals_the_model_cards(name, billions, tolerance):
    assert sum(num_parameters(model_config(PUBLISHED[name]))) / 1e9 == pytest.approx(billions, abs=tolerance)


def test_split_samples_hold_the_keys_and_values_of_a_node():
    """Compiled for nodes of four H100s, attention of 8,192 tokens took 312 MB with them, and 153 MB without."""
    config = dataclasses.replace(TINY, heads=16, kv_heads=4, head_width=128, dtype="bfloat16")
    sizes = RunSizes(config=config, topology=make_topology(), length=8192)
    whole, split = (
        memory_by_stage(each)["backward"]["arrays of a layer"]
        for each in (sizes, dataclasses.replace(sizes, split=True))
    )
    assert split - whole == pytest.approx(159e6, rel=WITHIN)


@pytest.mark.parametrize(("shard_dense", "fsdp"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_states_equal_the_bytes_of_a_run(shard_dense, fsdp, moments):
    topology = make_topology(nodes=2, ranks=4 // fsdp)
    axes = {"fsdp": fsdp} if fsdp > 1 else {}
    mesh = expert_mesh(topology, **axes)
    sharding = {"shard_dense": shard_dense, "fsdp_axis": "fsdp" if fsdp > 1 else None}
    model = make_model(TINY, topology, mesh=mesh, key=jax.random.key(0), **sharding)
    tx = make_optimizer(1e-3, 1e-3, 0, moments=moments)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def rank_bytes(state):
        leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    sizes = RunSizes(config=TINY, topology=topology, fsdp=fsdp, shard_dense=shard_dense, moments=moments)
    items = memory_by_stage(sizes)["backward"]
    assert items["parameters"] == rank_bytes(nnx.state(model, nnx.Param))
    assert items["moments"] == rank_bytes(nnx.state(optimizer.opt_state))


def test_a_parameter_takes_the_bytes_that_the_page_says():
    for changes, dtype, expected in (
        ({}, "float32", 16),
        ({"moments": "bfloat16"}, "float32", 12),
        ({"state_memory": HOST}, "float32", 8),
        ({"state_memory": HOST}, "bfloat16", 6),
    ):
        config = dataclasses.replace(model_config(PUBLISHED["OLMoE-1B-7B"]), dtype=dtype)
        sizes = dataclasses.replace(published_sizes(config, 8, shard_dense=False), **changes)
        items = memory_by_stage(sizes)["backward"]
        parameters = rank_parameters(sizes)
        assert sum(items.values()) == expected * parameters.all + 4 * parameters.outside
        assert f"| {expected} bytes |" in PAGE


@pytest.mark.parametrize("shard_dense", [False, True])
def test_table_equals_the_table_of_the_page(shard_dense):
    where = "sharded" if shard_dense else "on every rank"
    for name, fields in PUBLISHED.items():
        [row] = re.findall(rf"^\| {re.escape(name)} \|([^\n]*, {where} \|[^\n]*)\|$", PAGE, re.MULTILINE)
        cells = [cell.strip() for cell in row.split("|")][2:]
        assert cells == table_row(model_config(fields), shard_dense=shard_dense), name


def compile_update(sizes, samples):
    """Compile the update of a run on devices; return XLA's count of bytes, and the rows of a layer's buffers."""
    config, topology = sizes.config, sizes.topology
    mesh = expert_mesh(topology, devices=jax.devices()[: topology.num_ranks])
    key = jax.random.key(0)
    agent = Agent(make_model(config, topology, mesh=mesh, key=key, shard_dense=sizes.shard_dense))
    tx = make_optimizer(1e-3, 1e-3, 0, moments=sizes.moments)
    optimizer = nnx.Optimizer(agent, tx, wrt=nnx.Param)
    live = sizes.live
    balancer = Balancer(
        PLANNERS["static"].planner,
        ExpertParallel(mesh=mesh, topology=topology, check_rows=True, chunk_tokens=sizes.chunk_tokens),
        num_layers=config.moe_layers,
        num_micro_batches=sizes.micro_batches,
        key=key,
        cost="balance",
        sequences="padded",
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, config.vocabulary, (samples, sizes.length), np.int32)
    mask, weights = np.ones(tokens.shape, bool), np.ones(tokens.shape, np.float32)
    ids = np.argsort(rng.random((*tokens.shape, config.moe_layers, config.num_experts)))[..., : config.top_k]
    ids = None if live else ids.astype(np.uint8)
    if live:
        batch = balancer.prepare(agent, optimizer, None, mask=mask)
    else:
        batch = balancer.prepare(agent, optimizer, RoutingReplay(ids, mask))
    on_ranks = batch.to_ranks(TrainingBatch(tokens, mask, ids, weights, weights, weights))
    batch_load = jnp.ones((config.moe_layers, config.num_experts), jnp.int32)
    program = update.lower(
        agent, optimizer, batch, on_ranks, batch_load, losses=Losses(), balance=0.02
    ).compile()
    return program.compiled.memory_analysis(), None if live else batch.parallel.capacities.rows


BIASED = {"activation": "clamped_swiglu", "expert_biases": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "changes", "model"),
    [
        pytest.param(
            *("logits of a chunk", {"length": 256, "shard_dense": True}, {"vocabulary": 8192, "layers": 2}),
            marks=pytest.mark.long,
            id="wide vocabulary",
        ),
        pytest.param("arrays of a layer", {"length": 3000}, {"layers": 5, "width": 96}, id="many tokens"),
        pytest.param(
            *(
                "arrays of a layer",
                {"length": 3000},
                {"layers": 5, "width": 96, "expert_width": 192, **BIASED},
            ),
            marks=pytest.mark.long,
            id="experts with biases",
        ),
        pytest.param(
            *("sum of gradients", {"length": 64, "moments": "bfloat16"}, {"expert_width": 1024}),
            marks=pytest.mark.long,
            id="wide experts",
        ),
        pytest.param(
            *(
                "arrays of a layer",
                {"length": 3000, "live": True, "chunk_tokens": 2048},
                {"layers": 3, "width": 96},
            ),
            marks=pytest.mark.long,
            id="live in chunks",
        ),
    ],
)
def test_memory_of_an_update_is_what_xla_allocates(item, changes, model):
    """One item is the largest besides the states in each case. The page says what is compared."""
    sizes = RunSizes(
        config=dataclasses.replace(TINY, **model),
        topology=make_topology(),
        micro_batches=2,
        sequences=2,
        batch_memory="device",
        **changes,
    )
    actual, rows = compile_update(sizes, samples=16)
    stages = memory_by_stage(dataclasses.replace(sizes, rows=rows))
    if sizes.live:
        stages = {"live": stages["live"]}
    items = max(stages.values(), key=lambda items: sum(items.values()))
    assert item in sorted(items, key=items.get)[-4:]
    allocated = actual.argument_size_in_bytes + actual.temp_size_in_bytes
    allocated += actual.output_size_in_bytes - actual.alias_size_in_bytes
    # XLA for CPUs copies the sum of gradients once. For GPUs it adds to it in place, as the record below shows.
    counted = sum(items.values()) + items["sum of gradients"]
    assert counted == pytest.approx(allocated, rel=WITHIN)
    # The states and what an update gets follow from shapes. XLA returns the new states in the place of the old ones.
    arguments = sum(items[name] for name in ("parameters", "moments", "tables, routes and targets"))
    assert arguments == pytest.approx(actual.argument_size_in_bytes, rel=WITHIN)
    assert actual.alias_size_in_bytes >= items["parameters"] + items["moments"]


def test_check_training_memory_names_the_largest_items_and_what_would_help(monkeypatch):
    monkeypatch.setattr("experiments.model_memory.memory_of_a_device", lambda mesh: 80e9)
    config = dataclasses.replace(model_config(PUBLISHED["Qwen3-30B-A3B"]), dtype="bfloat16")
    topology = make_topology(nodes=2, ranks=4, num_experts=128)
    sizes = RunSizes(
        config=config, topology=topology, micro_batches=2, sequences=4, length=4096, samples=8, columns=4096
    )
    mesh = expert_mesh(topology)
    with pytest.raises(ValueError, match=r"^big: ") as raised:
        check_training_memory("big", sizes, mesh)
    message = str(raised.value)
    assert re.fullmatch(
        r"big: the backward stage needs [\d.]+ GB on each of 8 ranks \(moments [\d.]+, parameters [\d.]+, sum of"
        r" gradients [\d.]+\), but a device has 80\.0 GB; it would need less with"
        r" state_memory=pinned_host \([\d.]+\), fsdp=2 on 16 devices \([\d.]+\), .*",
        message,
    ), message
    # What the message names needs what it says, and enough of it together passes.
    needed = float(re.search(r"shard_dense=True \(([\d.]+)\)", message)[1])
    smaller = dataclasses.replace(sizes, shard_dense=True)
    assert rank_gigabytes(smaller) == pytest.approx(needed, abs=0.05)
    check_training_memory("big", dataclasses.replace(smaller, moments="bfloat16", fsdp=4, sequences=1), mesh)


def test_state_on_the_host_is_held_against_the_memory_of_the_host(monkeypatch):
    sizes = RunSizes(config=TINY, topology=make_topology(nodes=2), state_memory=HOST)
    mesh, needed = expert_mesh(make_topology(nodes=2)), 8 * host_bytes(sizes)
    assert host_bytes(sizes) == 24 * rank_parameters(sizes).all
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: needed)
    check_training_memory("tiny", sizes, mesh)
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: needed - 1)
    with pytest.raises(
        ValueError, match=r"tiny: what 8 ranks keep in host memory needs 1 GiB of memory, but"
    ):
        check_training_memory("tiny", sizes, mesh)


def test_sizes_of_a_run_follow_from_its_settings():
    config = Train(
        shard_dense=True, moments="bfloat16", updates=2, micro_batches=4, recompute_micro_batches=2
    )
    sizes = run_sizes(config)
    ranks = config.num_ranks
    assert sizes.sequences * sizes.micro_batches * config.updates * ranks == config.samples
    assert sizes.recompute_sequences == 4 * sizes.sequences
    assert sizes.samples * ranks == config.samples
    assert sizes.length == sizes.columns == config.prompt_tokens + config.response_tokens
    assert (sizes.shard_dense, sizes.moments) == (True, "bfloat16")
    assert sizes.live
    planned = {"warmup_steps": 0}
    assert not run_sizes(Train(**planned)).live
    live = run_sizes(Train(**planned, replay=False, chunk_tokens=8, state_memory=HOST, batch_memory="device"))
    assert (live.live, live.chunk_tokens, live.state_memory, live.batch_memory) == (True, 8, HOST, "device")


def test_a_reference_takes_its_memory_in_its_own_pass_and_everywhere_only_on_devices():
    sizes = RunSizes(config=dataclasses.replace(TINY, dtype="bfloat16"), topology=make_topology(), length=64)
    size = 2 * rank_parameters(sizes).all
    on_host, on_device = (dataclasses.replace(sizes, reference_memory=memory) for memory in (HOST, "device"))
    alone, hosted, kept = (memory_by_stage(each) for each in (sizes, on_host, on_device))
    assert "reference" not in alone
    for stages in (hosted, kept):
        assert sum(stages["reference"].values()) - sum(alone["recompute"].values()) >= size
    assert ("reference" in hosted["backward"], kept["backward"]["reference"]) == (False, size)
    assert host_bytes(on_host) - host_bytes(on_device) == size
    # The copies of the policy and of the reference are on the devices one after the other.
    both = memory_by_stage(dataclasses.replace(on_host, state_memory=HOST))["reference"]
    assert (both["parameters"], both["reference"]) == (0, size)


def test_host_memory_leaves_the_device_parameters_gradients_and_one_of_everything():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    sizes = RunSizes(config=config, topology=make_topology(), micro_batches=4, sequences=1, length=64)
    on_host = dataclasses.replace(
        sizes, state_memory=HOST, config=dataclasses.replace(config, activation_memory=HOST)
    )
    items, fewer = (memory_by_stage(each)["backward"] for each in (sizes, on_host))
    assert (fewer["parameters"], fewer["moments"]) == (items["parameters"] / 2, 0)
    assert fewer["layer inputs"] * config.layers == items["layer inputs"]
    kept = memory_by_stage(dataclasses.replace(sizes, batch_memory="device"))["backward"]
    name = "tables, routes and targets"
    assert kept[name] == 4 * items[name]


def test_live_updates_need_no_more_with_more_tokens_than_a_chunk():
    sizes = RunSizes(config=TINY, topology=make_topology(), sequences=1, live=True, chunk_tokens=512)

    def buffers(length, **changes):
        stages = memory_by_stage(dataclasses.replace(sizes, length=length, **changes))
        per_token = {name: stages[name]["arrays of a layer"] for name in ("live", "backward")}
        return per_token["live"] - per_token["backward"]

    # A tiny model has fewer rows than scores of attention, so widen it.
    wide = dataclasses.replace(TINY, width=1024, expert_width=8)
    rows = buffers(512, config=wide)
    assert rows > 0
    assert buffers(4096, config=wide) < rows < buffers(4096, config=wide, chunk_tokens=4096)


RECORD = Path(__file__).parents[1] / "experiments" / "results" / "whole_models.jsonl"
STAGES = {"update": ("loss", "backward", "live"), "recompute": ("recompute",)}
TRAINING = [line for line in map(json.loads, RECORD.read_text().splitlines()) if line["program"] in STAGES]


@pytest.mark.parametrize(
    "line",
    TRAINING,
    ids=lambda line: (
        f"{line['program']} {line['model']} {line['nodes']} {line['tokens']}{' once' * line.get('gather_once', False)}"
    ),
)
def test_count_is_near_the_memory_of_published_models_compiled_for_h100(line):
    """The record is of ``python -m experiments.aot.whole``, where XLA says how much memory a program takes."""
    fields = {field.name for field in dataclasses.fields(Whole)}
    setting = Whole(**{name: value for name, value in line.items() if name in fields})
    stages = memory_by_stage(sizes_of(setting))
    beside = stages["recompute"]["moments"] if line["program"] == "recompute" else 0
    names = ("live recompute",) if beside and setting.live else STAGES[line["program"]]
    counted = max(sum(stages[name].values()) for name in names if name in stages) - beside
    assert counted / 1e9 == pytest.approx(line["peak_gb"], rel=0.1)


def test_a_wave_counts_the_cache_of_its_own_samples():
    small, whole = (
        memory_by_stage(run_sizes(Train(prompts=64, wave_samples=wave)))["decoding"]["cache"]
        for wave in (8, None)
    )
    assert whole == 64 * small
