"""Two real processes as two nodes: what an update takes and what crosses between them, under every contender."""
