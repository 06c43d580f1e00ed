"""Reordering the experts of MaxText's own models by a plan: ``python -m experiments.examples.maxtext_reorder``.

Run it in a Python environment with ``maxtext[tpu]==0.2.5`` and this package. The script trains small models of every
decoder block that can replay routes, for two steps of MaxText's own ``train_step`` with forced routes. It does so
twice: once unchanged, and once with the experts in the order of a plan's homes before the second step. It prints how
many values differ between the two, compared in logical expert order.
"""

import functools
import os
import re
import sys
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.optimizers.optimizers import get_optimizer
from maxtext.trainers.pre_train.train import train_step
from maxtext.utils import maxtext_utils

from relibra_jax import RoutingReplay, Topology, plan_batch, relibra
from relibra_jax.integrations.expert_order import logical_order, map_ids
from relibra_jax.integrations.maxtext import reorder_experts

EXPERT_LEAF = re.compile(r"(MoeBlock_0|routed_experts)'\]\['(gate|wi|wo)")
EXPERTS, TOP_K, TOKENS, SAMPLES = 8, 2, 32, 16
TOPOLOGY = Topology(num_nodes=1, ranks_per_node=4, num_experts=EXPERTS, replica_slots=0)
BASE = {
    "attention": "dot_product", "base_emb_dim": 64, "base_mlp_dim": 48, "base_moe_mlp_dim": 48,
    "base_num_kv_heads": 2, "base_num_query_heads": 4, "dtype": "float32", "enable_checkpointing": False,
    "enable_dropout": False, "gradient_clipping_threshold": 0.0, "hardware": "cpu", "load_balance_loss_weight": 0.0,
    "log_config": False, "matmul_precision": "highest", "max_target_length": TOKENS, "megablox": False,
    "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "override_model_config": True,
    "per_device_batch_size": float(SAMPLES), "run_name": "reorder", "skip_jax_distributed_system": True,
    "sparse_matmul": True, "vocab_size": 128, "weight_dtype": "float32",
}  # fmt: skip
QWEN = {
    "head_dim": 256, "gdn_key_head_dim": 16, "gdn_value_head_dim": 16, "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4, "gdn_chunk_size": 16,
}  # fmt: skip
MODELS: list[tuple[str, int, dict[str, Any]]] = [
    ("mixtral-8x7b", 2, {"scan_layers": True, "head_dim": 16}),
    ("mixtral-8x7b", 2, {"scan_layers": False, "head_dim": 16}),
    ("mixtral-8x7b", 2, {"scan_layers": True, "head_dim": 16, "param_scan_axis": 0, "mlp_bias": True}),
    (
        "mixtral-8x7b",
        2,
        {"scan_layers": False, "head_dim": 16, "prefuse_moe_weights": True, "routed_bias": True},
    ),
    ("qwen3.5-35b-a3b", 8, {"scan_layers": True, **QWEN}),
    ("qwen3.5-35b-a3b", 4, {"scan_layers": False, **QWEN}),
    ("gemma4-26b", 6, {"scan_layers": False, "head_dim": 16}),
]


def build(name: str, num_layers: int, options: dict[str, Any]) -> tuple[Any, Any, TrainStateNNX]:
    """Build a small model, and return MaxText's configuration, mesh and train state of it."""
    config_file = os.path.join(os.path.dirname(maxtext_utils.__file__), "..", "configs", "base.yml")
    config = pyconfig.initialize(
        [sys.argv[0], config_file],
        model_name=name,
        base_num_decoder_layers=num_layers,
        num_decoder_layers=num_layers,
        base_output_directory=tempfile.gettempdir(),
        **BASE,
        **options,
    )
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with mesh:
        model = models.Transformer(config=config, mesh=mesh, quant=None, model_mode="train", rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, get_optimizer(config, 1e-3), wrt=nnx.Param)
    return config, mesh, TrainStateNNX(model, optimizer)


