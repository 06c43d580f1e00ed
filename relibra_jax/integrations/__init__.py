"""Integrations that apply plans in other trainers, with one module or folder for each trainer."""
