"""Checkpoints of `transformers`: its logits, bit for bit back, and no device reads another's experts.

The fixtures are written by tests/make_hf_checkpoints.py.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from relibra_jax import PLANNERS, RoutingReplay, Topology
from relibra_jax.models import LanguageModel, load_pretrained, pretrained_tensors, save_pretrained
from relibra_jax.models import load as load_module
from relibra_jax.models.tensor_files import TensorFiles
from relibra_jax.nnx import Balancer, ExpertParallel, expert_mesh, get_homes, reorder_experts

FOLDER = Path(__file__).parent / "golden" / "hf"
CHECKPOINTS = sorted(path.name for path in FOLDER.iterdir())
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)
LIVE = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
MESH = expert_mesh(TOPOLOGY)
RNG = np.random.default_rng(0)


@functools.cache
def kept(name):
    arrays = np.load(FOLDER / name / "logits.npz")
    return arrays["tokens"], arrays["logits"]


def some_homes(layers):
    return np.stack([RNG.permutation(16) for _ in range(layers)]).astype(np.int32)


@functools.cache
def loaded(name) -> LanguageModel:
    return load_pretrained(FOLDER / name, MESH, TOPOLOGY, home=some_homes(3 if "dense" not in name and name != "glm4_moe" else 2))


def everything(folder):
    files = TensorFiles(folder)
    return {name: files.read(name) for name in files.shapes()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_transformers_live_and_replayed_under_a_plan(name):
    with jax.default_matmul_precision("highest"):
        model, (tokens, logits) = loaded(name), kept(name)
        mask = np.ones(tokens.shape, bool)
        live = nnx.jit(lambda model: model(tokens, mask, parallel=ExpertParallel(mesh=MESH, topology=LIVE)))(model)
        np.testing.assert_allclose(live.logits, logits, atol=1e-5)
