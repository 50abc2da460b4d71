"""What the study compares: ways to convert a model, fractions of its layers, tasks."""

ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dual": ("two states, in order of entropy", ()),
    "one": ("one state", ("--states", "1")),
    "wide": ("one state of equal memory (twice the key width)", ("--states", "1", "--width", "2")),
    "window": ("window and sinks of equal memory", ("--window", "equal")),
    "first": ("two states, layers as they lie", ("--sensitivity", "first")),
    "loss": ("two states, in order of loss", ("--sensitivity", "loss")),
    "no-penalty": ("two states, no penalty on like gates", ("--penalty", "0")),
    "random": ("two states, gates from a random start", ("--start", "random")),
    "independent": ("two states, layers trained by themselves", ("--independent",)),
    "four": ("four states", ("--states", "4")),
    "eight": ("eight states", ("--states", "8")),
    "outlier": ("two states, in order of outliers", ("--sensitivity", "outlier")),
}
"""What each is called, and the options of `lapcli convert` that make it; the most telling first."""
TEACHER = "teacher"
BASE = "dual"
FRACTIONS = ("0.125", "0.25", "0.375", "0.5", "0.75", "1")
TASKS = ("wikitext", "lambada", "zeroshot", "niah")
NEEDLES = (1024, 2048, 4096)
"""Tokens of the prompts of `niah`."""
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Of sequences whose keys, values and states are counted."""
CONVERSION = "dsla"
"""What a line is of."""
KEYS = ("digest", "arm", "fraction", "seed", "steps", "batch", "seq_len", "text")
"""What tells a line from others; of two with the same key the later one counts."""
BUDGET = ("digest", "steps", "batch", "seq_len", "text", "limit")
"""What lines must agree in to be compared."""
