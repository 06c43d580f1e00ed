"""``relibra advise``: which balancing strategy pays on a trace, and from which micro-batch size and skew on."""
