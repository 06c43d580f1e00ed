"""``relibra deploy``: sizes a rollout that serves attention and experts on separate devices, from recorded routing."""
