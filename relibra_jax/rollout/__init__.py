"""Readers of the routed experts that rollout engines and trainers record, into a `RoutingReplay` or into counts."""
