"""`lapcli generate` as a person meets it."""

import io
import json
import subprocess
import sys

import pytest

from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.runtime import Batch
from lapcli.testing.decoding import full_logits
from lapcli.testing.models import tiny_gated_deltanet
from lapcli.testing.stock_models import tiny_stock_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny")


def greedy(folder, prompt, count):
    """What the model itself continues a text with."""
    source = resolve_model(str(folder))
    model, tokenizer = load_model(source), load_tokenizer(source)
    tokens = list(tokenizer(prompt)["input_ids"])
    for _ in range(count):
        tokens.append(int(full_logits(model, tokens).argmax()))
    return tokenizer.decode(tokens[-count:], skip_special_tokens=True)


def test_text_on_stdout_and_all_else_on_stderr(lapcli, tiny):
    code, out, err = lapcli("generate", "To be", "--model", tiny, "--max-new-tokens", "12", "--ignore-eos")
    assert code == 0, err
    assert out == greedy(tiny, "To be", 12) + "\n"
    assert sum(line.startswith("decoding: fused steps, step kernel: reference") for line in err.splitlines()) == 1
    assert "12 tokens in" in err
    assert "tokens/s" in err
    assert "ended by: length" in err
    again = lapcli("generate", "To be", "--model", tiny, "--max-new-tokens", "12", "--ignore-eos", "--quiet")
    assert again == (0, out, "")


