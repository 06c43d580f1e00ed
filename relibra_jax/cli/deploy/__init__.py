"""``relibra deploy``: attention and experts of a rollout on devices of their own, sized from recorded routing."""
