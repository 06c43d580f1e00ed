"""``relibra advise``: which strategy pays on a trace, and from which size and which skew any does."""
