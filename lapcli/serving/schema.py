"""What a client may say: OpenAI's completions and chats, strict about what would otherwise be passed over."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_SEED = 2**63

Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""Fields of OpenAI's that are not done here, and the values with which they ask for nothing."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """How an answer is streamed."""

    include_usage: bool = Field(False, description="End with a piece that has no choices and the counts of tokens.")
    include_obfuscation: bool = Field(False, description="Taken, and not done.")


class _Request(_Strict):
    model: str | None = Field(None, max_length=512, description="The name that /v1/models gives; may be left out.")
    temperature: float | None = Field(None, ge=0, le=10, description="Of the draws, 1 if not said; 0: the likeliest.")
    top_p: float | None = Field(None, gt=0, le=1, description="Draw from the likeliest that have this probability.")
    top_k: int | None = Field(None, ge=-1, description="Draw from so many likeliest; 0 or -1: all. Not OpenAI's.")
    seed: int | None = Field(
        None, ge=-_SEED, lt=_SEED, description="Of the draws; prompt n of a list draws by seed + n."
    )
    stop: str | list[str] | None = Field(None, description="Texts that end the answer, and are not shown.")
    stop_token_ids: list[Token] | None = Field(None, max_length=64, description="Tokens that end it. Not OpenAI's.")
    ignore_eos: bool = Field(False, description="Go on after the model's end tokens. Not OpenAI's.")
    stream: bool | None = Field(False, description="Send the answer as it comes, as server-sent events.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Taken, and not used.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Taken, and not used.")
    n: int | None = Field(None, description="1: one answer a prompt.")
    presence_penalty: float | None = Field(None, description="0: there are no penalties.")
    frequency_penalty: float | None = Field(None, description="0: there are no penalties.")
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024, description="Empty: there are no biases.")

    @model_validator(mode="after")
    def _asks_for_nothing_else(self) -> Self:
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ValueError(f"{name} is not supported here, except as {' or '.join(map(repr, neutral))}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options without stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop texts."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(_Request):
    """Continue a text or several."""

    prompt: str | list[Token] | list[str] | list[list[Token]] = Field(
        description="A text or its token ids, or several of them."
    )
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Tokens of an answer, at most; 16 if not said.")
    logprobs: int | None = Field(None, ge=0, description="With each token come so many likeliest ones.")
    best_of: int | None = Field(None, description="1.")
    echo: bool | None = Field(None, description="False.")
    suffix: str | None = Field(None, description="Empty.")

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens come with a token; `None` for no log-probabilities at all."""
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Of these, what the model's chat template knows; there are no tools here."
    )
    content: str | Annotated[list[TextPart], Field(min_length=1)] = Field(description="Its text.")
    name: str | None = Field(None, max_length=256)
    refusal: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_there(cls, content: Any) -> Any:
        """OpenAI's may be null where tools are called, which there are none of here."""
        if not isinstance(content, str) and not (isinstance(content, list) and content):
            raise ValueError("a text, or a list of parts of the type text, is wanted")
        return content

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        found = {"role": self.role, "content": text}
        return found if self.name is None else {**found, "name": self.name}


class ChatRequest(_Request):
    """Answer a chat."""

    messages: list[ChatMessage] = Field(min_length=1, description="The chat so far.")
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Tokens of the answer, at most; as many as there is room for if not said."
    )
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of it.")
    logprobs: bool | None = Field(None, description="Whether log-probabilities come with each token.")
    top_logprobs: int | None = Field(None, ge=0, description="And those of so many likeliest tokens.")
    tools: list[Any] | None = Field(None, max_length=128, description="Empty.")
    tool_choice: Any = Field(None, description="none or auto.")
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = Field(None, description="Text.")
    store: bool | None = Field(None, description="False.")
    service_tier: str | None = Field(None, description="auto or default.")
    modalities: list[str] | None = Field(None, description="Text.")

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs without logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ")
        return self

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens come with a token; `None` for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the answer, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
