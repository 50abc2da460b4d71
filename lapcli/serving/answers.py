"""What clients get, in OpenAI's forms: completions and chats, whole and in pieces, and errors."""

import codecs
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lapcli.serving.jobs import Piece
from lapcli.serving.texts import Texts

_LEAST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot say."""

_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "full": "length"}


@dataclass
class Answer:
    """What came of one prompt so far.

    Attributes:
        text: of it.
        tokens: that came.
        reason: why it ended.
        scores: of its tokens.
    """

    text: str = ""
    tokens: int = 0
    reason: str | None = None
    scores: list[Any] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Take in a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.reason = piece.reason or self.reason
        self.scores += piece.scores


class Form(Protocol):
    """How an answer looks."""

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """All answers of a request."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first piece of a stream, before anything came; `None` for none."""
        ...

    def piece(self, index: int, answer: Answer) -> dict[str, Any]:
        """What is new of an answer; pieces come in their order."""
        ...

    def usage(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The last piece of a stream, with counts and nothing else."""
        ...


@dataclass
class _Base:
    name: str
    model: str
    texts: Texts
    scored: bool
    usage_follows: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    kind = ""

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What all documents have."""
        found = {"id": self.name, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return {**found, "usage": None} if self.usage_follows else found

    def usage(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The last piece of a stream."""
        return {**self.document(self.kind, []), "usage": counts(prompt_tokens, tokens)}


class _Offsets:
    """Where the tokens of a text begin, in characters, as they come: of one within a character, where that begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, raw: bytes) -> int:
        """Take in a token's bytes."""
        if self._decoder.getstate()[0] and raw[:1] and not 0x80 <= raw[0] < 0xC0:
            # A character that never came to its end.
            self._characters += len(self._decoder.decode(b"", True))
        begin = self._characters
        self._characters += len(self._decoder.decode(raw))
        return begin


@dataclass
class CompletionForm(_Base):
    """Of `/v1/completions`."""

    _offsets: defaultdict[int, _Offsets] = field(default_factory=lambda: defaultdict(_Offsets), init=False)

    kind = "text_completion"

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """All answers of a request."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        tokens = sum(answer.tokens for answer in answers)
        return {**self.document(self.kind, choices), "usage": counts(prompt_tokens, tokens)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """None: a completion begins with its first text."""
        return None

    def piece(self, index: int, answer: Answer) -> dict[str, Any]:
        """What is new of an answer."""
        return self.document(self.kind, [self._choice(index, answer)])

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._scores(index, answer.scores) if self.scored else None,
            "finish_reason": None if answer.reason is None else _FINISH[answer.reason],
        }

    def _scores(self, index: int, scores: Sequence[Any]) -> dict[str, Any]:
        tokens = [self.texts.token(token) for token, _, _ in scores]
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [_finite(value) for _, value, _ in scores],
            "top_logprobs": [
                {self.texts.token(other)[0]: _finite(value) for other, value in top} if top else None
                for _, _, top in scores
            ],
            "text_offset": [self._offsets[index].push(raw) for _, raw in tokens],
        }


class ChatForm(_Base):
    """Of `/v1/chat/completions`."""

    kind = "chat.completion.chunk"

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """All answers of a request."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._scores(answer.scores) if self.scored else None,
                "finish_reason": None if answer.reason is None else _FINISH[answer.reason],
            }
            for index, answer in enumerate(answers)
        ]
        tokens = sum(answer.tokens for answer in answers)
        return {**self.document("chat.completion", choices), "usage": counts(prompt_tokens, tokens)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Whose message it is."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, answer: Answer) -> dict[str, Any]:
        """What is new of an answer."""
        scores = self._scores(answer.scores) if self.scored else None
        finish = None if answer.reason is None else _FINISH[answer.reason]
        return self._delta(index, {"content": answer.text} if answer.text or not finish else {}, scores, finish)

    def _delta(self, index: int, delta: dict[str, Any], scores: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return self.document(self.kind, [choice])

    def _scores(self, scores: Sequence[Any]) -> dict[str, Any]:
        return {
            "content": [
                {**self._score(token, value), "top_logprobs": [self._score(*each) for each in top]}
                for token, value, top in scores
            ],
            "refusal": None,
        }

    def _score(self, token: int, value: float) -> dict[str, Any]:
        text, raw = self.texts.token(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(raw)}


def counts(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Counts of tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def error_document(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(document: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST
