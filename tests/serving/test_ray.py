"""The recipe for Ray Serve with two replicas on this machine. Ray is in no extra; without it this is skipped."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "serve" / "ray.yaml"

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Where the recipe serves, at another port."""
    command = Path(sys.executable).with_name("serve")
    if not command.exists():
        pytest.skip("Ray is installed without Serve")
    folder = tmp_path_factory.mktemp("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = RECIPE.read_text()
    assert text.count("port: 8000") == 1
    (folder / "ray.yaml").write_text(text.replace("port: 8000", f"port: {port}"))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [command, "run", folder / "ray.yaml"], stdout=log, stderr=log, env=environment, cwd=folder
        )
    found = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 240
    try:
        while not answers(found):
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < until, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False


def complete(url, **fields):
    body = json.dumps({"prompt": "The old man", "max_tokens": 30, "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def engines():
    """Processes of engines that Ray's replicas started."""
    import psutil

    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "lapcli.serving.worker" in (process.info["cmdline"] or ())
        and any("ray" in " ".join(parent.cmdline()).lower() for parent in process.parents()[:1])
    ]


@pytest.mark.slow
def test_two_replicas_answer_alike_and_outlive_an_engine(url):
    until = time.monotonic() + 120
    while len(engines()) < 2:
        assert time.monotonic() < until
        time.sleep(0.5)

    def text(_):
        return json.loads(complete(url))["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(text, range(24)))) == 1
        wanted = text(0)
        pieces = complete(url, stream=True)
        assert pieces.endswith("data: [DONE]\n\n")
        shown = [json.loads(line[6:]) for line in pieces.splitlines() if line.startswith("data: {")]
        assert "".join(each["choices"][0]["text"] for each in shown) == wanted
        asked = [pool.submit(text, number) for number in range(12)]
        engines()[0].kill()
        assert {each.result() for each in asked} == {wanted}
