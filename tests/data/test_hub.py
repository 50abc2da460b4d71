"""Hub data sets, with `datasets.load_dataset` replaced: what is asked for, and what is said when it fails."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import datasets
import huggingface_hub
import pytest
from datasets.exceptions import DatasetNotFoundError

from lapcli.data.hub import SHORT_NAMES, find_hub_set
from lapcli.data.sources import open_source
from lapcli.errors import DataError


class Hub:
    """Stands in for the hub."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.rows: list[Any] = []
        self.fails: Exception | None = None
        self.breaks: Exception | None = None

    def head(self, _url: str, timeout: float) -> None:
        """Answer, as a reachable hub does."""

    def load(self, repository: str, config: str | None, *, split: str, streaming: bool) -> Iterator[Any]:
        self.asked.append((repository, config, split, streaming))
        if self.fails is not None:
            raise self.fails
        return self._rows()

    def _rows(self) -> Iterator[Any]:
        yield from self.rows
        if self.breaks is not None:
            raise self.breaks


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: hub)
    return hub


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_short_names_stream_their_data_set(hub: Hub, name: str):
    hub.rows = [{"text": "first page\n"}]
    assert [document.text for document in open_source(name)] == ["first page\n"]
    assert hub.asked == [(SHORT_NAMES[name].repository, SHORT_NAMES[name].config, "train", True)]


def test_any_id_with_configuration_and_split(hub: Hub):
    hub.rows = [{"content": "x"}]
    assert [document.name for document in open_source("owner/name#en", split="validation")] == ["owner/name#en:1"]
    assert hub.asked == [("owner/name", "en", "validation", True)]


@pytest.mark.parametrize("name", ["no-slash", "a/b/c", "/a", "a/", "a b/c"])
def test_what_is_no_id(name: str):
    assert find_hub_set(name) is None


def test_wikitext_lines_are_joined_to_pages(hub: Hub):
    lines = ["", " = One = \n", " Text of one . \n", " = = Section = = \n", " More . \n", " = Two = \n", " Text . \n"]
    hub.rows = [{"text": line} for line in lines]
    pages = [document.text for document in open_source("wikitext")]
    assert pages == ["".join(lines[1:5]), "".join(lines[5:])]


def offline() -> Exception:
    error = DatasetNotFoundError("Couldn't reach 'x' on the Hub")
    error.__cause__ = ConnectionError("Name or service not known")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(
            DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub."), "is gated.*hf auth login", id="gated"
        ),
        pytest.param(DatasetNotFoundError("Dataset 'x' doesn't exist on the Hub"), "is not on the hub", id="vanished"),
        pytest.param(
            ConnectionError("Name or service not known"), "the network failed before the first record", id="offline"
        ),
        pytest.param(offline(), "the network failed before the first record", id="offline-as-not-found"),
        pytest.param(
            ValueError('Unknown split "tren".'), 'cannot be read: ValueError: Unknown split "tren"', id="split"
        ),
    ],
)
def test_what_the_hub_refuses_is_said(hub: Hub, error: Exception, message: str):
    hub.fails = error
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        next(open_source("fineweb"))
    assert "fineweb" in str(caught.value)


def test_without_a_network_it_fails_at_once_and_in_one_message():
    """With the client itself, in a fresh process; the address is reserved for names that do not exist."""
    program = (
        "from lapcli.data.sources import open_source\n"
        "from lapcli.errors import DataError\n"
        "try:\n    next(open_source('fineweb'))\nexcept DataError as error:\n    print(error.message)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://hub.invalid"}
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "the network failed before the first record of data set 'fineweb'" in ended.stdout
    assert ended.stderr == ""
    # Its own attempts alone would wait 23 seconds.
    assert time.monotonic() - started < 20


def test_what_the_client_says_before_it_tries_again_is_not_shown(hub: Hub, caplog: pytest.LogCaptureFixture):
    client = logging.getLogger("huggingface_hub.utils._http")

    def rows() -> Iterator[Any]:
        client.warning("Retrying in 1s [Retry 1/5].")
        yield {"text": "a"}

    hub._rows = rows
    assert [document.text for document in open_source("pile")] == ["a"]
    assert not caplog.records
    client.warning("of another caller")
    assert caplog.messages == ["of another caller"]


def test_network_lost_in_mid_stream_says_where(hub: Hub):
    hub.rows, hub.breaks = [{"text": "a"}, {"text": "b"}], TimeoutError("timed out")
    documents = open_source("pile")
    assert [next(documents).text for _ in range(2)] == ["a", "b"]
    with pytest.raises(DataError, match="the network failed after 2 records of data set 'pile'"):
        next(documents)


def test_missing_field_names_the_record(hub: Hub):
    hub.rows = [{"text": "a"}, {"url": "b"}]
    with pytest.raises(DataError, match="record 2 has no field 'text' or 'content'; its fields are url"):
        list(open_source("pg19"))
