"""Requests made up from the server's own description, right and wrong: each is answered, and none does harm."""

import json
import random

import pytest

PATHS = ("/v1/completions", "/v1/chat/completions")
WRONG = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**70,
    1.5,
    1e308,
    "",
    "x",
    "\x00",
    "🙂",
    [],
    [[]],
    [None],
    {},
    {"a": [1]},
    "x" * 2000,
]


def resolve(schema, components):
    while "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    return schema


def made(schema, components, draw, depth=0):
    """A value that a schema allows."""
    schema = resolve(schema, components)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return made(draw.choice(schema[choice]), components, draw, depth)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = min(schema.get("maximum", 9), schema.get("exclusiveMaximum", 9), 9)
    if kind == "integer":
        return draw.randint(max(int(low), -9), int(high))
    if kind == "number":
        return draw.uniform(low, high)
    if kind == "boolean":
        return draw.random() < 0.5
    if kind == "string":
        return "".join(draw.choices("abc é🙂\n", k=draw.randint(schema.get("minLength", 0), 9)))
    if kind == "array":
        return [
            made(schema["items"], components, draw, depth + 1)
            for _ in range(draw.randint(schema.get("minItems", 0), 3))
        ]
    if kind == "object":
        needed = schema.get("required", ())
        found = {
            name: made(part, components, draw, depth + 1)
            for name, part in schema.get("properties", {}).items()
            if name in needed or draw.random() < 0.3
        }
        if isinstance(schema.get("additionalProperties"), dict):
            found["k"] = made(schema["additionalProperties"], components, draw, depth + 1)
        return found
    return None


def spoiled(value, draw):
    """A value with one place of it wrong."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(list(value))
        return {**value, name: spoiled(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.5:
        place = draw.randrange(len(value))
        return [*value[:place], spoiled(value[place], draw), *value[place + 1 :]]
    return draw.choice(WRONG)


@pytest.mark.parametrize("path", PATHS)
def test_made_up_requests(scripted, path):
    draw = random.Random(path)
    statuses = []
    with scripted(rows=8, pace=0.0) as server:
        document = server.send("/openapi.json").document
        components = document["components"]["schemas"]
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for number in range(150):
            body = made(schema, components, draw)
            body = spoiled(body, draw) if number % 2 else body
            reply = server.send(path, json.dumps(body).encode())
            statuses.append(reply.status)
            assert reply.status in (200, 400, 404), (reply, body)
            if reply.status != 200:
                assert set(reply.document["error"]) == {"message", "type", "param", "code"}
            elif isinstance(body, dict) and body.get("stream"):
                assert reply.events[-1] == "[DONE]"
            else:
                assert reply.document["choices"]
        assert server.send("/health").status == 200
        assert server.metric("lapcli_engine_restarts_total") == 0
        assert server.metric("lapcli_active") == 0
    assert {200, 400} <= set(statuses) or path == PATHS[1]
