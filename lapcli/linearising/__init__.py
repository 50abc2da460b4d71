"""How attention layers become dual-state layers: their order, where training begins, what it minimises."""
