"""Training that heals a pruned model."""
