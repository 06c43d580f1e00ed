"""Predictors of the experts of tokens, for systems without replay: how often each is right, and the loads it expects.

MoE-GPS (arXiv 2506.07366) compares the distribution of earlier data, which predicts no token and costs nothing, with
predictors of the experts of every token: tables conditional on something, and networks, which are the more accurate the
more they cost. Tables are counted on the batch before. They predict for a token the K likeliest experts, which gives
the accuracy, and spread its load by the shares of all experts, which gives the expected loads. A network is simulated:
it has the accuracy that is asked for.

All predictors get the same planner, EPLB, and the same homes: those of the first batch, whose true loads are known when
it has run. So they differ in their replicas alone. If there is only one batch, homes come from its own predictions.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer, Num

from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.evaluation.batches import Batches
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.transitions import count_transitions

_FROM_PREDICTIONS: Final = dataclasses.replace(PLANNERS["eplb"], foresight=False)
_FROM_LAYER_BELOW: Final = dataclasses.replace(
    _FROM_PREDICTIONS, planner=eplb(loads="across_layers", keep_homes=True), forecast="across_layers"
)


class Network(NamedTuple):
    """A network that predicts the experts of every token before the batch runs."""

    accuracy: float
    """The share of token copies that it predicts right, from 0 to 1."""
    cost: float
    """The time of its forward pass, as a share of that of the products of a layer."""


class Predictor(NamedTuple):
    """A way to know the loads of a batch. All but the first one plan by EPLB's rule."""

    name: str
    """What it knows."""
    entry: PlannerEntry
    """The planner, with the forecast that it plans from."""
    accuracy: float | None
    """The share of token copies that are predicted right, in the measured batches; None if nothing is predicted."""
    predicted: list[Num[np.ndarray, "B L E"]] | None = None
    """The expected loads of the samples of every batch; None if the planner's forecast gives the loads."""
    cost: float = 0.0
    """The time of its forward pass, as a share of that of the products of a layer."""
    bytes_per_token: int = 0
    """What has to be sent to the ranks for each token."""


class Prediction(NamedTuple):
    """The predictions for the tokens of one batch."""

    right: int
    """The number of token copies that are predicted right."""
    load: Float[np.ndarray, "B L E"]
    """The expected load of each sample."""


def make_predictors(
    batches: Batches, networks: Sequence[Network], *, num_experts: int, seed: int
) -> tuple[list[Predictor], dict[str, str]]:
    """Make all predictors: none, the last batch, tables, networks and replay, in this order.

    Args:
        batches: the batches, of which the first only gives a history if there are several.
        networks: the networks to simulate.
        num_experts: E, the number of logical experts of a layer.
        seed: the seed of the networks' errors. All networks draw the same numbers, so a less accurate one is wrong
            wherever a more accurate one is.

    Returns:
        The predictors; and the name of each predictor that is not available, with the reason.
    """
    replays = [RoutingReplay(*map(np.asarray, replay)) for replay in batches.replays]
    measured = replays[batches.history :]
    ids = replays[0].expert_ids
    copies = sum(int(replay.mask.sum()) for replay in measured) * int(np.prod(ids.shape[2:]))
    shares = [load_shares(replay, num_experts) for replay in replays]
    true = [np.asarray(sample_load(replay, num_experts=num_experts)) for replay in replays]
    made, missing = [Predictor("none", PLANNERS["static"], None)], {}

    def table(keys: list[Integer[np.ndarray, "B T"]]) -> tuple[float, list[Num[np.ndarray, "B L E"]]]:
        """Return the accuracy of a table, and the loads that it expects."""
        pairs = itertools.pairwise(zip(replays, keys, strict=True))
        after = [predict_by_key(*before, *now, num_experts=num_experts) for before, now in pairs]
        return sum(each.right for each in after) / copies, [true[0], *(each.load for each in after)]

    if batches.history:
        accuracy, _ = table([np.zeros(replay.mask.shape, np.int32) for replay in replays])
        made.append(Predictor("the last batch", PLANNERS["eplb_history"], accuracy))
        positions = [np.cumsum(replay.mask, axis=1) for replay in replays]
        made.append(Predictor("a table by position", _FROM_PREDICTIONS, *table(positions)))
        if batches.token_ids is not None:
            made.append(Predictor("a table by token", _FROM_PREDICTIONS, *table(batches.token_ids)))
        else:
            missing["a table by token"] = "the trace has no token_ids"
        right = sum(map(count_right_by_layer_below, replays, measured, shares))
        made.append(Predictor("a table by layer below", _FROM_LAYER_BELOW, right / copies))
    else:
        missing["the last batch, and tables"] = "there is no batch before; use a smaller batch_size"
    popularity = shares[: len(measured)]  # in the batch before, or in the only batch
    for network in networks:
        predicted = [
            mispredict(replay, share, network.accuracy, seed=seed)
            for replay, share in zip(measured, popularity, strict=True)
        ]
        right = sum(map(_count_equal, measured, predicted))
        loads = [np.asarray(sample_load(replay, num_experts=num_experts)) for replay in predicted]
        loads = [*true[: batches.history], *loads]
        name = f"a network, {network.accuracy:.0%}"
        made.append(Predictor(name, _FROM_PREDICTIONS, right / copies, loads, cost=network.cost))
    sent = ids.itemsize * int(np.prod(ids.shape[2:]))
    made.append(Predictor("replay", PLANNERS["eplb"], 1.0, bytes_per_token=sent))
    return made, missing


