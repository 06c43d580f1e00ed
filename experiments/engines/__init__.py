"""Rollout engines: what samples the responses of a run, in its own process or in others."""
