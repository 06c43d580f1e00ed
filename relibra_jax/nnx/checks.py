"""Checks around a batch: of the model and the replay before it is planned, and of the rows that experts computed."""

import contextlib
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.replay import check_arrays, check_replay
from relibra_jax.contract.types import EMPTY, Array, RoutingReplay, check_shape
from relibra_jax.execution.memory import in_host_memory, take, to_device
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_agreement import fail_together
from relibra_jax.execution.row_exchange import check_owners
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.batch_sequences import whole_array
from relibra_jax.nnx.homes import get_homes
from relibra_jax.nnx.prepared import PreparedBatch, by_group
from relibra_jax.nnx.variables import AXES, ExpertParam
from relibra_jax.planning.batch import Batch, check_routes
from relibra_jax.support.argument_types import checks_arguments


def check_finite(model: nnx.Module) -> None:
    """Raise unless all parameters are finite: steps with a wrong plan or another batch's sequences leave NaN in them.

    Args:
        model: any module.

    Raises:
        ValueError: if a parameter is not finite. The message has its name.
    """
    params = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    finite = jax.device_get(_all_finite([leaf for _, leaf in params]))
    for (path, _), is_finite in zip(params, finite, strict=True):
        if not is_finite:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"parameter {name} is not finite: an earlier step ran with sequences of another batch, without the mask"
                " of their padding, or with a wrong plan, or the training diverged; resume from an earlier checkpoint"
            )


@jax.jit
def _all_finite(leaves: list[Any]) -> list[jax.Array]:
    return [_by_layer(lambda part: jnp.isfinite(part).all(), leaf).all() for leaf in leaves]


def expert_marks(model: nnx.Module) -> Float[np.ndarray, "L E m"]:
    """Read some weights of every expert, by which it can be told from the others of its layer."""
    leaves, home = jax.tree.leaves(nnx.state(model, ExpertParam)), get_homes(model)
    marks = [whole_array(some).reshape(-1, home.shape[1], some.shape[-1]) for some in _some_weights(leaves)]
    return np.take_along_axis(np.concatenate(marks), home[..., None], 1)


@jax.jit
def _some_weights(leaves: list[Any]) -> list[jax.Array]:
    """Return a few weights of the gate of every expert, ``[*l, N, G, H, m]``."""

    def gates(experts: jax.Array) -> jax.Array:
        return experts[..., 0, :_SIDE, :_SIDE].astype(jnp.float32)

    few = [_by_layer(gates, leaf) for leaf in leaves]
    widths = [[(0, _SIDE - size) for size in some.shape[-2:]] for some in few]
    few = [jnp.pad(some, [(0, 0)] * (some.ndim - 2) + width) for some, width in zip(few, widths, strict=True)]
    return [some.reshape(*some.shape[:-2], -1) for some in few]


def _by_layer(function: Callable[[jax.Array], jax.Array], leaf: Any) -> jax.Array:
    """Apply a function to an array on the devices, layer by layer if it is of stacked experts in host memory."""
    if in_host_memory(leaf) and leaf.ndim > AXES:
        return jax.lax.map(lambda layer: function(take(leaf, layer)), jnp.arange(len(leaf)))
    return function(to_device(leaf))


_SIDE: Final = 8
"""The rows and columns of an expert's gate that are its mark."""


def check_experts_in_place(marks: Float[np.ndarray, "L E m"], marks_now: Float[np.ndarray, "L E m"]) -> None:
    """Raise unless every expert is nearer to what it was than to what another expert of its layer was.

    This finds parameters that were kept before experts moved, and put back afterwards: nothing else tells whose weights
    are in a home slot. It finds them if training has meanwhile changed the marks of an expert by less than a fifth of
    their difference from another expert's. Training that changes the marks by less than that between two batches raises
    no error. Parameters that are a mixture of two orders are not found.

    Args:
        marks: the marks of the model's experts when they last moved (`expert_marks`).
        marks_now: their marks now.

    Raises:
        ValueError: if the weights at an expert's home are another expert's.
    """
    pairs = zip(marks.astype(float), marks_now.astype(float), strict=True)
    for layer, (before, after) in enumerate(pairs):
        squares = (after**2).sum(-1)[:, None] + (before**2).sum(-1) - 2 * after @ before.T
        own, other = np.diagonal(squares), squares.argmin(-1)
        # Squares of distances: a quarter of the distance, and more than rounding.
        wrong = (16 * squares.min(-1) < own) & (own > 1e-9 * (before**2).sum(-1))
        if wrong.any():
            expert = int(wrong.argmax())
            raise ValueError(
                f"layer {layer}: the weights at the home of expert {expert} are those that expert {other[expert]} had"
                " when the last batch was prepared, so parameters were put back that belong to other homes: keep"
                " parameters with logical_params, and put them back with from_logical"
            )


