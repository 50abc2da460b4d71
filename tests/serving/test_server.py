"""A real engine behind the front: answers are those of `lapcli generate`, whoever else is there."""

import itertools
import os
import shlex
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.runtime import Engine, GenerationSettings
from lapcli.runtime.generation import encode_prompts, end_tokens, generate_texts
from lapcli.testing.decoding import full_logits
from lapcli.testing.serving import local_server

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PROMPTS = ["x", "To be, or not", "naïve 🙂", "a" * 200, "The old man", "sea " * 25, "one two three", "?"]


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    """The tiny model, with a chat template."""
    copy = tmp_path_factory.mktemp("chatting") / "tiny-chat"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


@pytest.fixture(scope="module")
def server(model):
    with local_server(model, max_length=256, max_rows=4, piece=64) as running:
        yield running


@pytest.fixture(scope="module")
def offline(model):
    """What `lapcli generate` gives for one prompt alone: its text, tokens and reason."""
    source = resolve_model(str(model))
    tokenizer = load_tokenizer(source)
    engine = Engine(load_model(source), max_rows=1)
    eos = end_tokens(source.config, source.path, tokenizer)

    def generate(prompt, **settings):
        wanted = GenerationSettings(eos=eos)
        tokens = encode_prompts(tokenizer, [prompt])
        return generate_texts(engine, tokenizer, [prompt], tokens, replace(wanted, **settings)).continuations[0]

    generate.engine, generate.tokenizer, generate.eos = engine, tokenizer, eos
    return generate


def finish(reason):
    return "length" if reason in ("length", "full") else "stop"


def same(reply, wanted):
    """Whether a completion is what was generated offline."""
    (choice,) = reply.document["choices"]
    usage = reply.document["usage"]
    assert (choice["text"], choice["finish_reason"]) == (wanted.text, finish(wanted.reason))
    assert usage["prompt_tokens"] == wanted.prompt_tokens
    assert usage["completion_tokens"] == len(wanted.tokens)


def test_answers_do_not_depend_on_the_batch(server, offline):
    """Thirty-two requests through four rows, greedy ones among draws, long prompts in pieces."""
    bodies = [
        {"prompt": prompt, "max_tokens": 8 + 3 * number, **way}
        for (number, prompt), way in itertools.product(
            enumerate(PROMPTS),
            (
                {"temperature": 0},
                {"temperature": 0.9, "seed": 5},
                {"seed": -7, "top_p": 0.8},
                {"top_k": 9, "seed": 2**62},
            ),
        )
    ]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda body: server.send(PATH, body), reversed(bodies)))[::-1]
    for body, reply in zip(bodies, replies, strict=True):
        settings = {key: body[key] for key in ("top_p", "top_k", "seed") if key in body}
        same(
            reply,
            offline(
                body["prompt"], max_new_tokens=body["max_tokens"], temperature=body.get("temperature", 1.0), **settings
            ),
        )


def test_a_list_draws_as_generate_does(server, offline):
    body = {"prompt": PROMPTS[:3], "max_tokens": 6, "seed": 40}
    reply = server.send(PATH, body).document
    wanted = [offline(prompt, max_new_tokens=6, temperature=1.0, seed=40 + n) for n, prompt in enumerate(PROMPTS[:3])]
    assert [(each["index"], each["text"]) for each in reply["choices"]] == [(n, w.text) for n, w in enumerate(wanted)]
    assert reply["usage"]["completion_tokens"] == sum(len(each.tokens) for each in wanted)
    tokens = encode_prompts(offline.tokenizer, PROMPTS[:3])
    assert server.send(PATH, {**body, "prompt": tokens}).document["choices"] == reply["choices"]
    assert server.send(PATH, {**body, "prompt": tokens[0]}).document["choices"] == reply["choices"][:1]


