"""The settings that an analysis depends on."""

from typing import Self

from pydantic import Field, model_validator

from lapcli.recipe import Settings


class AnalysisSettings(Settings):
    """On which text and where in it states are looked at."""

    data: str = Field(description="text source: builtin, recall, a file or folder, a hub set, or a:0.9,b:0.1")
    samples: int = Field(default=128, gt=0, description="token sequences")
    seq_len: int = Field(default=2048, gt=1, description="tokens of each sequence")
    stride: int = Field(default=32, gt=0, description="tokens from one position to the next")
    skip: int = Field(default=128, ge=0, description="tokens before the first stride")
    seed: int = Field(default=0, ge=0, description="of the choice of text")

    @model_validator(mode="after")
    def _a_position_there_is(self) -> Self:
        if self.skip + self.stride > self.seq_len:
            raise ValueError(f"no position: skip + stride is {self.skip + self.stride}, seq_len {self.seq_len}")
        return self

    @property
    def positions(self) -> list[int]:
        """After how many tokens states are looked at: every `stride`-th, the first `skip` tokens passed over."""
        return list(range(self.skip + self.stride, self.seq_len + 1, self.stride))
