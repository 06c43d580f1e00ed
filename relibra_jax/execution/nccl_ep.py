"""The way of tokens with ``exchange="nccl_ep"``: dispatch and combine by NCCL EP, through TransformerEngine.

NCCL EP (https://github.com/NVIDIA/nccl-extensions, folder nccl_ep) sends a token once to every node and rank that
serve it, copies it there to the rows of its experts, and sums results in the same places on the way back. Its experts
are the slots of a plan: slot ``s`` of rank ``r`` has number ``r * S + s``. So NCCL EP needs only the slot of each token
copy, whether the plan puts a home, a resident or a replica there, and delivers rows grouped by slot.

TransformerEngine has four operations for it: dispatch with gates, combine without, and their transposes. They are what
`relibra_jax.execution.dispatch.send_tokens` and ``return_tokens`` do, so that layers, gradients and `jax.checkpoint`
are the same as with other exchanges. The public functions ``ep_dispatch`` and ``ep_combine`` work on arrays of all
ranks, with one mesh axis of ranks. A layer runs on one rank, inside shard_map, on a mesh with two such axes. So it
calls what the partitioning of these functions calls on every rank: ``EpDispatchPrimitive.impl`` and so on.

The package builds against CUDA, so the tests use a stand-in with the same signatures. The signatures are recorded from
its source (`COMMIT`), and compared with those of the installed package.
"""

import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.mesh import RANKS, vary_over, varying_axes
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.support.argument_types import checks_arguments

COMMIT: Final = "d0067d0da6cb01811b8072a7d304f0e00344ce2b"
"""The commit of https://github.com/NVIDIA/TransformerEngine from which the signatures are recorded."""
OPERATIONS: Final = "transformer_engine.jax.cpp_extensions.ep"
BOOTSTRAP: Final = "transformer_engine.jax.ep"
_CONFIG: Final = "top_k dispatch_output_per_expert_alignment"
SIGNATURES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        OPERATIONS: {
            "EpPreparePrimitive.impl": f"topk_idx {_CONFIG} is_outer",
            "EpDispatchPrimitive.impl": (
                f"handle_mem topk_idx tokens topk_weights {_CONFIG} recv_capacity_per_rank is_outer"
            ),
            "EpCombinePrimitive.impl": f"handle_mem expert_out {_CONFIG} out_leading_shape out_partition_spec",
            "EpDispatchBwdPrimitive.impl": (
                f"handle_mem grad g_recv_topk_weights {_CONFIG} out_leading_shape out_partition_spec"
            ),
            "EpCombineBwdPrimitive.impl": f"handle_mem grad {_CONFIG} recv_capacity_per_rank is_outer",
            "get_ep_config": "",
            "_on_collective_stream": "func",
        },
        BOOTSTRAP: {
            "ep_bootstrap": (
                "world_size rank num_experts max_tokens_per_rank recv_capacity_per_rank hidden_dim max_token_dtype"
                " max_num_sms drop_on_overflow"
            ),
            "ep_finalize": "",
        },
    }
)
"""The parameter names of every function of TransformerEngine that is used, by module and name."""
ALIGNMENT: Final = 0
"""Rows of slots follow each other without padding."""


class SlotDispatch(NamedTuple):
    """The tables of one piece of a rank's tokens."""

    slot: Int[jax.Array, "*stack t K"]
    """The flat slot that serves each token copy; EMPTY for no copy."""
    group_sizes: Int[jax.Array, "*stack S"]
    """The number of rows of each slot of this rank."""
    routing: Any = None
    """NCCL EP's own tables, which one pass of a layer makes and uses (`with_routing`)."""


def make_slot_dispatch(
    slot: Int[jax.Array, "t K"], received: Int[jax.Array, "P S"], *, rows: int
) -> tuple[SlotDispatch, Bool[jax.Array, ""]]:
    """Compute the tables of a rank from the slots of its token copies.

    Args:
        slot: the flat slot that serves each copy (`relibra_jax.routing.slots.copy_slots`); EMPTY for no copy.
        received: the number of copies for each slot of every rank, equal on all ranks.
        rows: the number of rows that a rank computes.

    Returns:
        The tables, and whether ``rows`` suffices. If it does not, no row moves: NCCL EP would end the process.
    """
    fits = received.sum(1).max() <= rows
    return SlotDispatch(jnp.where(fits, slot, EMPTY), received[jax.lax.axis_index(RANKS)]), fits