def test_text_is_shown_while_it_is_made(lapcli, tiny, monkeypatch):
    """Not only in the end: what a reader has, is counted before each step."""
    shown, steps = [""], []

    class Reader(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    advance = Batch.advance
    monkeypatch.setattr(Batch, "advance", lambda batch: steps.append(len(shown[-1])) or advance(batch))
    monkeypatch.setattr(sys, "stdout", Reader())
    code, _out, err = lapcli("generate", "To be", "--model", tiny, "--max-new-tokens", "12", "--ignore-eos")
    assert code == 0, err
    assert shown[-1] == greedy(tiny, "To be", 12) + "\n"
    # A token that ends within a character waits for the next one.
    assert len(set(steps)) > 4


def test_json_alone_on_stdout(lapcli, tiny):
    job = ["generate", "To be", "--model", tiny, "--max-new-tokens", "7", "--json", "--ignore-eos"]
    code, out, err = lapcli(*job, "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "4")
    assert code == 0, err
    assert "decoding: fused steps" in err
    assert "7 tokens in " in err
    assert lapcli(*job, "--quiet")[2] == ""
    document = json.loads(out)
    (found,) = document["continuations"]
    assert len(found["tokens"]) == document["tokens"] == 7
    assert (found["prompt"], found["prompt_tokens"], found["reason"]) == ("To be", 5, "length")
    assert document["bytes"]["states"] == 2 * 2 * 32 * 32 * 4
    assert document["path"].startswith("decoding: fused steps")
    other = json.loads(lapcli(*job, "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "5")[1])
    assert other["continuations"][0]["tokens"] != found["tokens"]


def test_prompts_of_a_file(lapcli, tiny, tmp_path):
    """In their order, each as it is alone, whatever the batch."""
    (tmp_path / "prompts.txt").write_text("To be\n\nor not\nto\n")
    lines = [{"prompt": "To be"}, {"text": "or not", "id": 3}, {"prompt": "to"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    wanted = "".join(
        f"==> {number} <==\n{greedy(tiny, prompt, 5)}\n" for number, prompt in enumerate(("To be", "or not", "to"), 1)
    )
    for file in ("prompts.txt", "prompts.jsonl"):
        for batch in ([], ["--batch-size", "2"]):
            job = ["generate", "--prompts", file, "--model", tiny, "--max-new-tokens", "5", "--ignore-eos", *batch]
            code, out, err = lapcli(*job)
            assert code == 0, err
            assert out == wanted
    assert "15 tokens" in err
    assert "3 x length" in err


def test_rows_draw_with_seeds_of_their_own(lapcli, tiny, tmp_path):
    (tmp_path / "same.txt").write_text("To be\nTo be\n")
    job = ["generate", "--model", tiny, "--max-new-tokens", "8", "--temperature", "1", "--json", "--ignore-eos"]
    first, second = json.loads(lapcli(*job, "--prompts", "same.txt", "--seed", "3")[1])["continuations"]
    assert first["tokens"] != second["tokens"]
    alone = json.loads(lapcli(*job, "To be", "--seed", "4")[1])["continuations"]
    assert alone[0]["tokens"] == second["tokens"]


def test_stdin_stop_and_an_empty_prompt(lapcli, tiny, monkeypatch):
    text = greedy(tiny, "To be\n", 12)
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be\n"))
    job = ["--model", tiny, "--max-new-tokens", "12", "--ignore-eos"]
    code, out, err = lapcli("generate", "-", *job, "--stop", text[5:7])
    assert code == 0, err
    assert out == text[: text.index(text[5:7])] + "\n"
    assert "ended by: stop" in err
    assert lapcli("generate", "", *job)[1] == greedy(tiny, "<s>", 12) + "\n"


def test_a_prompt_that_is_no_utf8(lapcli, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for prompt in ("-", "caf\udce9"):
        code, out, err = lapcli("generate", prompt, "--model", tiny)
        assert (code, out) == (2, "")
        assert "not UTF-8" in err


def test_the_end_token_of_the_checkpoint(lapcli, tiny, tmp_path):
    """Whatever the model likes best after the prompt is made its end."""
    import shutil

    folder = shutil.copytree(tiny, tmp_path / "m")
    likes = json.loads(
        lapcli("generate", "To be", "--model", tiny, "--max-new-tokens", "3", "--json", "--ignore-eos")[1]
    )["continuations"][0]["tokens"]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, likes[0]]}))
    code, out, err = lapcli("generate", "To be", "--model", folder)
    assert (code, out) == (0, "\n")
    assert "ended by: eos" in err
    assert "1 token in" in err
    assert len(lapcli("generate", "To be", "--model", folder, "--ignore-eos", "--max-new-tokens", "9")[1]) > 2


def test_the_model_of_a_run(lapcli, tiny, text, tmp_path):
    job = ["prune", tiny, "--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu", "--ratio", "0.5"]
    assert lapcli(*job)[0] == 0
    code, out, _err = lapcli("generate", "To be", "--max-new-tokens", "4", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["model"] == "lapcli-run/sliced"
    assert document["bytes"]["states"] == 2 * 2 * 16 * 32 * 4


def test_stock_models_and_models_without_a_plan(lapcli, tmp_path):
    for name, said in (("mamba2", "fused steps"), ("qwen4_exp", "the library's forward pass, row by row")):
        folder = tiny_stock_model(name, tmp_path / name)
        code, out, err = lapcli("generate", "To be", "--model", folder, "--max-new-tokens", "4", "--ignore-eos")
        assert code == 0, err
        assert out.strip("\n") == greedy(folder, "To be", 4).strip("\n")
        assert f"decoding: {said}" in err


def test_a_dry_run_reads_no_weights(lapcli, tiny, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = lapcli("generate", "To be", "--model", tiny, "--dry-run", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["dry_run"]
    assert document["steps"] == "fused"
    assert (document["prompt_tokens"], document["new_tokens_at_most"]) == (5, 128)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["give a prompt", "lapcli generate"]),
        (["x", "--prompts", "p.txt"], 2, ["give a prompt, or --prompts"]),
        (["--prompts", "missing.txt"], 1, ["cannot read missing.txt"]),
        (["--prompts", "empty.txt"], 1, ["empty.txt holds no prompt"]),
        (["--prompts", "latin.txt"], 1, ["latin.txt is not UTF-8"]),
        (["--prompts", "bad.jsonl"], 1, ["line 2 of bad.jsonl", "prompt"]),
        (["x", "--temperature", "-1"], 2, ["--temperature -1"]),
        (["x", "--top-p", "2"], 2, ["--top-p 2"]),
        (["x", "--max-new-tokens", "0"], 2, ["--max-new-tokens 0"]),
        (["x", "--batch-size", "0"], 2, ["--batch-size 0"]),
        (["x", "--kernel", "magic"], 2, ["--kernel 'magic'", "triton"]),
        (["x", "--kernel", "triton"], 1, ["--kernel triton", "CUDA"]),
        (["x", "--state-dtype", "int8"], 2, ["--state-dtype 'int8'"]),
        (["x", "--require-fast"], 1, ["--require-fast", "CUDA"]),
        (["x", "--device", "cuda"], 2, ["--device cuda"]),
        (["x", "--device", "split"], 2, ["split"]),
        (["x", "--stop", ""], 2, ["--stop"]),
        (["x", "--model", "nowhere/nothing"], 1, ["nowhere/nothing"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_is_refused(lapcli, tiny, tmp_path, arguments, code, words):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    job = arguments if "--model" in arguments else [*arguments, "--model", tiny]
    found, out, err = lapcli("generate", *job)
    assert (found, out) == (code, ""), err
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_a_reader_that_has_enough(tiny):
    """`lapcli generate ... | head -c 1`: no traceback."""
    program = "from lapcli.cli.app import main; main()"
    job = ["generate", "To be", "--model", str(tiny), "--max-new-tokens", "300", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
