"""The workloads W0 to W7 of Megatron-Core's imbalance benchmark as traces; each isolates one kind of uneven load.

Source: NVIDIA/Megatron-LM, pull request 7488, ``benchmarks/moe/token_imbalance``, as of September 2026. Its workloads
are rules for the experts of a token, given its number and the training step. A *hot* token draws its experts from a
small set, the others draw from all experts, and the experts of a token are different. Taken from there: hot sets of a
quarter of the experts, three hot tokens of four, the block that moves every third step, the burst in every fourth. Here
a *step* is a number of consecutive samples, and every layer follows the same rule with random draws of its own.

Three workloads follow their descriptions, because the available code does less. W1 and W2 share one hot block in that
code; here W1's experts are drawn, so they may be anywhere. W3 heats every second expert there, half as many as W2;
here it heats as many as W2. W4 draws like any uniform workload there; here the tokens of a step are unevenly spread
over its samples, each of which is on one rank.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.limits import check_integer, check_memory, check_seed
from relibra_jax.traces.trace import Trace, make_trace

STEPS_OF_A_HOTSPOT: Final = 3
"""The number of steps after which W6's hot block moves on."""
STEPS_OF_A_BURST: Final = 4
"""The number of steps in a period of W7; the last step is the burst."""


class Experts(NamedTuple):
    """The parameters of a hot set."""

    num_experts: int
    """E, the number of logical experts of a layer."""
    hot: int
    """The number of experts of a hot set."""
    seed: int
    """The seed of sets that are drawn at random."""


class Workload(NamedTuple):
    """One workload of the benchmark."""

    title: str
    """The kind of uneven load that the workload isolates."""
    pool: Callable[[int, Experts], Int[np.ndarray, " H"]] | None
    """``(step, experts) -> the experts from which hot tokens draw``. None assigns experts to tokens in round-robin
    order."""
    hot_quarters: int = 3
    """The number of hot tokens among four consecutive ones."""
    ragged: bool = False
    """True if the first sample of a step has a quarter of the step's tokens."""


def _all(_: int, experts: Experts) -> np.ndarray:
    return np.arange(experts.num_experts)


def _drawn_set(_: int, experts: Experts) -> np.ndarray:
    return np.random.default_rng(experts.seed).permutation(experts.num_experts)[: experts.hot]


def _first_block(_: int, experts: Experts) -> np.ndarray:
    return np.arange(experts.hot)


def _spread_set(_: int, experts: Experts) -> np.ndarray:
    return np.arange(experts.hot) * experts.num_experts // experts.hot


