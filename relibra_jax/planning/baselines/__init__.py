"""The planners of other systems, each from its source, in our contract. A file says what it leaves out and why."""
