"""What is measured while training and at its end: perplexities, and recall by teacher forcing."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo_gdn.recall_rows import FLAG
from demo_gdn.step import Network, embedding_of

_BATCH_TOKENS = 32768


class Measurement:
    """Held-out streams and recall rows, resident, and the measures over them.

    Args:
        streams: token streams by name, for perplexity.
        recall: flagged rows by name, for recall.
        length: tokens of a window.
        device: where the model lies.
        most_tokens: of each stream, at most.
    """

    def __init__(
        self,
        streams: dict[str, np.ndarray],
        recall: dict[str, np.ndarray],
        *,
        length: int,
        device: torch.device,
        most_tokens: int = 400_000,
    ):
        self._length = length
        self._streams = {
            name: torch.from_numpy(stream[: most_tokens + 1].astype(np.int64)).to(device)
            for name, stream in streams.items()
        }
        self._recall = {name: torch.from_numpy(rows).to(device) for name, rows in recall.items()}

    def __call__(self, network: Network) -> dict[str, float]:
        """Perplexity per token of every stream, and exact and per-token accuracy of every set of recall rows."""
        with torch.no_grad():
            results = {f"{name}_ppl": self._perplexity(network, ids) for name, ids in self._streams.items()}
            for name, rows in self._recall.items():
                exact, tokens = self._accuracy(network, rows)
                results[f"{name}_exact"], results[f"{name}_tokens"] = exact, tokens
        return results

    def _perplexity(self, network: Network, ids: Tensor) -> float:
        """Windows of `length` tokens side by side, each read from an empty state."""
        length = min(self._length, len(ids) - 1)
        count = (len(ids) - 1) // length
        inputs = ids[: count * length].view(count, length)
        targets = ids[1 : count * length + 1].view(count, length)
        total = 0.0
        for part in torch.arange(count).split(max(1, _BATCH_TOKENS // length)):
            logits = self._logits(network, inputs[part])
            total += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[part].flatten(), reduction="sum")
            )
        return math.exp(total / (count * length))

    def _accuracy(self, network: Network, rows: Tensor) -> tuple[float, float]:
        exact, right, asked = 0, 0, 0
        for part in torch.arange(len(rows)).split(max(1, _BATCH_TOKENS // rows.shape[1])):
            flagged = rows[part].long()
            answers = flagged >= FLAG
            ids = torch.where(answers, flagged - FLAG, flagged)
            hits = self._logits(network, ids[:, :-1]).argmax(-1) == ids[:, 1:]
            wanted = answers[:, 1:]
            exact += int((hits | ~wanted).all(1).sum())
            right += int((hits & wanted).sum())
            asked += int(wanted.sum())
        return exact / len(rows), right / max(1, asked)

    def _logits(self, network: Network, ids: Tensor) -> Tensor:
        hidden = network.hidden(ids)
        return hidden.float() @ embedding_of(network.model).float().T


def generated_recall(model: Any, rows: np.ndarray, count: int, device: torch.device) -> float:
    """Share of single-needle prompts whose greedy continuation by `generate` is the answer.

    Args:
        model: the model.
        rows: flagged rows with one answer each.
        count: how many to try.
        device: where the model lies.
    """
    right = 0
    for row in rows[:count].astype(np.int64):
        places = np.flatnonzero(row >= FLAG)
        prompt = torch.from_numpy(row[: places[0]]).unsqueeze(0).to(device)
        answer = (row[places] - FLAG).tolist()
        with torch.no_grad():
            made = model.generate(prompt, max_new_tokens=len(answer), do_sample=False)
        right += made[0, prompt.shape[1] :].tolist() == answer
    return right / min(count, len(rows))
