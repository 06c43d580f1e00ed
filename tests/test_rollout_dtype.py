"""Rollouts in lower precision: the policy computes in another dtype with the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.rl.compute_dtype import in_dtype
from experiments.rl.configs import Train
from relibra_jax.contract.types import Topology
from relibra_jax.execution import ExpertParallel
from relibra_jax.execution.gating import Gating
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import ModelConfig, make_model

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
SIZES = {
    "vocabulary": 32,
    "width": 16,
    "layers": 2,
    "dense_layers": 1,
    "dense_width": 16,
    "heads": 2,
    "kv_heads": 1,
    "head_width": 8,
    "num_experts": 4,
    "gating": Gating(top_k=2, scores="softmax"),
    "expert_width": 16,
    "shared_width": 8,
}


def test_a_model_in_another_dtype_computes_as_one_that_was_made_in_it():
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[:1])
    exact, desired = (
        make_model(ModelConfig(**SIZES, dtype=dtype), TOPOLOGY, mesh=mesh, key=jax.random.key(0))
        for dtype in ("float32", "bfloat16")
    )
    rounded = in_dtype(exact, "bfloat16")
    parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 8)).astype(np.int32)

    @nnx.jit
    def run(model):
        output = model(tokens, np.ones(tokens.shape, bool), parallel=parallel)
        return output.hidden, output.router_logits, model.logits(output.hidden)

    for actual, expected in zip(run(rounded), run(desired), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))
    assert rounded.empty_cache(2, 8, parallel).keys.dtype == jnp.bfloat16
    assert run(exact)[0].dtype == jnp.float32
    for parameter, same in zip(*(jax.tree.leaves(nnx.state(each)) for each in (exact, rounded)), strict=True):
        assert parameter is same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_dtype": "float16"}, "rollout_dtype 'float16' must be one of float32, bfloat16"),
        (
            {"rollout_dtype": "float32", "dtype": "bfloat16"},
            "rollout_dtype=float32 must not be wider than dtype=bfloat16",
        ),
        (
            {"replay": False, "float8_above": 1.2, "float8_recompute": True},
            "float8_recompute=True needs replay=True",
        ),
    ],
)
def test_train_rejects_rollouts_that_mean_nothing(changes, message):
    with pytest.raises(ValueError, match=message):
        Train(**changes)