def planned_homes(ids: np.ndarray) -> np.ndarray:
    """Return the homes that relibra plans for the routes of a batch, ``[L, E]``."""
    replay = RoutingReplay(ids.astype(np.int8), np.ones(ids.shape[:2], bool))
    state = relibra().init(TOPOLOGY, ids.shape[2], key=jax.random.key(0))
    batch_plan, _ = plan_batch(replay, relibra(), state, TOPOLOGY, stages=2)
    return np.asarray(batch_plan.plan.home)


def differences(actual: Any, expected: Any) -> str:
    """Describe how many values of two trees differ, and by how much at most."""
    pairs = [
        (np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        if jnp.issubdtype(a.dtype, jnp.number)
    ]
    if not pairs:
        return "no separate arrays to compare"
    unequal = sum(int((a != b).sum()) for a, b in pairs)
    return f"{unequal} of {sum(a.size for a, _ in pairs)} (max {max(float(np.abs(a - b).max()) for a, b in pairs):.1e})"


def last_block(state: Any, num_layers: int) -> list[Any]:
    """Return weights and moments of the last layer's experts and gate; nothing where layers are stacked."""
    names = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(state)]
    return [leaf for name, leaf in names if f"'layers_{num_layers - 1}'" in name and EXPERT_LEAF.search(name)]


def run(name: str, num_layers: int, options: dict[str, Any]) -> None:
    """Train one model for two steps, with and without a reorder between them, and print the differences."""
    config, mesh, train_state = build(name, num_layers, options)
    graph, state = nnx.split(train_state)
    rng = np.random.default_rng(0)
    scores = rng.gumbel(size=(SAMPLES, TOKENS, num_layers, EXPERTS)) + 1.5 * rng.normal(
        size=(num_layers, EXPERTS)
    )
    ids = np.argsort(-scores, -1)[..., :TOP_K].astype(np.int32)
    ids[:, -4:] = -1  # padding, which MaxText skips
    tokens = jnp.asarray(rng.integers(1, 128, (SAMPLES, TOKENS + 1)), jnp.int32)
    ones, position = jnp.ones((SAMPLES, TOKENS), jnp.int32), jnp.tile(jnp.arange(TOKENS), (SAMPLES, 1))
    data = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    data |= {f"{part}_segmentation": ones for part in data} | {f"{part}_position": position for part in data}

    @jax.jit
    def train(state, ids):
        return train_step(graph, config, None, None, state, {**data, "forced_routed_experts": ids})

    @jax.jit
    def logits(state, ids):
        model = nnx.merge(graph, state).model
        return model(data["inputs"], position, decoder_segment_ids=ones, forced_routed_experts=ids)

    with mesh:
        state, _ = train(state, ids)
        before, after = logical_order(num_layers, EXPERTS), planned_homes(np.maximum(ids, 0))
        reorder = functools.partial(reorder_experts, scan_axis=config.param_scan_axis)
        reordered_state, mapped_ids = reorder(state, before, after), map_ids(ids, before, after)
        expected, actual = logits(state, ids), logits(reordered_state, mapped_ids)
        unmapped_difference = float(jnp.abs(logits(reordered_state, ids) - expected).max())
        next_state, _ = train(state, ids)
        next_reordered, _ = train(reordered_state, mapped_ids)
        next_reordered = reorder(next_reordered, after, before)
    print(
        f"{name} {num_layers} layers {options}: {int((before != after).sum())} of {before.size} experts moved\n"
        f"  logits that differ: {differences(actual, expected)}; without mapped ids: max {unmapped_difference:.1e}\n"
        f"  state that differs after a step: {differences(next_reordered, next_state)}, of it in the last layer's"
        f" experts and gate: {differences(last_block(next_reordered, num_layers), last_block(next_state, num_layers))}",
        flush=True,
    )


def main() -> None:
    """Run the comparison for all models."""
    print(
        f"maxtext {maxtext.__version__}, jax {jax.__version__}, flax {flax.__version__}, {jax.default_backend()}"
    )
    for model in MODELS:
        run(*model)


if __name__ == "__main__":
    main()
