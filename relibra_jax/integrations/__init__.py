"""Plans in trainers that are not ours, a module or a folder each."""
