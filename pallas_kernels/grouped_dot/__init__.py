"""Products of rows in groups with a matrix for each group: three of them, several implementations (a file each)."""
