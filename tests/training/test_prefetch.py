"""Read ahead, a stream gives what it gives bare: sequences, states, errors and remarks, each in its place."""

import itertools
import json
import os
import signal
import threading
import time

import pytest
import torch

from lapcli.errors import DataError
from lapcli.reporting import Reporter, SilentReporter
from lapcli.training import prefetch, stream
from lapcli.training.prefetch import ReadAhead
from lapcli.training.stream import PackedSequence, TrainingStream


class Bytes:
    """A tokenizer of bytes with one separator."""

    bos_token_id, eos_token_id, bos_token, eos_token = None, 300, None, "</s>"

    def get_vocab(self):
        return {str(i): i for i in range(256)}

    def __call__(self, text, add_special_tokens=True, verbose=True):
        if isinstance(text, str):
            return {"input_ids": list(text.encode())}
        return {"input_ids": [list(each.encode()) for each in text]}


class Counted:
    """A stream of numbers, each of which waits until it may be read."""

    share = (0, 1)

    def __init__(self, free=10**9, error_at=None):
        self.given, self.error_at = 0, error_at
        self.allowed = threading.Semaphore(free)
        self.restored, self.readers = [], set()
        self.reporter: Reporter = SilentReporter()

    def __next__(self):
        self.allowed.acquire()
        self.readers.add(threading.current_thread())
        if self.given == self.error_at:
            raise OSError(f"no number {self.given}")
        self.given += 1
        return PackedSequence(torch.tensor([self.given, 0]), (0,), "numbers")

    def held_out(self, count):
        return []

    def state(self):
        return {"given": self.given}

    def restore(self, state):
        self.restored.append(state)
        self.given = state["given"]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "lapcli-read-ahead"]


@pytest.fixture(autouse=True)
def _none_left():
    assert not threads()
    yield
    assert not threads()


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    assert true()


