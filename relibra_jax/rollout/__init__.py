"""Readers of the routed experts that rollout engines and trainers record, into a `RoutingReplay` or into counts."""

from relibra_jax.rollout.counts import sample_counts
from relibra_jax.rollout.ingest import replay_from_rollout
from relibra_jax.rollout.layouts import LAYOUTS

__all__ = ["LAYOUTS", "replay_from_rollout", "sample_counts"]