def load_shares(replay: RoutingReplay, num_experts: int) -> Float[np.ndarray, "L E"]:
    """Return the share of each expert in the load of its layer; equal shares if there are no tokens."""
    load = np.asarray(sample_load(replay, num_experts=num_experts)).sum(0, dtype=np.int64)
    total = load.sum(-1, keepdims=True)
    return np.where(total > 0, load / np.maximum(total, 1), 1 / num_experts)


def mispredict(
    replay: RoutingReplay, share: Float[np.ndarray, "L E"], accuracy: float, *, seed: int
) -> RoutingReplay:
    """Simulate a predictor: replace the experts of some token copies by experts drawn by popularity.

    A drawn expert may be the true one by chance, so more copies are drawn than are to be wrong. No accuracy is below
    that of chance.

    Args:
        replay: the true routing.
        share: the popularity of the experts by which they are drawn, summing to 1 in each layer.
        accuracy: the expected share of token copies that keep their expert, from 0 to 1.
        seed: the seed of the draw.

    Returns:
        The predicted routing. A token may have an expert twice, so that only its loads have a meaning.

    >>> replay = RoutingReplay(np.zeros((1, 4, 1, 1), np.uint8), np.ones((1, 4), bool))
    >>> mispredict(replay, np.array([[0.0, 1.0]]), 0.0, seed=0).expert_ids.ravel().tolist()
    [1, 1, 1, 1]
    """
    ids, mask = np.array(replay.expert_ids), np.asarray(replay.mask)
    rows, rng = ids[mask], np.random.default_rng(seed)
    for layer in range(rows.shape[1]):
        true = rows[:, layer]
        by_chance = float(share[layer][true].mean()) if true.size else 0.0
        drawn = rng.random(true.shape) < min(1.0, (1 - accuracy) / max(1 - by_chance, 1e-9))
        upto = np.cumsum(share[layer])
        expert = np.searchsorted(upto / upto[-1], rng.random(true.shape), side="right")
        rows[:, layer] = np.where(drawn, expert, true)
    ids[mask] = rows
    return RoutingReplay(ids, mask)


