"""Servers on a GPU keep to `--memory`: they begin, answer many at once, and never hold more."""

import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lapcli.errors import LapcliError
from lapcli.serving.replay_engines import started
from lapcli.testing.dual_state import tiny_conversion

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
MIB = 2**20
ROOM = ["--device", DEVICE, "--dtype", "bfloat16", "--max-waiting", "10000", "--max-per-client", "10000"]


class Served:
    """A server, and what it is asked and says."""

    def __init__(self, url, log):
        self.url, self.log = url, log

    def ask(self, prompt, count, **fields):
        """A completion of token ids; what comes back, whatever it is."""
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **fields}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as got:
                return got.status, json.load(got)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ask_all(self, requests):
        """All at once; the texts of the answers, each of which is whole."""
        with ThreadPoolExecutor(len(requests)) as pool:
            done = list(pool.map(lambda each: self.ask(*each[:2], **(each[2] if each[2:] else {})), requests))
        assert [status for status, _ in done] == [200] * len(done), [each for each in done if each[0] != 200][:3]
        for (_, count, *_), (_, document) in zip(requests, done, strict=True):
            assert document["usage"]["completion_tokens"] == count
        return [document["choices"][0]["text"] for _, document in done]

    def metrics(self):
        """All of them."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as got:
            lines = got.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    @property
    def lines(self):
        """What it logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def kept_to(self, limit):
        """Check that it did, and that nothing was done again or died; gives what it said when it was ready."""
        found = self.metrics()
        assert 0 < found["lapcli_memory_bytes"] <= found["lapcli_peak_memory_bytes"] <= limit, found
        assert found["lapcli_out_of_memory"] == 0, [line for line in self.lines if line["event"] == "out of memory"]
        assert found["lapcli_engine_restarts_total"] == 0
        (ready,) = [line for line in self.lines if line["event"] == "engine ready"]
        beside = ready["beside"]
        assert beside["measured"]
        assert "CUDA graphs" in ready["path"]
        assert "no CUDA graphs" not in ready["path"]
        rows = sum(ready["bytes"][kind] for kind in ("states", "convolutions", "attention"))
        # What was divided was divided; how much of it, is what to look at here.
        used = ready["bytes"]["weights"] + rows + sum(beside[kind] for kind in ("kept", "prompt", "passing"))
        print(f"\n{ready['rows']} rows; of {limit} bytes {used} are divided, {rows} of them to rows; "
              f"most held: {found['lapcli_peak_memory_bytes']:.0f}; {ready}")  # fmt: skip
        assert used <= limit
        return ready


@pytest.fixture
def serve(tmp_path):
    """Starts `lapcli serve` as a process."""
    running = []

    def begin(model, *options):
        log = tmp_path / f"{len(running)}.log"
        running.append(started(str(model), [*ROOM, *options], log))
        return Served(running[-1].__enter__(), log)

    yield begin
    for each in running:
        each.__exit__(None, None, None)


def prompts(count, length, vocabulary):
    return [[3 + (7 * number + 11 * place) % (vocabulary - 3) for place in range(length)] for number in range(count)]


def of_all_kinds(count, length, vocabulary):
    """Greedy ones, draws from all and from some, with and without log-probabilities, of equal and unequal lengths."""
    kinds = (
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.9, "top_p": 0.9, "seed": 2, "logprobs": 5},
        {"logprobs": 20},
    )
    made = []
    for number, prompt in enumerate(prompts(count, length, vocabulary)):
        cut = prompt if number % 3 else prompt[: 1 + number % length]
        made.append((cut, 20 + number % 30, kinds[number % len(kinds)]))
    return made


@pytest.mark.parametrize("memory", [512, 256], ids=lambda mib: f"{mib} MiB")
def test_a_recurrent_model_keeps_to_its_memory(serve, memory):
    server = serve("demo:gdn", "--memory", f"{memory}MiB", "--max-length", "2048")
    (alone,) = server.ask_all([(prompts(1, 300, 4096)[0], 30)])
    # The longest that there may be, and many more than there are rows.
    longest = [(prompts(1, 2000, 4096)[0], 48)] * 3
    server.ask_all([*longest, *of_all_kinds(400, 200, 4096)])
    # Products of many rows round otherwise; but alone it is the same graph again.
    assert server.ask_all([(prompts(1, 300, 4096)[0], 30)]) == [alone]
    ready = server.kept_to(memory * MIB)
    assert ready["rows"] > 64


def test_more_rows_than_graphs_are_usually_made_for(serve):
    server = serve("demo:gdn", "--memory", "512MiB", "--max-length", "1024", "--max-rows", "400")
    server.ask_all(of_all_kinds(600, 100, 4096))
    assert server.kept_to(512 * MIB)["rows"] == 400


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """Three wide layers, all converted, at 10.5, 22 and 35 % more perplexity."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    root = tmp_path_factory.mktemp("converted") / "mine"
    return tiny_conversion(root, teacher={**sizes, "max_position_embeddings": 8192})


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
def test_a_conversion_that_adapts_keeps_to_its_memory(serve, conversion, offload):
    options = ["--adapt", "--max-ppl-increase", "100%", "--caps", "0:0%,512:34%,2048:67%", "--max-length", "4096"]
    server = serve(conversion, *options, "--memory", "512MiB", *(["--offload"] if offload else []))
    longest = [(prompt, 90) for prompt in prompts(12, 4000, 300)]
    server.ask_all([*longest, *of_all_kinds(200, 700, 300)])
    assert server.kept_to(512 * MIB)["rows"] > 16
    assert server.metrics()["lapcli_mixed_steps"] > 0


def test_pages_that_run_out_under_load(serve, conversion):
    """Rows are set back, nothing is lost, and memory stays within its limit."""
    options = ["--no-adapt", "--max-length", "4096", "--memory", "256MiB", "--max-rows", "64"]
    server = serve(conversion, *options)
    server.ask_all([(prompt, 400) for prompt in prompts(100, 1500, 300)])
    server.kept_to(256 * MIB)
    found = server.metrics()
    assert found["lapcli_memory_for_rows_peak_bytes"] > 0.9 * found["lapcli_memory_for_rows_bytes"]


def test_the_shape_of_the_study(serve, tmp_path):
    """SmolLM2's, drawn, in the memory that `scripts/serving_study.py` gives it, with the longest prompts."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    from serving.drawn import draw

    server = serve(draw(tmp_path / "drawn"), "--adapt", "--memory", "1280MiB", "--max-length", "8192")
    server.ask_all([*((prompt, 64) for prompt in prompts(4, 8000, 4096)), *of_all_kinds(60, 900, 4096)])
    server.kept_to(1280 * MIB)


def test_an_explicit_piece_that_does_not_fit_is_halved(serve):
    server = serve("demo:gdn", "--memory", "224MiB", "--max-length", "65536", "--prefill-tokens", "32768")
    server.ask_all([(prompts(1, 40_000, 4096)[0], 8)])
    assert server.kept_to(224 * MIB)["beside"]["piece"] < 32768


@pytest.mark.parametrize("memory", ["16MiB", "72MiB"], ids=["hardly the weights", "hardly the workspaces"])
def test_too_little_is_refused_in_words(serve, memory):
    with pytest.raises(LapcliError) as raised:
        serve("demo:gdn", "--memory", memory)
    said = str(raised.value)
    assert "Traceback" not in said
    assert "raise --memory" in said
