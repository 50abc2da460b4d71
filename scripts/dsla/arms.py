"""What the study compares: ways to convert a model, fractions of its layers, tasks."""

from studies.lines import Lines

_ENTROPY, _LOSS = ("--sensitivity", "entropy"), ("--sensitivity", "loss")
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("two states, in order of loss", _LOSS),
    "dual": ("two states, in order of entropy", _ENTROPY),
    "loss-one": ("one state, in order of loss", ("--states", "1", *_LOSS)),
    "loss-wide": ("one state of equal memory, in order of loss", ("--states", "1", "--width", "2", *_LOSS)),
    "loss-window": ("window and sinks of equal memory, in order of loss", ("--window", "equal", *_LOSS)),
    "first": ("two states, layers as they lie", ("--sensitivity", "first")),
    "one": ("one state, in order of entropy", ("--states", "1", *_ENTROPY)),
    "wide": ("one state of equal memory, in order of entropy", ("--states", "1", "--width", "2", *_ENTROPY)),
    "window": ("window and sinks of equal memory, in order of entropy", ("--window", "equal", *_ENTROPY)),
    "no-penalty": ("two states, in order of loss, no penalty on like gates", ("--penalty", "0", *_LOSS)),
    "random": ("two states, in order of loss, gates from a random start", ("--start", "random", *_LOSS)),
    "independent": ("two states, in order of loss, layers trained by themselves", ("--independent", *_LOSS)),
    "four": ("four states, in order of loss", ("--states", "4", *_LOSS)),
    "eight": ("eight states, in order of loss", ("--states", "8", *_LOSS)),
    "outlier": ("two states, in order of outliers", ("--sensitivity", "outlier")),
}
"""What each is called, and the options of `lapcli convert` that make it; the most telling first."""
TEACHER = "teacher"
BASE = "loss"
FRACTIONS = ("0.125", "0.25", "0.375", "0.5", "0.75", "1")
TASKS = ("wikitext", "lambada", "zeroshot", "niah")
NEEDLES = (1024, 2048, 4096)
"""Tokens of the prompts of `niah`."""
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Of sequences whose keys, values and states are counted."""
CONVERSION = "dsla"
"""What a line is of."""
KEYS = ("digest", "arm", "fraction", "seed", "steps", "batch", "seq_len", "lr", "text")
"""What tells a line from others; of two with the same key the later one counts."""
LINES = Lines(
    {CONVERSION: (*KEYS, "model", "limit", "machine", "date", "commands", "conversion", "rows")}, "dsla_study.py run"
)
"""What `run` writes."""
SEEN = Lines(
    {"distance": ("layer", "mixture", "edges", "weight", "mixed", "state 0", "state 1")},
    "dsla_study.py look",
    unsaid="distance",
)
"""What `look` writes, of a conversion to two states, which `draw` draws."""
BUDGET = ("digest", "steps", "batch", "seq_len", "lr", "text", "limit")
"""What lines must agree in to be compared."""