def predict_by_key(
    before: RoutingReplay,
    keys_before: Integer[np.ndarray, "B T"],
    now: RoutingReplay,
    keys: Integer[np.ndarray, "b t"],
    *,
    num_experts: int,
) -> Prediction:
    """Predict experts from a table: of tokens with the same key in the batch before, how many used each expert.

    Tokens with a key that the batch before does not have are predicted from all its tokens.

    Args:
        before: the routing of the batch before.
        keys_before: what is known of each of its tokens, for example its position.
        now: the routing of the batch; its experts are only read to count which predictions are right.
        keys: what is known of each of its tokens.
        num_experts: E, the number of logical experts of a layer.

    >>> replay = RoutingReplay(np.array([[[[0]], [[1]], [[1]]]]), np.ones((1, 3), bool))
    >>> keys = np.array([[7, 7, 8]])
    >>> prediction = predict_by_key(replay, np.array([[7, 8, 8]]), replay, keys, num_experts=2)
    >>> prediction.right, prediction.load.tolist()  # tokens with key 7 went to expert 0, with key 8 to expert 1
    (2, [[[2.0, 1.0]]])
    """
    rows, true = _rows(before), _rows(now)
    top_k = true.shape[2]
    known, row_of = np.unique(keys_before[before.mask], return_inverse=True)
    asked, unknown = keys[now.mask], len(known)
    row = np.searchsorted(known, asked)
    row = np.where(np.append(known, 0)[row] == asked, row, unknown)
    tokens = np.zeros((len(now.mask), unknown + 1), np.float32)
    np.add.at(tokens, (np.nonzero(now.mask)[0], row), 1)
    load = np.zeros((len(now.mask), true.shape[1], num_experts), np.float32)
    right = 0
    for layer in range(true.shape[1]):
        counts = np.zeros((unknown + 1, num_experts), np.float32)
        np.add.at(counts, (row_of[:, None], rows[:, layer]), 1)
        counts[unknown] = counts.sum(0)
        load[:, layer] = top_k * tokens @ (counts / np.maximum(counts.sum(-1, keepdims=True), 1))
        right += _count_among(true[:, layer], _likeliest(counts, top_k)[row])
    return Prediction(right, load)


def count_right_by_layer_below(
    before: RoutingReplay, now: RoutingReplay, share: Float[np.ndarray, "L E"]
) -> int:
    """Count the token copies that the transitions from the layer below predict right, as PopFetcher predicts loads.

    A token is predicted from the sum of the transition chances of its K experts in the layer below; in the first layer,
    and from experts without transitions, by popularity.

    Args:
        before: the routing of the batch before, whose transitions are counted.
        now: the routing of the batch.
        share: the popularity of the experts in the batch before.
    """
    counts = np.asarray(count_transitions(before, num_experts=share.shape[1]).across_layers)
    true = _rows(now)
    top_k = true.shape[2]
    right = _count_among(true[:, 0], _likeliest(share[:1], top_k))
    for layer in range(1, true.shape[1]):
        total = counts[layer].sum(-1, keepdims=True)
        chance = np.where(total > 0, counts[layer] / np.maximum(total, 1), share[layer])
        right += _count_among(true[:, layer], _likeliest(chance[true[:, layer - 1]].sum(1), top_k))
    return right


def _rows(replay: RoutingReplay) -> Integer[np.ndarray, "Q L K"]:
    """Return the experts of the real tokens."""
    return np.asarray(replay.expert_ids)[np.asarray(replay.mask)]


def _likeliest(chance: Float[np.ndarray, "Q E"], top_k: int) -> Int[np.ndarray, "Q K"]:
    return np.argsort(-chance, axis=-1, kind="stable")[:, :top_k]


def _count_among(true: Integer[np.ndarray, "Q K"], predicted: Integer[np.ndarray, "#Q K"]) -> int:
    """Count the token copies whose expert is among those that are predicted for the token."""
    return int((true[:, :, None] == predicted[:, None, :]).any(-1).sum())


def _count_equal(true: RoutingReplay, predicted: RoutingReplay) -> int:
    return int((_rows(true) == _rows(predicted)).sum())
