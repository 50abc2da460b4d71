"""The stream gives what its sources hold, the same every time, and goes on anywhere as if it had never stopped."""

import bz2
import gzip
import itertools
import json
import lzma
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch

from lapcli.data import files
from lapcli.data.builtin import load_builtin
from lapcli.data.files import read_path
from lapcli.errors import DataError
from lapcli.families.loading import load_tokenizer
from lapcli.families.source import resolve_model
from lapcli.models.loss import IGNORED, next_token_labels
from lapcli.models.tokens import Packing
from lapcli.reporting import SilentReporter
from lapcli.training import records, stream
from lapcli.training.stream import PackedSequence, TrainingStream, stack_sequences

BOS, EOS = 300, 301


class Bytes:
    """A tokenizer of bytes with both separators."""

    bos_token_id, eos_token_id = BOS, EOS
    bos_token, eos_token = "<s>", "</s>"

    def __init__(self, words: int = 256):
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self._words)}

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [[BOS] * add_special_tokens + list(each.encode()) for each in text]}
        return {"input_ids": [BOS] * add_special_tokens + list(text.encode())}


class Hub:
    """Stands in for the hub with parquet files in a folder, through `datasets` itself."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._load = datasets.load_dataset

    def head(self, _url: str, timeout: float) -> None:
        """Answer, as a reachable hub does."""

    def load(self, repository: str, config: str | None, *, split: str, streaming: bool) -> Any:
        files = sorted(map(str, (self.folder / repository.replace("/", "+")).glob("*.parquet")))
        return self._load("parquet", data_files=files, split=split, streaming=streaming)

    def add(self, repository: str, shards: list[list[str]]) -> None:
        folder = self.folder / repository.replace("/", "+")
        folder.mkdir()
        for number, texts in enumerate(shards):
            parquet.write_table(arrow.table({"text": texts}), folder / f"{number}.parquet", row_group_size=16)


def texts(count: int, name: str = "text") -> list[str]:
    """Texts of different lengths, each of which tells its number."""
    return [f"<{name} {i:04d}>" + "." * (i * 7 % 40) for i in range(count)]


def write_jsonl(path: Path, rows: list[str], pack: Callable[[bytes], bytes] = bytes) -> Path:
    path.write_bytes(pack("".join(json.dumps({"text": row}) + "\n" for row in rows).encode()))
    return path


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "WINDOW_PIECES", 16)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(datasets, "load_dataset", hub.load)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: hub)
    return hub


SOURCES = [
    "jsonl", "jsonl.gz", "jsonl.xz", "jsonl.bz2", "txt", "long-lines", "parquet", "folder",
    "hub", "wikitext", "builtin", "recall", "mixture", "long-documents",
]  # fmt: skip


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = request.param
    if kind == "jsonl":
        return str(write_jsonl(tmp_path / "a.jsonl", texts(90)))
    if kind in ("jsonl.gz", "jsonl.xz", "jsonl.bz2"):
        pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[kind[6:]]
        return str(write_jsonl(tmp_path / f"a.{kind}", texts(90), pack))
    if kind == "txt":
        path = tmp_path / "a.txt"
        path.write_text("".join(f"ligne {i} à lire\r\n" for i in range(8000)), encoding="utf-8-sig")
        return str(path)
    if kind == "long-lines":
        path = tmp_path / "a.md"
        path.write_text("".join(f"{i} " * 20_000 + "\n" for i in range(4)))
        return str(path)
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        parquet.write_table(arrow.table({"id": list(range(90)), "content": texts(90)}), path, row_group_size=20)
        return str(path)
    if kind == "folder":
        folder = tmp_path / "folder"
        (folder / "sub").mkdir(parents=True)
        for i in range(5):
            write_jsonl(folder / f"{i}.jsonl", texts(9 + i, f"f{i}"))
        write_jsonl(folder / "sub" / "z.jsonl.gz", texts(30, "z"), gzip.compress)
        (folder / "empty.txt").write_text("")
        return str(folder)
    if kind == "hub":
        request.getfixturevalue("hub").add("owner/name", [texts(40, "a"), texts(3, "b"), ["", *texts(50, "c")]])
        return "owner/name"
    if kind == "wikitext":
        pages = [[f" = Page {i} = \n", "", f" Text of {i} . \n", " = = Part = = \n", f" {'x' * (i % 9)} \n"]
                 for i in range(60)]  # fmt: skip
        lines = [line for page in pages for line in page]
        request.getfixturevalue("hub").add("Salesforce/wikitext", [lines[:101], lines[101:]])
        return "wikitext"
    if kind == "mixture":
        a, b = write_jsonl(tmp_path / "a.jsonl", texts(90, "a")), write_jsonl(tmp_path / "b.jsonl", texts(20, "b"))
        return f"{a}:0.6,{b}:0.3,recall:0.1"
    if kind == "long-documents":
        return str(write_jsonl(tmp_path / "l.jsonl", [f"{i} " * 5000 * (i + 1) for i in range(9)]))
    return kind


every_source = pytest.mark.parametrize("source", SOURCES, indirect=True, ids=SOURCES)


def long_source(source: str) -> bool:
    return source in ("builtin", "recall") or source.endswith(("a.txt", "a.md", "l.jsonl"))


def make(source: str, *, tokenizer: Any = None, **settings: Any) -> TrainingStream:
    settings = {"seq_len": 4000 if long_source(source) else 100, "seed": 3, **settings}
    return TrainingStream(source, tokenizer or Bytes(), settings.pop("seq_len"), **settings)


def take(made: TrainingStream, count: int) -> list[PackedSequence]:
    return list(itertools.islice(made, count))


def same(one: list[PackedSequence], other: list[PackedSequence]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.ids, b.ids) and (a.starts, a.source) == (b.starts, b.source)
        for a, b in zip(one, other, strict=True)
    )


def text_of(sequences: list[PackedSequence]) -> str:
    ids = itertools.chain.from_iterable(sequence.ids.tolist() for sequence in sequences)
    return bytes(ord("\n") if i == EOS else i for i in ids if i != BOS).decode(errors="replace")


# Going on


@every_source
@pytest.mark.parametrize("world", [1, 2], ids=["one-rank", "two-ranks"])
def test_goes_on_anywhere_as_if_it_had_never_stopped(source: str, world: int):
    reporter = SilentReporter()
    whole = make(source, world=world, rank=world - 1, reporter=reporter)
    held = whole.held_out(2)
    count = 120 // world
    unbroken, states = [], [whole.state()]
    for sequence in itertools.islice(whole, count):
        unbroken.append(sequence)
        states.append(json.loads(json.dumps(whole.state())))
    unbroken += take(whole, 12)
    if not long_source(source):
        assert reporter.notices, "the test is to go on in later epochs too"
    for cut in [0, *random.Random(Path(source).name).sample(range(1, count), 8), count]:
        # The state is the same on every rank: the one taken here came from the last.
        for rank in range(world):
            again = make(source, world=world, rank=rank)
            again.restore(states[cut])
            assert again.sequences == cut * world
            assert again.state() == states[cut]
        assert same(take(again, 12), unbroken[cut : cut + 12])
        assert same([*again.held_out(2)], [*held])


def test_state_is_small_and_does_not_grow(tmp_path: Path):
    made = make(f"{write_jsonl(tmp_path / 'a.jsonl', texts(5000))}:1,recall:1")
    take(made, 100)
    early = len(json.dumps(made.state()))
    take(made, 1500)
    assert len(json.dumps(made.state())) < early + 40
    assert early < 1500


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "hub", "recall"])
def test_what_is_read_again_does_not_grow_with_the_position(
    kind: str, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    read = Counter[str]()
    real_open, real_text, real_recall = files._open, records.text_of, records.recall_documents

    class Counted:
        """A file that counts the bytes that are asked of it."""

        def __init__(self, path: Path):
            self._file = real_open(path)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def seek(self, offset: int) -> None:
            self._file.seek(offset)

        def __iter__(self):
            for line in self._file:
                read["bytes"] += len(line)
                yield line

    def counted_text(*args: Any) -> str:
        read["records"] += 1
        return real_text(*args)

    class CountedTable(parquet.ParquetFile):
        def iter_batches(self, *args: Any, **settings: Any):
            for batch in super().iter_batches(*args, **settings):
                read["rows"] += batch.num_rows
                yield batch

    def counted_recall(*, seed: int):
        for document in real_recall(seed=seed):
            read["records"] += 1
            yield document

    rows = texts(6000)
    if kind == "jsonl":
        source, per_piece = str(write_jsonl(tmp_path / "a.jsonl", rows)), ("bytes", 90)
    elif kind == "txt":
        path = tmp_path / "a.txt"
        path.write_text("".join(f"line {i:06d}\n" for i in range(400_000)))
        source, per_piece = str(path), ("bytes", 16_400)
    elif kind == "parquet":
        parquet.write_table(arrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=100)
        source, per_piece = str(tmp_path / "a.parquet"), ("rows", 1)
    elif kind == "hub":
        hub.add("owner/name", [rows[i : i + 500] for i in range(0, 6000, 500)])
        source, per_piece = "owner/name", ("records", 1)
    else:
        source, per_piece = "recall", ("records", 1)

    seq_len = 20_000 if kind == "txt" else 400
    whole = make(source, seq_len=seq_len)
    states = []
    for _, state in zip(range(220), iter(lambda: (next(whole), whole.state())[1], None), strict=False):
        states.append(state)
    assert states[-1]["places"][0]["epoch"] == 0
    monkeypatch.setattr(files, "_open", Counted)
    monkeypatch.setattr(records, "text_of", counted_text)
    monkeypatch.setattr(records, "recall_documents", counted_recall)
    monkeypatch.setattr(parquet, "ParquetFile", CountedTable)
    costs = []
    for cut in (3, 100, 219):
        read.clear()
        again = make(source, seq_len=seq_len)
        again.restore(states[cut])
        next(again)
        costs.append(read[per_piece[0]])
    # Two windows of pieces at most: the one at hand, and the next where a sequence goes over its end; a sequence of
    # 400 may take some pieces more. Recall makes up to a run of documents again, parquet reads a row group and a batch.
    more = {"recall": records.RECALL_RUN, "parquet": 100 + 256}.get(kind, 0)
    bound = 3 * stream.WINDOW_PIECES * per_piece[1] + more
    assert 0 < max(costs) <= bound


def test_a_failed_read_leaves_the_stream_where_it_was(tmp_path: Path):
    rows = texts(60)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    good = path.read_bytes()
    path.write_bytes(good.replace(b'{"text": "<text 0040', b'{"TEXT": "<text 0040'))
    made = make(str(path))
    taken: list[PackedSequence] = []
    for _ in range(2):
        with pytest.raises(DataError, match="line 41 has no field 'text'"):
            taken.extend(made)
        assert made.sequences == len(taken) > 0
    path.write_bytes(good)
    taken += take(made, 5)
    assert same(taken, take(make(str(path)), len(taken)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 64}, "seq_len was 100 and is 64"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"text_field": "text"}, "text_field was None and is text"),
        ({"tokenizer": Bytes(255)}, "tokenizer was [0-9a-f]{12} and is [0-9a-f]{12}"),
        ({"seed": 4, "seq_len": 64}, "seq_len was 100 and is 64; seed was 3 and is 4"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_another_stream_is_refused_and_what_differs_named(tmp_path: Path, change: dict[str, Any], message: str):
    source = str(write_jsonl(tmp_path / "a.jsonl", texts(90)))
    state = make(source).state()
    with pytest.raises(DataError, match=message):
        make(source, **change).restore(state)


def test_another_source_or_content_is_refused(tmp_path: Path):
    a, b = (write_jsonl(tmp_path / f"{name}.jsonl", texts(90)) for name in "ab")
    state = make(str(a)).state()
    with pytest.raises(DataError, match=r"source was .*a\.jsonl and is .*b\.jsonl"):
        make(str(b)).restore(state)
    with a.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(DataError, match=r"what .*a\.jsonl holds has changed"):
        make(str(a)).restore(state)
    with pytest.raises(DataError, match="version 99"):
        make(str(b)).restore({**state, "version": 99})


def test_another_number_held_out_is_refused(tmp_path: Path):
    source = str(write_jsonl(tmp_path / "a.jsonl", texts(90)))
    first = make(source)
    first.held_out(3)
    other = make(source)
    other.held_out(2)
    with pytest.raises(DataError, match="held_out was 3 and is 2"):
        other.restore(first.state())


# What the sequences are


@pytest.mark.parametrize("kind", ["jsonl", "folder", "hub"])
def test_an_epoch_is_every_document_once(kind: str, tmp_path: Path, hub: Hub):
    rows = texts(90)
    if kind == "jsonl":
        source = str(write_jsonl(tmp_path / "a.jsonl", rows))
    elif kind == "folder":
        (tmp_path / "f").mkdir()
        for i in range(9):
            write_jsonl(tmp_path / "f" / f"{i}.jsonl", rows[10 * i : 10 * i + 10])
        source = str(tmp_path / "f")
    else:
        hub.add("owner/name", [rows[:50], rows[50:]])
        source = "owner/name"
    per_epoch = sum(len(row) + 2 for row in rows)
    made = take(make(source, seq_len=50), 3 * per_epoch // 50)
    found = text_of(made).split("\n")
    epochs = [found[i : i + 90] for i in (0, 90, 180)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == rows
    assert epochs[0] != epochs[1] != sorted(epochs[1])
    # Windows are cut elsewhere in later epochs, so that other documents share one.
    assert set(epochs[0][:16]) != set(epochs[1][:16])


def test_each_epoch_has_an_order_of_its_own(tmp_path: Path):
    """Of a source that fits in one window, whose first is whole or not as chance has it."""
    rows = texts(12)
    source = str(write_jsonl(tmp_path / "a.jsonl", rows))
    found = text_of(take(make(source, seq_len=50), 12 * sum(len(row) + 2 for row in rows) // 50)).split("\n")
    epochs = [tuple(found[i : i + 12]) for i in range(0, 120, 12)]
    assert len(set(epochs)) == 10


def test_files_of_a_folder_are_drawn_anew_each_epoch(tmp_path: Path):
    for i in range(8):
        write_jsonl(tmp_path / f"{i}.jsonl", texts(30, f"file{i}"))
    reader = records.open_records(str(tmp_path), seed=0)
    orders = [list(dict.fromkeys(record.text[5] for record in reader.read({}, random.Random(epoch)))) for epoch in "01"]
    assert orders[0] != sorted(orders[0]) == sorted(orders[1]) != orders[1]
    assert orders[0] != orders[1]
    found = text_of(take(make(str(tmp_path)), 240 * 3 * 33 // 100)).split("\n")
    seen = [list(dict.fromkeys(row[5] for row in found[i : i + 240] if len(row) > 5)) for i in (0, 240)]
    assert seen[0] != sorted(seen[0])
    assert seen[0] != seen[1]


def test_it_says_once_that_a_source_begins_again(tmp_path: Path):
    reporter = SilentReporter()
    source = str(write_jsonl(tmp_path / "a.jsonl", texts(20)))
    made = make(source, reporter=reporter)
    take(made, 40)
    assert len(reporter.notices) == 1
    assert "a.jsonl' is used up after 630 tokens and begins again" in reporter.notices[0]
    again = make(source, reporter=reporter)
    again.restore(made.state())
    take(again, 40)
    assert len(reporter.notices) == 1


@pytest.mark.parametrize("source", ["jsonl", "mixture", "long-documents", "builtin"], indirect=True)
def test_how_many_pieces_are_tokenised_together_changes_nothing(source: str, monkeypatch: pytest.MonkeyPatch):
    def sequences(tokenizer: Any) -> tuple[list[PackedSequence], dict[str, Any]]:
        made = make(source, tokenizer=tokenizer)
        made.held_out(2)
        return take(made, 40), made.state()

    for tokenizer in (Bytes(), load_tokenizer(resolve_model("demo:gdn"))):
        found = []
        for characters in (1, 100, stream.ENCODED_CHARACTERS):
            monkeypatch.setattr(stream, "ENCODED_CHARACTERS", characters)
            found.append(sequences(tokenizer))
        assert all(same(one, found[0][0]) and state == found[0][1] for one, state in found)


def test_boundaries_are_where_documents_begin(tmp_path: Path):
    made = take(make(str(write_jsonl(tmp_path / "a.jsonl", texts(90)))), 60)
    for sequence in made:
        assert sequence.ids.shape == sequence.position_ids.shape == (100,)
        begins = [i for i, token in enumerate(sequence.ids.tolist()) if token == BOS]
        assert set(sequence.starts) == {0, *begins}
        assert (sequence.position_ids == 0).nonzero().flatten().tolist() == list(sequence.starts)
        assert sequence.cu_seqlens.tolist() == [*sequence.starts, 100]
    assert any(sequence.ids[0] != BOS for sequence in made)


def test_pieces_of_a_long_document_are_documents_of_their_own(tmp_path: Path):
    source = str(write_jsonl(tmp_path / "a.jsonl", [f"{letter} " * 20_000 for letter in "ab"]))
    made = take(make(source, seq_len=80_004), 1)[0]
    assert made.ids.tolist().count(BOS) == made.ids.tolist().count(EOS) == 2
    assert len(made.starts) == 6
    for start, end in itertools.pairwise(made.cu_seqlens.tolist()):
        assert len(set(made.ids[start:end].tolist()) & {ord("a"), ord("b")}) == 1


def test_batch_is_what_models_read(tmp_path: Path):
    sequences = take(make(str(write_jsonl(tmp_path / "a.jsonl", texts(90)))), 3)
    batch = stack_sequences(sequences)
    assert {name: part.shape for name, part in batch.items()} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (3, 100)
    )
    packing = Packing.of(None, batch["position_ids"], 3, 100)
    assert packing is not None
    assert packing.bounds == [100 * i + start for i in range(3) for start in sequences[i].starts] + [300]
    # The labels already leave out what no document may predict of the next one.
    expected = next_token_labels(batch["input_ids"], packing=packing)
    assert torch.equal(next_token_labels(batch["labels"]), expected)
    assert (batch["labels"][batch["labels"] != IGNORED] == batch["input_ids"][batch["labels"] != IGNORED]).all()


@every_source
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_see_what_one_rank_sees(source: str, world: int):
    one = take(make(source), 24)
    for rank in range(world):
        assert same(take(make(source, rank=rank, world=world), 24 // world), one[rank::world])


@every_source
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_ranks_goes_on_with_the_same_sequences(source: str, before: int, after: int):
    whole = make(source)
    held = [*whole.held_out(2)]
    unbroken = take(whole, 36)
    first = make(source, rank=before - 1, world=before)
    first.held_out(2)
    take(first, 12 // before)
    state = json.loads(json.dumps(first.state()))
    for rank in range(after):
        again = make(source, rank=rank, world=after)
        again.restore(state)
        assert same(take(again, 24 // after), unbroken[12 + rank :: after])
        assert same([*again.held_out(2)], held)
        assert again.sequences == 36


def test_mixture_keeps_its_shares_by_tokens(tmp_path: Path):
    a, b = (write_jsonl(tmp_path / f"{name}.jsonl", texts(200, name)) for name in "ab")
    made = make(f"{a}:3,{b}:1")
    taken = take(made, 40)
    of_b = [sequence.source == str(b) for sequence in taken]
    assert all(sum(of_b[i : i + 4]) == 1 for i in range(0, 40, 4))
    again = make(f"{a}:3,{b}:1")
    again.restore(made.state())
    assert sum(sequence.source == str(b) for sequence in take(again, 4)) == 1


def test_seeds_give_orders_and_folders_do_not(tmp_path: Path):
    one = write_jsonl(tmp_path / "a.jsonl", texts(90))
    (tmp_path / "moved").mkdir()
    moved = write_jsonl(tmp_path / "moved" / "a.jsonl", texts(90))
    ids = [
        [s.ids.tolist() for s in take(make(str(path), seed=seed), 9)] for path, seed in ((one, 3), (moved, 3), (one, 4))
    ]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


@pytest.mark.parametrize("source", [s for s in SOURCES if s not in ("hub", "wikitext", "recall", "builtin", "mixture")],
                         indirect=True)  # fmt: skip
def test_records_are_those_of_the_package_readers(source: str):
    given = records.open_records(source, seed=0).read({}, random.Random(0))
    assert Counter(record.text for record in given) == Counter(document.text for document in read_path(Path(source)))


# Held out


def whole_documents(sequences: list[PackedSequence]) -> set[tuple[int, ...]]:
    """Those that stand uncut in a sequence."""
    found = {
        tuple(sequence.ids[start:end].tolist())
        for sequence in sequences
        for start, end in itertools.pairwise(sequence.cu_seqlens.tolist())
    }
    return {ids for ids in found if ids[0] == BOS and ids[-1] == EOS}


@every_source
def test_held_out_is_the_first_and_is_never_given(source: str):
    made = make(source)
    held = [*made.held_out(3)]
    assert same(held, take(make(source), 3))
    assert same(held, [*make(source, world=2, rank=1).held_out(3)])
    assert made.sequences == 0
    kept = whole_documents(held)
    assert kept or long_source(source)
    given = take(made, 100)
    assert not whole_documents(given) & kept
    again = make(source)
    again.restore(made.state())
    assert not whole_documents(take(again, 50)) & kept


def test_no_text_held_out_comes_back_in_any_epoch(tmp_path: Path):
    rows = texts(90)
    made = make(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    held = text_of([*made.held_out(4)])
    kept = {row for row in rows if row[:11] in held}
    assert 5 < len(kept) < 30
    given = text_of(take(made, 150))
    counts = [given.count(row[:11]) for row in rows if row not in kept]
    assert not [row for row in kept if row[:11] in given]
    assert min(counts) >= 3, "all others come in every epoch"


def test_a_file_named_twice_in_a_mixture_gives_nothing_away(tmp_path: Path):
    (tmp_path / "f").mkdir()
    rows = texts(90)
    path = write_jsonl(tmp_path / "f" / "a.jsonl", rows)
    made = make(f"{path}:1,{path.parent}:1")
    held = text_of([*made.held_out(4)])
    given = text_of(take(made, 150))
    assert not [row for row in rows if row[:11] in held and row[:11] in given]


def test_holding_out_comes_first_and_has_bounds(tmp_path: Path):
    source = str(write_jsonl(tmp_path / "a.jsonl", texts(20)))
    made = make(source)
    with pytest.raises(DataError, match="holds 630 tokens, too few for the sequences of 100 to be held out"):
        made.held_out(7)
    next(made)
    with pytest.raises(ValueError, match="2 sequences are to be held out of a stream that held out 0"):
        made.held_out(2)
    nearly_all = make(source)
    nearly_all.held_out(6)
    with pytest.raises(DataError, match="beside those held out, less than one sequence of 100"):
        next(nearly_all)


# Bad input and bounds


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("a.txt", b"good\nbad \xff\n", id="text-not-utf8"),
        pytest.param("a.jsonl", b'{"text": "g"}\n{"text": "\xe9"}\n', id="jsonl-not-utf8"),
        pytest.param("a.jsonl", b'{"text": "g"}\n{"body": "x", "id": 1}\n', id="no-field"),
        pytest.param("a.jsonl", b'{"text": null}\n', id="null"),
        pytest.param("a.jsonl", b'["text"]\n', id="not-an-object"),
        pytest.param("a.jsonl", b'{"text": \n', id="not-json"),
        pytest.param("a.jsonl.gz", gzip.compress(b'{"text": "some"}\n' * 50)[:-20], id="truncated-gz"),
        pytest.param("a.jsonl.xz", lzma.compress(b'{"text": "some"}\n' * 500)[:-60], id="truncated-xz"),
        pytest.param("a.jsonl.xz", b"no xz at all", id="foreign-xz"),
        pytest.param("a.parquet", b"PAR1 not really", id="foreign-parquet"),
        pytest.param("a.csv", b"a,b\n", id="unknown-kind"),
        pytest.param("folder", None, id="empty-folder"),
    ],
)
def test_bad_files_get_the_words_of_the_package_readers(tmp_path: Path, name: str, content: bytes | None):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(DataError) as expected:
        list(read_path(path))
    with pytest.raises(DataError) as caught:
        take(make(str(path), seq_len=100_000), 1)
    assert str(caught.value) == str(expected.value)


def test_bad_hub_is_named_with_how_far_reading_had_come(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.add("owner/name", [texts(60)])
    made = make("owner/name")
    take(made, 3)
    again = make("owner/name")
    again.restore(made.state())

    def lost(*_: Any) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", lambda _: iter(lost, None))
    with pytest.raises(DataError, match=r"the network failed .* of data set 'owner/name'"):
        next(again)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("recal", "Did you mean 'recall'"),
        ("recall:1,nothing.txt:1", r"'nothing\.txt' is neither"),
        ("recall:1,builtin", "builtin has no weight"),
    ],
)
def test_unknown_sources_are_refused_before_any_reading(source: str, message: str):
    with pytest.raises(DataError, match=message):
        make(source)


def test_a_check_looks_at_what_is_local_and_takes_nothing(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some.jsonl").write_text("".join(f'{{"text": "{i} and 100 tokens. {"x" * 80}"}}\n' for i in range(40)))
    hub.add("owner/name", [texts(60)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_arguments, **_options: pytest.fail("the hub was asked"))
    source = f"{tmp_path / 'some.jsonl'}:0.5,owner/name:0.5"
    stream = make(source)
    before = stream.state()
    # Every other sequence is of the file, and one is left; 40 documents hold 40 at the most.
    stream.check(60)
    assert stream.state() == before
    assert stream.held_out(0) == ()
    with pytest.raises(DataError, match=r"some\.jsonl' holds \d+ tokens beside those held out"):
        make(source).check(80)
    with pytest.raises(DataError, match="too few for the sequences of 100 to be held out"):
        make(source).check(120)
    stream.refuse_other(before)
    with pytest.raises(DataError, match="seed was 3 and is 4"):
        make(source, seed=4).refuse_other(before)


def test_too_little_text_says_how_much_there_is(tmp_path: Path):
    (tmp_path / "tiny.txt").write_text("tiny")
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(
        DataError, match=r"tiny\.txt' holds 6 tokens, less than one sequence of 100(?s:.)*--seq-len to 6"
    ):
        next(make(str(tmp_path / "tiny.txt")))
    with pytest.raises(DataError, match=r"none\.txt' holds 0 tokens"):
        next(make(str(tmp_path / "none.txt")))
    with pytest.raises(DataError, match="--seq-len is 1"):
        make("recall", seq_len=1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        make("recall", rank=2, world=2)


def test_builtin_gives_nothing_of_its_own_held_out_part():
    given = text_of(take(make("builtin", seq_len=100_000), 4))
    held = [document.text for document in load_builtin().heldout]
    assert len(given) > 390_000
    assert not [text for text in held if text in given]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path):
    def peak(rows: int) -> int:
        source = str(write_jsonl(tmp_path / f"{rows}.jsonl", ["words " * 100] * rows))
        made = make(source, seq_len=6000)
        next(made)
        tracemalloc.start()
        for _ in range(rows * 602 // 6000 - 1):
            next(made)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    small, large = peak(500), peak(5000)
    # Ten times the text; without a bound it would be some 3 MB more.
    assert large < small + 200_000
