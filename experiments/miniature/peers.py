"""The expert layers of MaxText 0.2.5 and Tunix 0.1.7, with replayed routing, as baselines in the same comparison.

They are the released layers with their own expert parallelism, and the model around them is that of all contenders.
This module replaces some parts of them:

- The choice of experts is the recorded one.
- The grouped product is another one, because their kernels are for other devices, and XLA:CPU multiplies all rows of
  `jax.lax.ragged_dot` by all weights.
- MaxText's sum of a token's rows is its own older version, because the newer one gives bfloat16 on CPUs.
- Where a name says *lanes*, an all-to-all of equal lanes takes the place of the ragged one, which XLA:CPU does not
  implement. For this, Tunix is told that its devices are TPUs.

MaxText and Tunix are installed without their dependencies; those that no expert layer uses need not be there.
"""

import contextlib
import functools
import importlib.util
import os
import types
from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen import partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.miniature.missing_packages import allow_missing
from experiments.miniature.policy import Policy, Sizes, make_optimizer
from pallas_kernels import ragged_dot
from relibra_jax.contract.types import EMPTY
from relibra_jax.nnx import MoELayer

UNUSED: Final = (
    *("pathwaysutils", "tensorboardX", "xprof", "fire", "transformers", "grain", "tensorflow", "metrax"),
    *("sentencepiece", "pandas", "perfetto"),
)
"""Packages that MaxText and Tunix import, and their expert layers do not use."""
PEERS: Final = {
    "MaxText, ring": "maxtext",
    "MaxText, lanes": "maxtext",
    "Tunix": "tunix",
    "Tunix, lanes": "tunix",
}
"""The layers, and the package of each.

- *MaxText, ring*: every rank gathers all tokens and computes its own experts; outputs are summed and scattered
  (``use_ring_of_experts``, with a buffer for the fullest rank). Its collectives run on CPUs.
- *MaxText, lanes*: its all-to-all of token copies, the default on GPUs.
- *Tunix*: every expert of every token, which it does on CPUs.
- *Tunix, lanes*: its all-to-all of token copies, which it does on TPUs.
"""
EXPERTS: Final = ("wi_0", "wi_1", "wo", "gate_proj", "up_proj", "down_proj")
"""The names of arrays whose first axis is the experts."""


class Needs(NamedTuple):
    """Sizes with which no token is dropped."""

    lane: int
    """The most rows that one rank sends to one rank."""
    buffer: float
    """The most rows of a rank, and one more so that none is cut by rounding, over the rows of a rank's positions."""


def why_no_peer(name: str) -> str | None:
    """Return in one line why a peer cannot run here, or None if it can."""
    package = PEERS[name]
    if importlib.util.find_spec(package) is None:
        return f"{name!r} needs the package {package!r}"
    return None


def import_peers(names: Iterable[str]) -> None:
    """Import the packages of peers, before anything is compiled: they change the keys of JAX's programs."""
    wanted = {PEERS[name] for name in names}
    if wanted:
        allow_missing(UNUSED)
    if "maxtext" in wanted:
        importlib.import_module("maxtext.layers.moe")
    if "tunix" in wanted:
        importlib.import_module("tunix.models.qwen3.model")