def test_stops(server, offline):
    whole = offline("The old man", max_new_tokens=40)
    stop, number = whole.text[9:12], 5
    body = {"prompt": "The old man", "max_tokens": 40, "temperature": 0}
    same(server.send(PATH, {**body, "stop": ["@@@", stop]}), offline("The old man", max_new_tokens=40, stop=(stop,)))
    last = whole.tokens[number]
    found = server.send(PATH, {**body, "stop_token_ids": [last]}).document
    assert found["usage"]["completion_tokens"] == whole.tokens.index(last) + 1
    assert found["choices"][0]["finish_reason"] == "stop"
    # End tokens count unless they are to be passed over.
    free = server.send(PATH, {**body, "ignore_eos": True, "max_tokens": 99}).document
    assert free["usage"]["completion_tokens"] == 99


def test_a_stream_is_the_whole_in_pieces(server, offline):
    body = {"prompt": PROMPTS[:2], "max_tokens": 12, "temperature": 0, "stream": True}
    events = server.send(PATH, {**body, "stream_options": {"include_usage": True}}).events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    wanted = [offline(prompt, max_new_tokens=12) for prompt in PROMPTS[:2]]
    assert events[-2]["usage"]["completion_tokens"] == sum(len(each.tokens) for each in wanted)
    for index, each in enumerate(wanted):
        choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == each.text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish(each.reason)]
    assert all(event["usage"] is None for event in events[:-2])


def test_log_probabilities(server, offline):
    body = {"prompt": "The old man", "max_tokens": 5, "temperature": 0, "logprobs": 3}
    scores = server.send(PATH, body).document["choices"][0]["logprobs"]
    prompt = encode_prompts(offline.tokenizer, ["The old man"])[0]
    tokens = offline("The old man", max_new_tokens=5).tokens
    logits = full_logits(offline.engine.model, [*prompt, *tokens], last=6)[:-1].log_softmax(-1)
    # fp32, by another order of sums.
    wanted = logits.gather(-1, logits.new_tensor(tokens).long().unsqueeze(-1)).squeeze(-1).tolist()
    assert scores["token_logprobs"] == pytest.approx(wanted, abs=1e-5)
    assert [len(top) for top in scores["top_logprobs"]] == [3] * 5
    assert [max(top, key=top.get) for top in scores["top_logprobs"]] == scores["tokens"]
    text = offline.tokenizer.decode(tokens)
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    streamed = server.send(PATH, {**body, "stream": True}).events[:-1]
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    for field in ("token_logprobs", "text_offset"):
        assert [value for part in parts for value in part[field]] == scores[field]


def test_chats(server, offline):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]},
    ]
    prompt = "s:Be brief.;u:Say hello;a:"
    wanted = offline(prompt, max_new_tokens=9)
    body = {"messages": messages, "max_completion_tokens": 9, "temperature": 0}
    found = server.send(CHAT, {**body, "logprobs": True, "top_logprobs": 2}).document
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
    assert found["usage"]["prompt_tokens"] == wanted.prompt_tokens
    # A byte a token, whole characters or not.
    raw = [bytes(each["bytes"]) for each in choice["logprobs"]["content"]]
    assert b"".join(raw).decode(errors="replace") == wanted.text
    assert [len(each) for each in raw] == [1] * 9
    deltas = [event["choices"][0]["delta"] for event in server.send(CHAT, {**body, "stream": True}).events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == wanted.text
    # Where nobody says how long, the room that is left is the end.
    assert sum(server.send(CHAT, {"messages": messages, "ignore_eos": True}).document["usage"].values()) == 2 * 256
    refused = server.send(CHAT, {"messages": [{"role": "developer", "content": "x"}]})
    assert (refused.status, "no such role" in refused.document["error"]["message"]) == (400, True)


def test_chats_of_nobody_or_about_nothing(server):
    """Refused whatever the template would make of them, in the words of OpenAI's errors."""
    for message, field in (
        ({"role": "judge", "content": "x"}, "role"), ({"role": "tool", "content": "x"}, "role"),
        ({"role": "assistant", "content": None}, "content"), ({"role": "user"}, "content"),
        ({"role": "user", "content": []}, "content"), ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "text": "x"}]}, "content.0.type"),
    ):  # fmt: skip
        refused = server.send(CHAT, {"messages": [{"role": "user", "content": "x"}, message]})
        error = refused.document["error"]
        assert (refused.status, error["type"], error["param"]) == (
            400, "invalid_request_error", f"messages.1.{field}"
        )  # fmt: skip
        assert error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"prompt": "x" * 256}, 400, "256 tokens"),
        ({"prompt": "x" * 250, "max_tokens": 7}, 400, "together have 256"),
        ({"prompt": []}, 400, "0 prompts"),
        ({"prompt": [[]]}, 400, "without a token"),
        ({"prompt": ["x"] * 65}, 400, "65 prompts"),
        ({"prompt": [259]}, 400, "token id 259"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temprature": 1}, 400, "did you mean temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"n": 2}, 400, "n is not supported"),
        ({"best_of": 3}, 400, "best_of"),
        ({"echo": True}, 400, "echo"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"logprobs": 21}, 400, "20 tokens"),
        ({"stop": ["x"] * 17}, 400, "16 texts"),
        ({"stop": "x" * 257}, 400, "256 characters"),
        ({"stop": ""}, 400, "empty text"),
        ({"seed": 2**63}, 400, "seed"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"model": "gpt"}, 404, "there is no model 'gpt'"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_said(server, fields, status, word):
    reply = server.send(PATH, {"prompt": "x", **fields})
    assert reply.status == status
    assert word in reply.document["error"]["message"]


