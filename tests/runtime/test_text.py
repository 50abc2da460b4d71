"""Text that comes token by token: whole characters, the same as all at once, and no stop text."""

import pytest
from transformers import PreTrainedTokenizerFast

from lapcli.families.loading import load_tokenizer, resolve_model
from lapcli.runtime.text import TextStream
from lapcli.testing.models import byte_tokenizer

HARD = "naïve café — 東京 🙂👩‍👩‍👧 Ω\n\ttabs  and   spaces. \u0301x"


def pieces(tokenizer, text, **options):
    stream = TextStream(tokenizer, **options)
    found = [stream.push(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    return [*found, stream.finish()], stream


def test_bytes_become_whole_characters():
    found, _ = pieces(byte_tokenizer(), HARD)
    assert "".join(found) == HARD
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)


def test_the_shipped_tokenizer():
    tokenizer = load_tokenizer(resolve_model("demo:gdn"))
    for text in (HARD, "The old man's sea-coast, 1905.", "    def f(x):\n        return x\n"):
        found, _ = pieces(tokenizer, text)
        assert "".join(found) == tokenizer.decode(tokenizer(text)["input_ids"])


def test_a_decoder_that_strips_the_first_space():
    """As SentencePiece models have it: a word begins with a mark that is a space but at the beginning of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["▁the", "▁sea", "▁", "s", "<unk>"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    stream = TextStream(tokenizer, prompt=[0, 1])
    assert [stream.push(token) for token in (0, 1, 3, 0)] == [" the", " sea", "s", " the"]
    fresh = TextStream(tokenizer)
    assert [fresh.push(token) for token in (0, 1)] == ["the", " sea"]


def test_broken_bytes_are_shown_in_the_end():
    tokenizer = byte_tokenizer()
    whole = tokenizer("a🙂", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in whole[:3]] == ["a", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    # Bytes that never become a character do not hold everything up for ever.
    endless = TextStream(tokenizer)
    assert "".join(endless.push(whole[2]) for _ in range(40))


def test_special_tokens_have_no_text():
    stream = TextStream(byte_tokenizer())
    assert [stream.push(token) for token in (1, 0, 2)] == ["", "", ""]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (("END",), "abENcd"),
        (("cdE",), "abEN"),
        (("ENDx", "cdEND"), "abEN"),
        (("zzz",), "abENcdENDe"),
        (("d", "cd"), "abEN"),
        (("aa", "abENcdENDe"), ""),
    ],
    ids=str,
)
def test_a_stop_text_and_what_follows_are_not_shown(stop, shown):
    """Also where its beginning came before in vain, or two of them overlap."""
    found, stream = pieces(byte_tokenizer(), "abENcdENDe", stop=stop)
    assert "".join(found) == shown
    assert stream.stopped == (shown != "abENcdENDe")


def test_what_may_begin_a_stop_text_is_held_back():
    found, _ = pieces(byte_tokenizer(), "xEND", stop=("END!",))
    assert found == ["x", "", "", "", "END"]