def check_replay_layers(replay: RoutingReplay, *, num_experts: int, num_layers: int) -> None:
    """Raise ValueError unless a replay is valid and has the given numbers of experts and layers."""
    check_replay(replay, num_experts=num_experts)
    if not replay.mask.shape[1]:
        raise ValueError(f"expert_ids{list(replay.expert_ids.shape)} [B, T, L, K] has no token positions")
    if replay.expert_ids.shape[2] != num_layers:
        raise ValueError(
            f"the replay has {replay.expert_ids.shape[2]} MoE layers, but the Balancer has num_layers={num_layers}:"
            " record every MoE layer of the model, and set num_layers to their number"
        )


def check_counts(batch: Batch, routes: BatchRoutes | None, *, num_experts: int, num_layers: int) -> int:
    """Check the counts of a batch, and that its sampled routes and its routes, if there are any, belong to them.

    Args:
        batch: the counts of all samples.
        routes: the routes of the same samples, of which only shapes and lengths are read.
        num_experts: E, the number of logical experts of a layer.
        num_layers: L, the number of MoE layers of the model.

    Returns:
        K, the number of experts of a token.

    Raises:
        ValueError: if a shape is wrong, if the tokens of a sample do not all have the same number of copies in every
            layer, if the sampled routes cannot be of these samples, or if the replay has other samples, layers or
            lengths.
    """
    load, lengths = np.asarray(batch.sample_load), np.asarray(batch.lengths, np.int64)
    check_shape("counts.sample_load", load.shape, (len(lengths), num_layers, num_experts))
    if load.min(initial=0) < 0:
        place = tuple(np.argwhere(load < 0)[0].tolist())
        raise ValueError(
            f"counts.sample_load{list(place)} is {load[place]}, but a count must not be negative"
        )
    copies, tokens = load.sum(2, dtype=np.int64), int(lengths.sum())
    top_k = round(int(copies[:, 0].sum()) / max(tokens, 1))
    if (wrong := copies != top_k * lengths[:, None]).any():
        sample, layer = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"counts, sample {sample}, layer {layer}: {lengths[sample]} tokens with {copies[sample, layer]} token"
            f" copies, but the batch has {top_k} copies a token: sample_load and lengths are of different samples or"
            " layers"
        )
    check_routes(batch)
    if batch.routes is not None and batch.routes.expert_ids.shape[-1] != top_k:
        raise ValueError(
            f"counts.routes has {batch.routes.expert_ids.shape[-1]} experts a token, but its counts {top_k}"
        )
    if routes is not None:
        numbers = np.arange(len(lengths)) if routes.own is None else routes.own
        expected = (len(numbers), routes.num_tokens, num_layers, top_k)
        check_shape("replay.expert_ids", routes.replay.expert_ids.shape, expected)
        real = routes.replay.mask.sum(1)
        if (other := real != lengths[numbers]).any():
            row = int(other.argmax())
            raise ValueError(
                f"sample {numbers[row]}: counts of {lengths[numbers[row]]} tokens, but the replay has {real[row]} real"
                " tokens: they are of different samples"
            )
    return top_k


def check_batch_routes(
    routes: BatchRoutes, counts: Batch | None, *, num_experts: int, num_layers: int, aligned_left: bool
) -> None:
    """Raise ValueError unless the routes of a batch are valid, or belong to counts; on all processes if it is on one.

    Args:
        routes: the routes, whole or those of this process.
        counts: the counts of all samples; None if the routes are counted.
        num_experts, num_layers: the sizes of the model.
        aligned_left: whether the real tokens of every sample have to come first.
    """
    alone = routes.own is not None

    def together() -> contextlib.AbstractContextManager:
        return fail_together("checking the routes of a batch") if alone else contextlib.nullcontext()

    with together():
        check_arrays(routes.replay)
    num_samples = routes.num_samples()
    with together():
        if routes.own is not None:
            check_own(routes.own, routes.replay, num_samples)
        if counts is None:
            check_replay_layers(routes.replay, num_experts=num_experts, num_layers=num_layers)
        else:
            check_counts(counts, routes, num_experts=num_experts, num_layers=num_layers)
        if aligned_left:
            check_aligned_left(np.asarray(routes.replay.mask))
    if routes.own is not None:
        check_owners(routes.own, num_samples)


