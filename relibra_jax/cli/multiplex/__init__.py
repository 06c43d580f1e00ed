"""``relibra multiplex``: jobs grouped to share pools, beside pools of their own, co-location and the optimum."""
