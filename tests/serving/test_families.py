"""The engine's loop on hybrids: pieces of prompts and steps done again give what each request gets alone."""

from dataclasses import asdict

import pytest
import torch

from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Batch, Engine, GenerationSettings
from lapcli.serving.loop import EngineLoop
from lapcli.testing.decoding import prompts_of
from lapcli.testing.stock_models import tiny_stock_model

# transformers warns of what it deprecates, and fla of a machine without a GPU.
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = {"bamba": {}, "lara_mini": {"sliding_window": 6}, "kimi_linear": {}, "glm5_next": {}}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_steps_done_again(kind, tmp_path, monkeypatch):
    source = resolve_model(str(tiny_stock_model(kind, tmp_path / "m", **KINDS[kind])))
    prompts, count = prompts_of(50, 7, 33, 12), 8
    alone = Engine(load_model(source), max_length=64)
    wanted = {}
    for number, prompt in enumerate(prompts):
        events = alone.generate([prompt], GenerationSettings(max_new_tokens=count))
        wanted[str(number)] = [token for event in events for token in event.tokens]

    engine = Engine(load_model(source), max_rows=3, max_length=64)
    batch = Batch(engine, together=16, piece=16)
    step, calls = engine.steps.forward, 0

    def sometimes(tokens, rows):
        nonlocal calls
        calls += 1
        logits = step(tokens, rows)
        # When its states have gone on already.
        if calls in (3, 9):
            raise torch.OutOfMemoryError("now and then")
        return logits

    monkeypatch.setattr(engine.steps, "forward", sometimes)
    settings = {**asdict(GenerationSettings(max_new_tokens=count)), "eos": [], "stop": []}
    todo = [
        {"op": "add", "id": str(n), "prompt": prompt, "settings": settings, "configuration": "base"}
        for n, prompt in enumerate(prompts)
    ]
    found = {str(n): [] for n in range(len(prompts))}

    def take(wait):
        messages, todo[:] = todo[:], []
        return messages or ([{"op": "stop"}] if wait else [])

    def send(message):
        for name, tokens, *_ in message["events"]:
            found[name] += tokens

    EngineLoop(batch, take, send).run()
    assert found == wanted
    assert engine.slots.free == 3
