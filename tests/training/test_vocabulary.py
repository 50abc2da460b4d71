"""Another tokenizer for a model that has one: what is the same, what is said, what is refused."""

import pytest

from lapcli.errors import ModelError
from lapcli.training.vocabulary import compare_vocabularies


class Words:
    """A tokenizer of these tokens; `None` is an id without one."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens) if token is not None}


def said(own, other, rows=6):
    return compare_vocabularies("the model", rows, own and Words(*own), Words(*other))


def test_the_same_tokens_need_no_word():
    assert said(("a", "b"), ("a", "b")) is None
    # Of the model's own, what has no row is no token to it.
    assert said(("a", "b", "c"), ("a", "b"), rows=2) is None


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (("a",), ("a", "b", "c"), ["2 of its tokens are new to the model, from id 1 ('b') on"]),
        (("a", None, "c"), ("a", "b", "c"), ["1 of its tokens are new to the model, from id 1 ('b') on"]),
        (("a", "b", "c"), ("a",), ["2 of the model's will not occur, from id 1 ('b') on"]),
        (("a", "b"), ("a", None, "c"), ["new to the model, from id 2 ('c')", "will not occur, from id 1 ('b')"]),
        (None, ("a", "b"), ["the model has no tokenizer of its own", "these 2 tokens"]),
    ],
    ids=["larger", "into a gap", "smaller", "both", "no own"],
)
def test_tokens_of_one_alone_are_said(own, other, words):
    found = said(own, other)
    assert all(each in found for each in words), found


@pytest.mark.parametrize("other", [("a", "x", "y"), ("a", "c", "b", "d"), (None, "c")], ids=str)
def test_the_first_id_that_means_two_tokens_is_refused(other):
    with pytest.raises(ModelError, match=f"id 1 is 'b' to the model and '{other[1]}' to the tokenizer"):
        said(("a", "b", "c"), other)