def _upper_half(_: int, experts: Experts) -> np.ndarray:
    return np.arange(experts.num_experts // 2, experts.num_experts)


def _moving_block(step: int, experts: Experts) -> np.ndarray:
    first = step // STEPS_OF_A_HOTSPOT * experts.hot
    return (first + np.arange(experts.hot)) % experts.num_experts


def _burst_block(step: int, experts: Experts) -> np.ndarray:
    burst = step % STEPS_OF_A_BURST == STEPS_OF_A_BURST - 1
    return _first_block(step, experts) if burst else _all(step, experts)


WORKLOADS: Final[dict[str, Workload]] = {
    "W0": Workload("balanced", None),
    "W1": Workload("hot expert set", _drawn_set),
    "W2": Workload("hot rank", _first_block),
    "W3": Workload("spread hot", _spread_set),
    "W4": Workload("source ragged", _all, ragged=True),
    "W5": Workload("rank without tokens", _upper_half, hot_quarters=4),
    "W6": Workload("rotating hotspot", _moving_block),
    "W7": Workload("burst", _burst_block, hot_quarters=2),
}
"""The workloads by their names in the benchmark."""


def imbalance_benchmark(
    name: str,
    *,
    steps: int = 24,
    samples_per_step: int = 32,
    tokens_per_sample: int = 64,
    layers: int = 4,
    num_experts: int = 32,
    top_k: int = 4,
    hot_experts: int | None = None,
    seed: int = 0,
) -> Trace:
    """Draw the trace of one workload.

    Args:
        name: the name of the workload, W0 to W7.
        steps: the number of steps. W6 repeats after ``3 E / hot_experts`` steps.
        samples_per_step: the number of consecutive samples of a step. Batches of that many samples are steps.
        tokens_per_sample: the mean number of tokens of a sample. All samples are equally long, except in W4.
        layers: L, the number of MoE layers.
        num_experts: E, the number of logical experts of a layer.
        top_k: K, the number of experts of a token.
        hot_experts: the number of experts of a hot set. In W2 they are the experts of one of ``E / hot_experts`` ranks
            under contiguous placement. None for a quarter of all experts, and at least K.
        seed: the seed of everything that is drawn.

    Returns:
        The trace, named for example "W3 spread hot". Its note says how it was drawn.

    Raises:
        ValueError: if the name is unknown, if a number is out of range, if hot tokens draw from fewer than K experts,
            or if the trace does not fit into the memory of this machine.

    >>> imbalance_benchmark("W3", steps=2).name
    'W3 spread hot'
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} must be one of {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    for argument, value in (("steps", steps), ("tokens_per_sample", tokens_per_sample), ("layers", layers)):
        check_integer(argument, value, least=1)
    check_integer("samples_per_step", samples_per_step, least=4 if workload.ragged else 1)
    check_integer("top_k", top_k, least=1, most=num_experts)
    hot = max(top_k, num_experts // 4) if hot_experts is None else hot_experts
    check_integer("hot_experts", hot, least=top_k, most=num_experts)
    check_seed("seed", seed)

    lengths = np.full(samples_per_step, tokens_per_sample)
    if workload.ragged:
        lengths = _ragged(samples_per_step, tokens_per_sample)
    step_mask = np.arange(lengths.max()) < lengths[:, None]
    sizes = f"{steps * samples_per_step} samples x {lengths.max()} tokens x {layers} layers"
    # The ids of all steps, and for one step a float32 key and an int64 index per expert.
    ids = steps * top_k * id_dtype(num_experts).itemsize
    check_memory(f"{name}: {sizes}", step_mask.size * layers * (ids + 12 * num_experts))
    rng, experts = np.random.default_rng(seed), Experts(num_experts, hot, seed)
    expert_ids = np.empty((steps, *step_mask.shape, layers, top_k), id_dtype(num_experts))
    for step in range(steps):
        if workload.pool is None:
            expert_ids[step] = _round_robin(step_mask, top_k, num_experts)[..., None, :]
            continue
        pool = np.isin(np.arange(num_experts), workload.pool(step, experts))
        if pool.sum() < top_k:
            raise ValueError(f"{name}: top-{top_k} needs more experts than the {pool.sum()} that get tokens")
        expert_ids[step] = _draw((*step_mask.shape, layers), pool, workload.hot_quarters, top_k, rng)
    replay = RoutingReplay(
        expert_ids.reshape(-1, *expert_ids.shape[2:]),
        np.tile(step_mask, (steps, 1)),
    )
    note = f"synthetic, after Megatron-LM's pull request 7488: {steps} steps of {samples_per_step} samples, seed {seed}"
    return make_trace(replay, num_experts, f"{name} {workload.title}", note, synthetic=True)


def _ragged(samples: int, mean: int) -> np.ndarray:
    """Return sample lengths: the first is a quarter of the sum, and the others differ by at most one token."""
    first = samples * mean // 4
    rest = np.diff(np.linspace(0, samples * mean - first, samples).astype(int))
    return np.append(first, rest)


def _round_robin(mask: Bool[np.ndarray, "b T"], top_k: int, num_experts: int) -> Int[np.ndarray, "b T K"]:
    """Give every token the next K experts, sample after sample."""
    number = np.cumsum(mask).reshape(mask.shape) - 1
    return (number[..., None] * top_k + np.arange(top_k)) % num_experts


def _draw(
    shape: tuple[int, int, int],
    pool: Bool[np.ndarray, " E"],
    hot_quarters: int,
    top_k: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, "b T L K"]:
    """Draw K different experts for every token of shape ``[b, T, L]``: from the pool for hot tokens, else from all."""
    hot_token = np.arange(shape[1]) % 4 < hot_quarters
    keys = rng.random((*shape, len(pool)), dtype=np.float32)
    # The keys of experts outside of the pool are larger than those of experts in it.
    keys += 2 * (hot_token[None, :, None, None] & ~pool)
    return np.argpartition(keys, top_k - 1, axis=-1)[..., :top_k]