def count_needs(expert_ids: np.ndarray, mask: np.ndarray, ranks: int, num_experts: int) -> Needs:
    """Count the largest needs of any micro-batch and layer.

    Args:
        expert_ids: the experts of each token, ``[M, sequences, T, L, K]``, with the sequences of each rank in turn.
        mask: which positions hold tokens, ``[M, sequences, T]``.
        ranks: the number of ranks.
        num_experts: the number of experts of a layer.
    """
    most = [0, 0]
    for number, layer in np.ndindex(len(expert_ids), expert_ids.shape[3]):
        ids, real = expert_ids[number, :, :, layer], mask[number][..., None]
        spread = np.where(real, ids, _spread(ids.shape, ranks, num_experts))
        source = np.arange(len(ids))[:, None, None] // (len(ids) // ranks)
        lanes, rows = np.zeros((ranks, ranks), int), np.zeros(ranks, int)
        np.add.at(lanes, (source, spread // (num_experts // ranks)), 1)
        np.add.at(rows, spread // (num_experts // ranks), real)
        most = [max(most[0], int(lanes.max())), max(most[1], int(rows.max()))]
    return Needs(most[0], (most[1] + 1) / (expert_ids[0, :, :, 0].size // ranks))


class MaxTextExperts(nnx.Module):
    """MaxText's expert layer, with its own replay of routing."""

    def __init__(self, name: str, sizes: Sizes, num_experts: int, mesh: Mesh, needs: Needs, rngs: nnx.Rngs):
        from maxtext.kernels.ragged import ragged_gather_reduce, ragged_sort
        from maxtext.layers import initializers, moe

        # The second version returns bfloat16 on CPUs, whatever it gets.
        ragged_sort.ragged_gather_reduce = ragged_gather_reduce.ragged_gather_reduce
        self.config, self.lane = _maxtext_config(name, sizes, num_experts, needs), needs.lane
        self.in_lanes = name.endswith("lanes")
        with self._rules():
            self.moe = moe.RoutedMoE(
                config=self.config,
                num_experts=num_experts,
                num_experts_per_tok=sizes.top_k,
                mesh=_one_axis(mesh, "expert"),
                kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
                kernel_axes=("embed_router", None),
                intermediate_dim=sizes.expert_width,
                rngs=rngs,
            )
        self.moe.rngs = None  # of random routing

    def _rules(self):
        return partitioning.axis_rules(self.config.logical_axis_rules)

    def __call__(self, x, expert_ids, mask):
        """Apply the layer to ``x[sequences, T, D]``. Positions without a token give 0."""
        with (
            self._rules(),
            mock.patch.object(jax.lax, "ragged_dot", _product),
            _lanes(self.in_lanes, self.lane),
        ):
            out = self.moe(x, forced_routed_experts=jnp.where(mask[..., None], expert_ids, EMPTY))[0]
        nnx.pop(self.moe, nnx.Intermediate)  # whether tokens were dropped
        return out

    def weights(self):
        """Return the router, and the gate, up and down projections."""
        return [self.moe.gate.kernel, self.moe.wi_0, self.moe.wi_1, self.moe.wo]


class TunixExperts(nnx.Module):
    """Tunix's expert layer of Qwen3, whose choice of experts is replaced."""

    def __init__(self, name: str, sizes: Sizes, num_experts: int, mesh: Mesh, needs: Needs, rngs: nnx.Rngs):
        from tunix.models.qwen3 import model

        others = (
            "num_layers",
            "vocab_size",
            "num_heads",
            "head_dim",
            "num_kv_heads",
            "rope_theta",
            "norm_eps",
        )
        self.mesh = _one_axis(mesh, "fsdp", "tp")  # the names of its default sharding
        self.in_lanes, self.lane = name.endswith("lanes"), needs.lane
        config = model.ModelConfig(
            **dict.fromkeys(others, 1),
            embed_dim=sizes.width,
            hidden_dim=sizes.expert_width,
            num_experts=num_experts,
            num_experts_per_tok=sizes.top_k,
        )
        self.moe = model.MoELayer(config, rngs=rngs)

    def __call__(self, x, expert_ids, mask):
        """Apply the layer to ``x[sequences, T, D]``. Positions without a token are computed, and give 0."""
        from tunix.models.qwen3 import model

        spread = _spread(expert_ids.shape, self.mesh.size, self.moe.num_experts)
        expert_ids = jnp.where(mask[..., None], expert_ids, spread)

        def top_k(shares, _):
            return jnp.take_along_axis(shares, expert_ids, -1), expert_ids

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.mesh)
            stack.enter_context(mock.patch.object(jax.lax, "top_k", top_k))
            if self.in_lanes:
                tpu = types.SimpleNamespace(platform="tpu")
                stack.enter_context(mock.patch.object(model, "jax", _Changed(jax, devices=lambda: [tpu])))
                stack.enter_context(mock.patch.object(model, "megablox", types.SimpleNamespace(gmm=_product)))
            stack.enter_context(_lanes(self.in_lanes, self.lane))
            return self.moe(x) * mask[..., None]

    def weights(self):
        """Return the router, and the gate, up and down projections."""
        return [self.moe.router.kernel, self.moe.gate_proj, self.moe.up_proj, self.moe.down_proj]


def make_peer_policy(
    name: str, sizes: Sizes, num_experts: int, mesh: Mesh, needs: Needs, like: Policy
) -> tuple[Policy, nnx.Optimizer]:
    """Make a policy with a peer's expert layers and the weights of another policy, and its optimizer.

    Args:
        name: a name of `PEERS`.
        sizes: the sizes of the model.
        num_experts: the number of experts of a layer.
        mesh: the mesh of the ranks, over all of which tokens and experts are spread.
        needs: the sizes of buffers.
        like: the policy whose router and experts it gets, with experts in the order of their ids. All other weights are
            equal because they are drawn with the same key.
    """
    layer = MaxTextExperts if PEERS[name] == "maxtext" else TunixExperts

    @nnx.jit
    def make(router, experts):
        policy = Policy(sizes, lambda rngs: layer(name, sizes, num_experts, mesh, needs, rngs), nnx.Rngs(0))
        # [L, N, G, H, gate/up/down, D, F]
        gate, up, down = jnp.moveaxis(
            experts.reshape(len(experts), num_experts, 3, *experts.shape[-2:]), 2, 0
        )
        given = (router, gate, up, jnp.swapaxes(down, -1, -2))
        peer: MaxTextExperts | TunixExperts = policy.blocks.experts  # type: ignore[assignment]
        for weight, value in zip(peer.weights(), given, strict=True):
            weight[...] = value
        optimizer = make_optimizer(policy)
        for module in (policy, optimizer):
            nnx.update(module, jax.tree_util.tree_map_with_path(placed, nnx.state(module)))
        return policy, optimizer

    def placed(path, value):
        names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
        # [L, E, ...]; arrays that the optimizer does not train have one number.
        is_experts = names & set(EXPERTS) and value.ndim > 1
        spec = PartitionSpec(None, mesh.axis_names) if is_experts else PartitionSpec()
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    own: MoELayer = like.blocks.experts  # type: ignore[assignment]
    return make(own.router[...], own.experts[...])


@functools.cache
def _maxtext_config(name: str, sizes: Sizes, num_experts: int, needs: Needs) -> Any:
    from maxtext.configs import pyconfig

    ring = {"use_ring_of_experts": True, "use_ragged_sort": True, "ragged_buffer_factor": needs.buffer}
    with mock.patch("maxtext.utils.max_utils.maybe_initialize_jax_distributed_system"):
        return pyconfig.initialize(
            [None, os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")],
            run_name="peer",
            base_output_directory="/nowhere",
            enable_checkpointing=False,
            log_config=False,
            jax_cache_dir="",
            decoder_block="mixtral",  # one of those with replayed routing
            base_emb_dim=sizes.width,
            base_mlp_dim=sizes.expert_width,
            base_moe_mlp_dim=sizes.expert_width,
            num_experts=num_experts,
            num_experts_per_tok=sizes.top_k,
            dtype="float32",
            weight_dtype="float32",
            ici_fsdp_parallelism=1,
            ici_expert_parallelism=-1,
            load_balance_loss_weight=0.0,
            sparse_matmul=True,
            megablox=False,
            wi_tile_fwd_batch_seq=1,
            **(ring if name.endswith("ring") else {}),
        )


def _product(lhs, rhs, group_sizes, preferred_element_type=None, **_):
    """Multiply groups of rows; MaxText's ring gives the sizes of all ranks' groups, beginning with the own ones."""
    return ragged_dot(lhs, rhs, group_sizes[: len(rhs)], preferred_element_type=preferred_element_type)


def _spread(shape: tuple[int, ...], ranks: int, num_experts: int) -> np.ndarray:
    """Return experts for positions without a token: those of a rank's positions in turn, as in MaxText."""
    return (np.arange(np.prod(shape)) % (np.prod(shape) // ranks) % num_experts).reshape(shape)


def _one_axis(mesh: Mesh, *names: str) -> Mesh:
    """Return a mesh with all devices along the first of the named axes."""
    devices = mesh.devices.reshape(-1, *[1] * (len(names) - 1))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _lanes(wanted: bool, lane: int) -> contextlib.AbstractContextManager[Any]:
    """Replace `jax.lax.ragged_all_to_all` by an all-to-all of equal lanes, if that is wanted."""

    def exchange(operand, output, input_start, sent, output_start, received, *, axis_name, **_):
        to_all = functools.partial(
            jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True
        )
        row = jnp.arange(lane)[None]
        lanes = operand.at[input_start[:, None] + row].get(mode="clip")
        lanes = jnp.where((row < sent[:, None])[..., None], lanes, 0)
        place = jnp.where(row < received[:, None], to_all(output_start)[:, None] + row, len(output))
        return output.at[place].set(to_all(lanes), mode="drop")

    return mock.patch.object(jax.lax, "ragged_all_to_all", exchange) if wanted else contextlib.nullcontext()


class _Changed:
    """A module with some other attributes."""

    def __init__(self, module, **others):
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name):
        return getattr(self._module, name)
