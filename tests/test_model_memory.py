"""The computed memory of published models: parameters equal the model cards, and bytes equal those of a run."""

import re
from pathlib import Path

import jax
import optax
import pytest
from flax import nnx

from experiments.model_memory import (
    PUBLISHED,
    RANKS,
    bytes_of_a_parameter,
    check_training_memory,
    num_parameters,
    rank_gigabytes,
)
from experiments.rl.policy import TINY
from relibra_jax import Topology
from relibra_jax.models import make_model
from relibra_jax.models.hf_config import model_config
from relibra_jax.nnx import expert_mesh

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "checkpoints.md").read_text()


# The numbers are those of the model cards. The rounded numbers of GLM-4.5 include layers for multi-token prediction,
# which are not loaded.
@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("OLMoE-1B-7B", 6.92, 0.01),
        ("Qwen3-30B-A3B", 30.5, 0.05),
        ("Qwen3-235B-A22B", 235, 0.5),
        ("Mixtral-8x7B", 46.7, 0.05),
        ("GLM-4.5", 355, 5),
        ("GLM-4.5-Air", 106, 1),
    ],
)
def test_num_parameters_equals_the_model_cards(name, billions, tolerance):
    assert sum(num_parameters(model_config(PUBLISHED[name]))) / 1e9 == pytest.approx(billions, abs=tolerance)


def test_rank_gigabytes_equals_the_bytes_of_a_run():
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
    model = make_model(TINY, topology, mesh=expert_mesh(topology), key=jax.random.key(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    device_bytes = 0
    for leaf in jax.tree.leaves((nnx.state(model, nnx.Param), nnx.state(optimizer.opt_state))):
        device_bytes += leaf.addressable_shards[0].data.nbytes if leaf.size > 1 else 0
    # Two sets of float32 gradients; parameters and the two moments are three.
    gradients = 2 * 4 * device_bytes / 12
    assert device_bytes + gradients == pytest.approx(1e9 * rank_gigabytes(TINY, topology.num_ranks))
    assert bytes_of_a_parameter() == 20


def test_rank_gigabytes_equals_the_table_of_the_page():
    for name, fields in PUBLISHED.items():
        config = model_config(fields)
        [row] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
        sizes = [f"{rank_gigabytes(config, n):.0f}" if config.num_experts % n == 0 else "" for n in RANKS]
        assert [cell.strip() for cell in row.split("|")][2:] == sizes, name


def test_check_training_memory_rejects_insufficient_memory_with_the_sizes():
    mesh = expert_mesh(Topology(num_nodes=2, ranks_per_node=4, num_experts=128, replica_slots=0))
    config = model_config(PUBLISHED["Qwen3-235B-A22B"])
    with pytest.raises(
        ValueError, match=r"big: training needs 727\.7 GB on each of 8 ranks \(20 bytes per parameter"
    ):
        check_training_memory(Path("big"), config, mesh)
