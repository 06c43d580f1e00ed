"""Traces (routing replays to plan for): recorded and synthetic ones, and statistics of them."""
