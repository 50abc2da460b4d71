"""What is compared, on what, and what it is called."""

VARIANTS = {
    "gdn": "Gated DeltaNet",
    "qdelta": "Q-Delta, lambda learned",
    "delta-net": "DeltaNet",
    "qdelta-no-decay": "Q-Delta without decay",
    "qdelta-0.2": "Q-Delta, lambda = 0.2",
    "qdelta-0.5": "Q-Delta, lambda = 0.5",
    "qdelta-0.8": "Q-Delta, lambda = 0.8",
    "qdelta-no-gate": "Q-Delta, lambda = 1 (no gate)",
}
"""The recipes `train/small-NAME`, in order of priority, and what they are called in a table."""
FEEDBACK = tuple(name for name in VARIANTS if name.startswith("qdelta"))
"""Those that are Q-Deltas."""
BASE = "gdn"
"""What differences are taken from."""
LENGTHS = (512, 1024, 2048, 4096)
TRAINED_LENGTH = 1024
BATCH = 16_384
"""Tokens of a training step."""
OPTIMIZERS = ("adamw", "muon")
OPTIMIZER = "muon"
RATE = 0.003
"""The largest learning rate, that of the recipes."""
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
"""RULER's names of S-NIAH-1, -2 and -3."""
PROMPTS = (2048, 4096, 8192, 16384)
"""Tokens of prompts whose throughput is measured."""
UNTRAINED = {"base": "unpruned, as it is", "sliced": "pruned, not recovered"}
TRAINED = {
    "control": "unpruned, trained alike",
    "plain": "recovered",
    "feedback": "recovered with query feedback",
    "control-feedback": "unpruned, trained alike with query feedback",
}
"""What may become of a model in the study of recovery."""
