"""Planning: pure functions from loads to plans. Nothing here knows of devices or of execution."""
