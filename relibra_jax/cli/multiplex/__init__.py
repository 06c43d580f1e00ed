"""``relibra multiplex``: jobs grouped to share pools, compared with pools of their own, co-location and the optimum."""