def test_neutral_values_are_taken(server):
    neutral = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0.0}
    fields = {**neutral, "logit_bias": {}, "user": "me", "stop": None, "seed": None, "logprobs": None, "top_k": -1}
    assert server.send(PATH, {"prompt": "x", "max_tokens": 1, "model": "tiny-chat", **fields}).status == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_lines_of_the_page(server):
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    lines = [line.strip() for line in page.splitlines() if line.startswith("    curl ")]
    assert len(lines) == 6
    for line in lines:
        command = shlex.split(line.replace(":8000", f":{server.port}"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout


def test_the_client_of_openai(server, offline):
    import openai

    with openai.OpenAI(base_url=f"{server.running.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny-chat"]
        assert client.models.retrieve("tiny-chat").id == "tiny-chat"
        wanted = offline("The old man", max_new_tokens=10)
        done = client.completions.create(model="tiny-chat", prompt="The old man", max_tokens=10, temperature=0)
        assert done.choices[0].text == wanted.text
        pieces = client.completions.create(
            model="tiny-chat", prompt="The old man", max_tokens=10, temperature=0, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == wanted.text
        wanted = offline("u:hello;a:", max_new_tokens=8)
        chat = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(
            model="tiny-chat", messages=chat, max_tokens=8, temperature=0, logprobs=True, top_logprobs=1
        )
        assert answer.choices[0].message.content == wanted.text
        assert (
            answer.choices[0].logprobs.content[0].top_logprobs[0].logprob
            == answer.choices[0].logprobs.content[0].logprob
        )
        with client.chat.completions.create(
            model="tiny-chat",
            messages=chat,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted.text
        assert chunks[-1].usage.completion_tokens == len(wanted.tokens)
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="together have 256"):
            client.completions.create(model="tiny-chat", prompt="x" * 600)


def test_killed_in_the_middle(server, offline):
    """By the real thing: who waits gets what it would have got, a stream is told, and the next one is as good."""
    long = {"prompt": "x", "max_tokens": 250, "temperature": 0, "ignore_eos": True}
    body = {"prompt": "The old man", "max_tokens": 60, "seed": 3, "ignore_eos": True}
    with closing(server.stream(PATH, long)) as stream, ThreadPoolExecutor(8) as pool:
        events = iter(stream)
        next(events)
        with server.held() as engine:
            others = [pool.submit(server.send, PATH, body) for _ in range(6)]
            # It is sent one more than it has rows for.
            server.wait_for("lapcli_waiting", 2)
            os.kill(engine, signal.SIGKILL)
        assert "SIGKILL" in list(events)[-1]["error"]["message"]
        wanted = offline("The old man", max_new_tokens=60, seed=3, temperature=1.0, eos=frozenset())
        assert {other.result().document["choices"][0]["text"] for other in others} == {wanted.text}
    assert server.metric("lapcli_active") == 0