def number(sequence):
    return int(sequence.ids[0])


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A mixture whose parts are used up again and again, in windows of a few pieces."""
    monkeypatch.setattr(stream, "WINDOW_PIECES", 16)
    for name, count in (("a", 60), ("b", 15)):
        rows = [f"<{name} {i:04d}>" + "." * (i * 7 % 40) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return f"{tmp_path}/a.jsonl:0.7,{tmp_path}/b.jsonl:0.3"


def bare(source, **settings):
    return TrainingStream(source, Bytes(), 100, seed=3, **{"reporter": SilentReporter(), **settings})


def same(one, other):
    return torch.equal(one.ids, other.ids) and (one.starts, one.source) == (other.starts, other.source)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("ahead", [1, 2, 7, 500])
def test_sequences_states_and_remarks_are_those_of_the_stream(text, ahead, rank, world):
    """Each remark is there when the sequence is that it came before, and none before that."""
    alone, under = (bare(text, rank=rank, world=world) for _ in range(2))
    alone.held_out(3)
    with ReadAhead(under, ahead) as read:
        assert read.share == (rank, world)
        assert len(read.held_out(3)) == 3
        read.begin(90)
        assert read.state() == alone.state()
        # Also those that nobody said would be taken.
        for _ in range(100):
            expected = next(alone)
            assert same(next(read), expected)
            assert read.state() == alone.state()
            assert read.reporter.notices == alone.reporter.notices
    assert len(alone.reporter.notices) == 2
    assert under.reporter is read.reporter


@pytest.mark.parametrize("taken", [0, 1, 29, 40])
def test_closed_it_leaves_the_stream_behind_what_was_taken(text, taken):
    alone, under, saved = bare(text), bare(text), bare(text)
    with ReadAhead(under, 500) as read:
        read.begin(40)
        for expected in itertools.islice(alone, taken):
            assert same(next(read), expected)
        if taken < 40:
            until(lambda: under.sequences == 40)
        saved.restore(json.loads(json.dumps(read.state())))
    assert under.state() == alone.state()
    for expected in itertools.islice(alone, 30):
        assert same(next(under), expected)
        assert same(next(saved), expected)
    # What had been said of sequences that nobody took is said when they are.
    assert under.reporter.notices == alone.reporter.notices


def test_it_begins_again_wherever_it_is_told_to(text):
    alone, under = bare(text), bare(text)
    with ReadAhead(under, 5) as read:
        read.begin(50)
        first = [next(read) for _ in range(10)]
        read.begin(50)
        first += [next(read) for _ in range(10)]
        state = read.state()
        later = [next(read) for _ in range(10)]
        read.restore(state)
        read.begin(10)
        assert all(map(same, [next(read) for _ in range(10)], later))
    assert all(map(same, first + later, itertools.islice(alone, 30)))


@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_no_more_than_it_may_is_read_ahead(ahead):
    under = Counted()
    with ReadAhead(under, ahead) as read:
        assert under.given == 0
        read.begin(100)
        for taken in range(5):
            until(lambda taken=taken: under.given == taken + ahead)
            time.sleep(0.02)
            assert under.given == taken + ahead
            assert number(next(read)) == taken + 1
        until(lambda: under.given == 5 + ahead)
    assert under.given == 5
    assert under.restored == [{"given": 5}]


def test_no_more_is_read_than_will_be_taken():
    under = Counted()
    with ReadAhead(under, 50) as read:
        read.begin(7)
        assert [number(next(read)) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 7]
        # The thread has ended by itself, and nothing has to be read again.
        assert not threads()
        read.begin(0)
        assert not threads()
    assert under.given == 7
    assert not under.restored


def test_who_takes_waits_for_a_slow_stream_and_nothing_is_read_by_whom_it_is_read_for():
    under = Counted(free=0)
    with ReadAhead(under, 3) as read:
        read.begin(5)
        timer = threading.Timer(0.05, under.allowed.release, (5,))
        timer.start()
        assert [number(next(read)) for _ in range(5)] == [1, 2, 3, 4, 5]
        timer.join()
    assert threading.current_thread() not in under.readers
    assert len(under.readers) == 1


@pytest.mark.parametrize("ahead", [1, 4, 50])
def test_an_error_comes_in_its_place_and_the_stream_may_be_asked_again(ahead):
    under = Counted(error_at=6)
    with ReadAhead(under, ahead) as read:
        read.begin(20)
        assert [number(next(read)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        for _ in range(2):
            with pytest.raises(OSError, match="no number 6"):
                next(read)
            assert read.state() == {"given": 6}
        assert not threads()
        under.error_at = None
        assert number(next(read)) == 7
        read.begin(3)
        assert [number(next(read)) for _ in range(3)] == [8, 9, 10]


def test_text_that_cannot_be_read_is_an_error_at_the_same_sequence(tmp_path):
    rows = [json.dumps({"text": f"<text {i:04d}>"}) for i in range(60)]
    rows[40] = '{"TEXT": ""}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    alone, under = bare(str(tmp_path / "a.jsonl")), bare(str(tmp_path / "a.jsonl"))
    found = []
    with ReadAhead(under, 50) as read:
        read.begin(50)
        for each in (alone, read):
            for taken in itertools.count():
                try:
                    next(each)
                except DataError as error:
                    found.append((taken, str(error), each.state()))
                    break
    assert found[0] == found[1]


def test_whoever_fails_leaves_no_thread_and_the_stream_as_it_was():
    under = Counted()

    def fail_behind_one():
        with ReadAhead(under, 5) as read:
            read.begin(50)
            next(read)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_behind_one()
    assert under.state() == {"given": 1}


def test_an_interruption_ends_the_waiting(monkeypatch):
    """Neither for a sequence nor, at the end, for a read that does not come back is there a wait."""
    monkeypatch.setattr(prefetch, "PATIENCE", 0.05)
    under = Counted(free=1)
    read = ReadAhead(under, 5)

    def wait_for_a_second():
        with read:
            read.begin(50)
            next(read)
            timer.start()
            next(read)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait_for_a_second()
        assert time.monotonic() - begun < 10
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    # It still hangs, and Python would not wait for it.
    assert all(thread.daemon for thread in threads())
    assert len(threads()) == 1
    assert read.state() == {"given": 1}
    under.allowed.release()
    until(lambda: not threads())
    assert under.given == 2


def test_remarks_are_made_by_whoever_takes():
    class Heard(SilentReporter):
        def notice(self, text):
            super().notice(f"{text} in {threading.current_thread().name}")

        def warn(self, text):
            super().warn(f"{text} in {threading.current_thread().name}")

    class Talking(Counted):
        def __next__(self):
            self.reporter.notice(f"before {self.given + 1}")
            with self.reporter.task("reading", total=1) as task:
                task.advance()
                task.note("read")
            self.reporter.warn(f"beware of {self.given + 1}")
            return super().__next__()

    under = Talking(error_at=2)
    under.reporter = heard = Heard()
    with ReadAhead(under, 5) as read:
        read.begin(5)
        me = threading.current_thread().name
        for taken in (1, 2):
            assert number(next(read)) == taken
            assert heard.notices == [f"before {each + 1} in {me}" for each in range(taken)]
            assert heard.warnings == [f"beware of {each + 1} in {me}" for each in range(taken)]
        # Also what was said before an error.
        with pytest.raises(OSError, match="number 2"):
            next(read)
        assert heard.notices[2:] == [f"before 3 in {me}"]
    assert under.reporter is heard


def test_it_needs_room_for_one():
    with pytest.raises(ValueError, match="0 sequences ahead"):
        ReadAhead(Counted(), 0)
