"""Routing replay to plan for: recorded traces, synthetic ones, and what they look like."""
