"""Traces: recorded and synthetic routing replays to plan for, and statistics of them."""
