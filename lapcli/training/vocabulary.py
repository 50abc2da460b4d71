"""Whether a tokenizer says by its ids what a model has learned of them."""

from lapcli.errors import ModelError
from lapcli.training.distillation import Tokenizer


def compare_vocabularies(name: str, rows: int, own: Tokenizer | None, other: Tokenizer) -> str | None:
    """Compare a tokenizer that a model is to be trained on with, with the one that it has.

    Args:
        name: the model's.
        rows: of its embedding; ids beyond are not compared.
        own: its tokenizer, if there is one.
        other: the one that takes its place.

    Returns:
        What should be said of tokens that only one of them has, or `None` where there are none.

    Raises:
        ModelError: an id is another token to each of them; the first is named.
    """
    tokens = {index: token for token, index in other.get_vocab().items()}
    if own is None:
        return f"{name} has no tokenizer of its own: whether its rows mean these {len(tokens)} tokens is not known"
    known = {index: token for token, index in own.get_vocab().items() if index < rows}
    for index in sorted(tokens.keys() & known.keys()):
        if tokens[index] != known[index]:
            raise ModelError(
                f"id {index} is {known[index]!r} to {name} and {tokens[index]!r} to the tokenizer that was asked for: "
                "training would begin from rows that mean other tokens",
                f"name no tokenizer, which takes that of {name}; for another vocabulary begin anew, with model",
            )
    said: list[str] = []
    if new := tokens.keys() - known.keys():
        said.append(f"{len(new)} of its tokens are new to the model, from id {min(new)} ({tokens[min(new)]!r}) on")
    if lost := known.keys() - tokens.keys():
        said.append(f"{len(lost)} of the model's will not occur, from id {min(lost)} ({known[min(lost)]!r}) on")
    return f"the tokenizer is not that of {name}: {'; '.join(said)}" if said else None
