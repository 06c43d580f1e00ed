"""Experiments: run planners over traces, draw what they do, time them. Not part of the installed packages."""
