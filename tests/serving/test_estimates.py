"""What a pass and a step take for a while, by shapes, beside what torch's allocator was seen to give them."""

import pytest
import torch

from lapcli.benchmarks.speed.configs import CONFIGS
from lapcli.runtime import Engine
from lapcli.runtime.steps import Steps
from lapcli.serving.estimates import estimated
from lapcli.testing.allocations import allocated
from lapcli.testing.dual_state import tiny_conversion
from lapcli.testing.stock_models import STOCK_MODELS

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 300}
MAMBA = {**WIDE, "mamba_n_heads": 8, "mamba_d_state": 64, "mamba_chunk_size": 64}
# What an estimate may be beyond what was seen: the widest of a kind of layer counts for all of the kind.
MOST = 1.8


def shaped(name, dtype=torch.float32, **change):
    config = {**CONFIGS[name], "num_hidden_layers": 2, "vocab_size": 1000, **change}
    return Engine.from_config(config, dtype=dtype, max_length=2048)


def stock(name, **config):
    return Engine(STOCK_MODELS[name]({**WIDE, **config}).eval(), max_length=2048)


ENGINES = {
    "a small Gated DeltaNet": lambda _: Engine.load("demo:gdn", max_length=2048),
    "a wide Gated DeltaNet": lambda _: shaped("gdn", hidden_size=512, intermediate_size=1408, num_heads=2),
    "in half precision": lambda _: shaped("qwen3.5-like", torch.bfloat16, hidden_size=512, intermediate_size=1408),
    "a DeltaNet": lambda _: shaped("delta-net", hidden_size=512, num_heads=4, intermediate_size=1408),
    "a Transformer": lambda _: shaped("smollm2-like"),
    "in half precision, too": lambda _: shaped("smollm2-like", torch.bfloat16),
    "Mamba-2": lambda _: stock("mamba2", expand=2, num_heads=8, head_dim=64, state_size=64, chunk_size=64),
    "Bamba": lambda _: stock("bamba", **MAMBA),
    "Falcon-H1": lambda _: stock("falcon_h1", **MAMBA, mamba_d_ssm=512, head_dim=64),
    "Granite": lambda _: stock("granitemoehybrid", **MAMBA),
    "Nemotron-H": lambda _: stock("nemotron_h", mamba_num_heads=8, mamba_head_dim=64),
    "Zamba2": lambda _: stock("zamba2"),
}


def pass_bytes(engine, tokens, seen=0, configuration=None):
    """What a pass of so many tokens after so many takes, beyond what is remembered of both."""
    prefiller = engine.plan.prefiller_of(engine.converted(configuration))
    prompt = torch.full((1, seen + tokens), 5)
    with torch.no_grad():
        # Whatever is made once.
        prefiller.forward(prompt[:, :16], prefiller.cache(), 0)
        cache = prefiller.cache()
        if seen:
            prefiller.forward(prompt[:, :seen], cache, 0)
        found = allocated(lambda: (prefiller.forward(prompt[:, seen:], cache, seen), cache))
    return found.most - found.kept


@pytest.mark.parametrize("name", ENGINES)
def test_a_pass_takes_no_more_and_hardly_less(name, tmp_path):
    engine = ENGINES[name](tmp_path)
    for tokens, seen in ((256, 0), (256, 768)) if engine.limited else ((256, 0),):
        needs = estimated(engine, window=tokens + seen, device=CPU)
        took = pass_bytes(engine, tokens, seen)
        assert took <= needs.for_pass(tokens) <= MOST * took, (tokens, seen)


def test_a_pass_of_each_configuration(tmp_path):
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    root = tiny_conversion(tmp_path / "dir", teacher={**sizes, "max_position_embeddings": 2048})
    engine = Engine.load(root, max_length=1024)
    needs = estimated(engine, window=1024, device=CPU)
    for number in range(4):
        # Of all layers, or of those that are attention.
        estimate = needs.for_pass(256, states=number > 0)
        took = pass_bytes(engine, 256, 512, f"{number}-of-3")
        assert took <= estimate <= MOST * took, number
    # Which of its configurations ran last, or which it holds, is all the same.
    assert estimated(engine, window=1024, device=CPU) == needs
    alone = Engine.load(root, max_length=1024, configurations=[0])
    assert estimated(alone, window=1024, device=CPU).pass_token == needs.pass_token
    ends = Engine.load(root, max_length=1024, configurations=[0, 3])
    assert estimated(ends, window=1024, device=CPU) == needs


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("scores", [2**21, 2**17], ids=["scores of all rows", "of few"])
@pytest.mark.parametrize("name", ["a small Gated DeltaNet", "a Transformer"])
def test_a_step_takes_no_more(name, rows, scores, tmp_path):
    """Drawing takes 48 bytes a score on a GPU, where sorting has places of its own, and two thirds of that here."""
    engine = ENGINES[name](tmp_path)
    steps = Steps(engine.plan, rows, CPU, capture=False, scores=scores)
    with torch.no_grad():
        steps.run(rows, "filtered", longest=1)
        took = allocated(lambda: steps.run(rows, "filtered", longest=1)).most
    estimate = estimated(engine, window=2048, device=CPU).for_step(rows, scores)
    assert took <= estimate <= 3 * took


def test_a_gpu_has_graphs_and_workspaces_besides():
    engine, gpu = Engine.load("demo:gdn", max_length=2048), torch.device("cuda")
    here, there = (estimated(engine, window=2048, device=device) for device in (CPU, gpu))
    assert (here.kept, here.pass_copies, here.step_copies) == (0, 1, 1)
    assert (there.kept, there.pass_copies, there.step_copies) == (2**26, 2, 2)
    assert there.pass_token < here.pass_token
    transformer = estimated(shaped("smollm2-like"), window=2048, device=gpu)
    # A library's prompts are not captured.
    assert (transformer.pass_copies, transformer.step_copies) == (1, 2)


def test_experts_count_as_many_as_a_token_has():
    """Four experts, of which a token has two: each 32 wide twice, and back to 64."""
    engine = Engine(STOCK_MODELS["qwen3_next"]({"vocab_size": 300}).eval(), max_length=64)
    found = []
    for count in (2, 200, 300):
        engine.model.config.num_experts_per_tok = count
        found.append(estimated(engine, window=64, device=CPU).pass_token)
    assert found[0] < found[1]
    assert found[2] - found[1] == 100 * 1.5 * (2 * 32 + 64) * 4
