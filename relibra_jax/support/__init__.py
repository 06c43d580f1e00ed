"""Helpers that know nothing of experts: limits of numbers, suggestions for names, atomic writes, options."""