def with_routing(tables: SlotDispatch, tokens: Float[jax.Array, "t D"], rows: int) -> SlotDispatch:
    """Return the tables with NCCL EP's own, which all ranks make together: one small all-gather.

    Every pass of a layer makes them again. They are the state of one pass: XLA may move what is kept between passes,
    and NCCL EP knows them by their address.

    Args:
        tables: the tables of a rank.
        tokens: the tokens of this rank, or the gradients of its outputs.
        rows: the number of rows that a rank computes.

    Raises:
        ValueError: if the tokens are not bfloat16, NCCL EP is not started or for smaller layers only, or the installed
            package has other signatures than the recorded ones.
    """
    operations, slots = load(OPERATIONS), tables.group_sizes.shape[-1]
    if tokens.dtype != jnp.bfloat16:
        raise ValueError(f"exchange='nccl_ep' sends bfloat16, but the tokens are {tokens.dtype}")
    need = Sizes(slots=slots, tokens=len(tokens), rows=rows, width=tokens.shape[1])
    have = _started(operations)
    if have is None:
        raise ValueError(
            "exchange='nccl_ep' is not started: call start_nccl_ep in every process before the first step"
        )
    if not have.suffice(need):
        raise ValueError(
            f"exchange='nccl_ep' was started for {have}, but a layer needs {need}: call start_nccl_ep again"
        )
    number = jnp.where(tables.slot == EMPTY, EMPTY, tables.slot // slots * have.slots + tables.slot % slots)
    *_, routing = _run("Prepare", number, number.shape[-1], ALIGNMENT, False, like=tokens)
    return tables._replace(slot=number, routing=routing)


def send_to_slots(
    tokens: Float[jax.Array, "t D"], gates: Float[jax.Array, "t K"] | None, tables: SlotDispatch, rows: int
) -> tuple[Float[jax.Array, "rows D"], Float[jax.Array, " rows"] | None]:
    """Copy tokens and gates to the rows of this rank's slots. What follows the last slot's rows may have any value.

    Args:
        tokens: the tokens of this rank, or the gradients of its outputs.
        gates: the gate of each copy; None sends no gates.
        tables: the tables, with routing.
        rows: the number of rows that a rank computes.
    """
    routing, top_k = tables.routing, tables.slot.shape[-1]
    if gates is None:
        sent = _run("CombineBwd", routing, tokens, top_k, ALIGNMENT, rows, False, like=tokens)
        return sent[0], None
    wide = gates.astype(jnp.float32)
    sent, scales = _run(
        "Dispatch", routing, tables.slot, tokens, wide, top_k, ALIGNMENT, rows, False, like=tokens
    )
    return sent[0], scales[0].astype(gates.dtype)


def return_from_slots(
    rows: Float[jax.Array, "rows D"], scales: Float[jax.Array, " rows"] | None, tables: SlotDispatch
) -> tuple[Float[jax.Array, "t D"], Float[jax.Array, "t K"] | None]:
    """Sum the rows of each token in float32, and return the values of its copies: the transpose of `send_to_slots`.

    Args:
        rows: the values of this rank's rows.
        scales: a value for each row; None returns none.
        tables: the tables, with routing.
    """
    routing, (tokens, top_k) = tables.routing, tables.slot.shape
    if scales is None:
        sums = _run("Combine", routing, rows[None], top_k, ALIGNMENT, (tokens,), None, like=rows)
        return sums, None
    wide = scales[None].astype(jnp.float32)
    sums, gates = _run("DispatchBwd", routing, rows[None], wide, top_k, ALIGNMENT, (tokens,), None, like=rows)
    return sums, gates.astype(scales.dtype)


class Sizes(NamedTuple):
    """The sizes of a layer that NCCL EP's buffers depend on."""

    slots: int
    """S, the number of slots of a rank."""
    tokens: int
    """The number of tokens that a rank dispatches."""
    rows: int
    """The number of rows that a rank computes."""
    width: int
    """D."""

    def suffice(self, need: "Sizes") -> bool:
        """Return whether every size is at least that of ``need``."""
        return all(size >= least for size, least in zip(self, need, strict=True))

    def __str__(self) -> str:
        return f"{self.slots} slots, {self.tokens} tokens and {self.rows} rows a rank, and width {self.width}"


@checks_arguments
def start_nccl_ep(parallel: ExpertParallel, *, tokens: int, top_k: int, width: int) -> None:
    """Start NCCL EP for layers with ``exchange="nccl_ep"``, in every process and before the first step is traced.

    It allocates buffers for the sizes of ``parallel``, and works for layers that need less. For larger ones it is
    called again: it then frees the old buffers, and clears JAX's caches of compiled programs.

    Args:
        parallel: the mesh, topology and buffer sizes with which layers execute plans.
        tokens: the number of tokens of a rank in a micro-batch.
        top_k: K, the number of experts of a token. TransformerEngine allows one number in a process.
        width: D, the width of tokens.

    Raises:
        ValueError: if D is not a multiple of 8, the slots of a node are not a multiple of 4, or the installed package
            has other signatures than the recorded ones.
    """
    topology, (_, rows) = parallel.topology, parallel.token_exchanges(tokens, top_k)
    if width % 8:
        raise ValueError(f"exchange='nccl_ep' needs a width that is a multiple of 8, found {width}")
    if topology.ranks_per_node * topology.slots % 4:
        raise ValueError(
            f"exchange='nccl_ep' needs a multiple of 4 slots in a node, found {topology.ranks_per_node} ranks with"
            f" {topology.slots} slots each"
        )
    need, have = Sizes(topology.slots, tokens, max(rows, tokens), width), _started(load(OPERATIONS))
    bootstrap = load(BOOTSTRAP)
    if have is not None:
        if have.suffice(need):
            return
        need = Sizes(*map(max, need, have))
        bootstrap.ep_finalize()
    # TransformerEngine knows one axis of ranks. It reads the place of this process from the mesh, and nothing else.
    sharding = importlib.import_module("transformer_engine.jax.sharding")
    mesh = Mesh(parallel.mesh.devices.reshape(-1, topology.num_ranks), ("groups", "ranks"))
    with mesh, sharding.global_shard_guard(sharding.MeshResource(dp_resource="groups", ep_resource="ranks")):
        bootstrap.ep_bootstrap(
            world_size=mesh.size,
            rank=jax.process_index(),
            num_experts=topology.num_ranks * need.slots,
            max_tokens_per_rank=need.tokens,
            recv_capacity_per_rank=need.rows,
            hidden_dim=need.width,
        )


def _started(operations: Any) -> Sizes | None:
    """Return the sizes for which NCCL EP was started in this process; None if it was not."""
    try:
        config = operations.get_ep_config()
    except RuntimeError:
        return None
    return Sizes(
        slots=config.num_local_experts,
        tokens=config.max_tokens_per_rank,
        rows=config.recv_capacity_per_rank,
        width=config.hidden_dim,
    )


def load(name: str) -> Any:
    """Import a module of TransformerEngine, and compare the signatures that are used with the recorded ones."""
    module = importlib.import_module(name)
    for function, recorded in SIGNATURES[name].items():
        value: Any = module
        for part in function.split("."):
            value = getattr(value, part, None)
        found = "nothing" if value is None else " ".join(inspect.signature(value).parameters)
        if found != recorded:
            raise ValueError(
                f"exchange='nccl_ep': {name}.{function} has the parameters ({found}), but ({recorded}) in the recorded"
                f" commit {COMMIT[:8]} of TransformerEngine"
            )
    return module


def _run(name: str, *arguments: Any, like: jax.Array) -> Any:
    """Run an operation where collectives run, in one order with them, as TransformerEngine does.

    Its results do not say that they differ between ranks: they are marked as ``like`` is.
    """
    operations = load(OPERATIONS)
    impl = getattr(operations, f"Ep{name}Primitive").impl
    results = operations._on_collective_stream(lambda: impl(*arguments))()
    return jax.tree.map(lambda array: vary_over(array, varying_axes(like)), results)
