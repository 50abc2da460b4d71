"""Sweeps: the cells of a grid, what is known of each, and the processes that work on them. The stage is `sweeping`."""