def check_own(own: Int[np.ndarray, " b"], replay: RoutingReplay, num_samples: int) -> None:
    """Raise ValueError unless this process's samples have different numbers of the batch, one for each."""
    if not np.issubdtype(own.dtype, np.integer) or own.shape != (len(replay.mask),):
        raise ValueError(
            f"own: expected integers [{len(replay.mask)}], one for each sample of the replay, not {own.dtype}"
            f"{list(own.shape)}"
        )
    if own.size and not 0 <= own.min() <= own.max() < num_samples:
        raise ValueError(
            f"own: samples {own.min()}..{own.max()} must be in 0..{num_samples - 1}: the processes have {num_samples}"
            " samples together"
        )


def check_plans_from_counts(parallel: ExpertParallel, top_k: int) -> None:
    """Raise ValueError if layers run in a way whose loads do not follow from the counts of samples."""
    if parallel.split_sequences:
        raise ValueError(
            f"counts alone do not say which of {parallel.topology.ranks_per_node} ranks of a node holds a token of"
            " split sequences: pass the replay too, or set sequences='packed'"
        )
    if parallel.with_striping(top_k).is_striped:
        raise ValueError(
            f"counts alone do not say which of {parallel.topology.ranks_per_node} ranks of a node dispatches a token of"
            " striped layers: pass the replay too, or set ExpertParallel(striped=False)"
        )
    if parallel.pieces > 1:
        raise ValueError(
            f"counts alone do not say which of pieces={parallel.pieces} a token travels in: pass the replay too, or set"
            " ExpertParallel(pieces=1)"
        )


def check_model_homes(model: nnx.Module, expected_home: Int[np.ndarray, "L E"]) -> None:
    """Raise ValueError unless a model's experts are in the home slots that the balancer expects."""
    home = get_homes(model)
    if home.shape != expected_home.shape:
        raise ValueError(
            f"the model has {home.shape[0]} MoE layers with {home.shape[1]} experts, but the Balancer has"
            f" {expected_home.shape[0]} with {expected_home.shape[1]}: give it the model's num_layers and topology"
        )
    if (home == EMPTY).any():
        raise ValueError(
            "the model has lost experts when they moved: restore model, optimizer and balancer from a checkpoint"
        )
    if (home != expected_home).any():
        layer, expert = np.argwhere(home != expected_home)[0].tolist()
        raise ValueError(
            f"layer {layer}, expert {expert}: the model has it in home slot {home[layer, expert]}, but the balancer"
            f" expects it in home slot {expected_home[layer, expert]}, where its optimizer state is; restore model and"
            " balancer together (restore_training), move experts back that another balancer moved"
            " (reorder_experts(model, None, balancer.state.home)), or undo a set_homes"
        )


def check_aligned_left(mask: Bool[np.ndarray, "B T"]) -> None:
    """Raise ValueError unless the real tokens of every sample come first."""
    gaps = mask[:, 1:] & ~mask[:, :-1]
    if gaps.any():
        sample, token = np.argwhere(gaps)[0].tolist()
        raise ValueError(
            f"sample {sample}: token {token + 1} is real, but token {token} before it is padding;"
            " samples must be aligned to the left with sequences='packed' or 'split'"
        )


@checks_arguments
def check_executed(slot_rows: Int[Array, "M L *data N G S"], batch: PreparedBatch) -> None:
    """Raise unless every slot computed exactly the number of rows in its quota. Runs on the host.

    If there are several processes, every process must call it.

    Args:
        slot_rows: the ``slot_rows`` of the layers' outputs (`relibra_jax.nnx.MoEOutput`), for all micro-batches and
            layers. With ``ExpertParallel(check_rows=True)`` the receiving ranks have counted them. Otherwise they are
            copied from the plan, and this check always passes.
        batch: the batch, prepared from a replay, that the layers executed.

    Raises:
        ValueError: if ``slot_rows`` has a different shape than the plan.
        RuntimeError: if a slot computed a different number of rows than its quota. The message has the first such slot.
    """
    plan = batch.batch_plan.plan
    quota, expert = map(np.asarray, by_group((plan.quota, plan.slot_expert), batch.parallel))
    rows = whole_array(slot_rows)
    if rows.shape != quota.shape:
        raise ValueError(f"slot_rows: expected shape {quota.shape}, found {rows.shape}")
    if (rows != quota).any():
        place = tuple(np.argwhere(rows != quota)[0].tolist())
        axes = ("micro-batch", "layer", *batch.parallel.data_axes, "node", "rank", "slot")
        where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
        raise RuntimeError(
            f"{where}: expert {expert[place]} computed {rows[place]} rows, but the plan's quota is {quota[place]}"
        )
