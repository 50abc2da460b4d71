"""What the state of each head holds: measures of it, the models walked side by side, tables and pictures."""
