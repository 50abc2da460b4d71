"""An engine is measured before there is one: here on a device that is only thought of, which counts and refuses."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lapcli.errors import LapcliError, ModelError
from lapcli.families.loading import load_model, resolve_model
from lapcli.runtime import Engine
from lapcli.runtime.steps import Steps
from lapcli.serving import trials
from lapcli.serving.memory import Limits, Room, RowBytes, usual_length
from lapcli.serving.settings import EngineSettings
from lapcli.serving.trials import CudaMemory, Model, engine_that_fits, out_of_memory, place, shortly
from lapcli.serving.worker import _engine, prepare
from lapcli.testing.dual_state import tiny_conversion, tiny_source
from lapcli.testing.serving import local_server

# Each engine is made after a collection.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

WEIGHTS = 10**6
LENGTH = 1024
SAID = (
    "CUDA out of memory. Tried to allocate 1.30 GiB. GPU 0 has a total capacity of 139.80 GiB of which 138.36 GiB is "
    "free. 2.00 GiB allowed; Of the allocated memory 645.83 MiB is allocated by PyTorch"
)


class Device:
    """Counts what engines would take of a GPU.

    Args:
        limit: bytes.
        token: that a pass takes for each token.
        score: that drawing takes for each score.
        row: that a step takes for each row.
        captured: that the first step keeps, as its graph.
        rounding: that each engine takes more than its tensors.
        tuned: that the first pass of all takes once.
    """

    def __init__(self, limit, *, token=1000, score=48, row=0, captured=50_000, rounding=0, tuned=0):
        self.limit, self.token, self.score, self.row = limit, token, score, row
        self.captured, self.rounding = captured, rounding
        self.tuned, self.now, self.peak = tuned, WEIGHTS, WEIGHTS
        self.engines, self.passes, self.steps = [], [], []

    def settled(self):
        self.engines = [each for each in self.engines if each[0]() is not None]
        self.now = WEIGHTS + sum(each[1] for each in self.engines)
        return self.now

    def begin(self):
        self.peak = self.now

    def most(self):
        return self.peak

    def take(self, count):
        """For a while."""
        if self.now + count > self.limit:
            raise torch.OutOfMemoryError(SAID)
        self.peak = max(self.peak, self.now + count)

    def hold(self, owner, count):
        """As long as the owner is there."""
        self.settled()
        self.take(count)
        self.engines.append((weakref.ref(owner), count))
        self.settled()

    def made(self, engine):
        """Let an engine take what it takes."""
        held = engine.nbytes()
        self.hold(engine, held["states"] + held["convolutions"] + held["attention"] + self.rounding)
        assert sum(isinstance(each[0](), Engine) for each in self.engines) == 1, "two engines at a time"
        for prefiller in {
            id(each): each for each in (engine.plan.prefiller, *engine.plan.prefillers.values())
        }.values():
            forward = prefiller.forward

            def counted(tokens, cache, seen, forward=forward):
                self.passes.append(tuple(tokens.shape))
                self.take(tokens.numel() * self.token + self.tuned)
                self.tuned = 0
                return forward(tokens, cache, seen)

            prefiller.forward = counted
        return engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_source("llama", tmp_path_factory.mktemp("trials") / "llama", max_position_embeddings=LENGTH)


@pytest.fixture
def on(monkeypatch):
    """Lets engines of a model take what a device counts; gives what they are made of."""

    def begin_on(device, loaded, rows=None):
        class Counted(Steps):
            def run(self, count, mode="logits", *, longest=None):
                device.steps.append(count)
                together = min(count, max(1, (self.choices.scores or 2**21) // 300))
                device.take(together * 300 * device.score + count * device.row)
                if not hasattr(self, "captured"):
                    self.captured = True
                    device.hold(self, device.captured)
                return super().run(count, mode, longest=longest)

        def choosing(logits, positions, choices, mode):
            together = min(len(logits), max(1, (choices.scores or 2**21) // 300))
            device.take(together * 300 * device.score)

        monkeypatch.setattr(trials, "Steps", Counted)
        monkeypatch.setattr(trials, "choose", choosing)

        def make(room):
            return device.made(
                Engine(loaded, max_rows=room.rows, max_length=LENGTH, kv_bytes=room.row_bytes, scores=room.scores)
            )

        probe = Engine(loaded, max_length=LENGTH)
        sizes = [probe.row_bytes(tokens) for tokens in (usual_length(LENGTH), LENGTH)]
        return Model(make, WEIGHTS, RowBytes(probe.slot_bytes, *sizes), 300)

    return begin_on


def begun(engine, piece):
    """As a server begins: all graphs, and the longest prompt."""
    trials.warm_prompts(engine, piece)


def test_requests_get_what_was_measured_to_be_left(on, llama):
    device = Device(20 * 10**6)
    model = on(device, load_model(llama))
    limits = Limits(device.limit, WEIGHTS, None, 512)
    engine, room, needs = engine_that_fits(model, device, limits, Room(64, None, 512), begun)
    # A pass of 512 tokens; a step of 64 rows, whose graph stays, and as many scores for first tokens.
    assert needs.measured
    assert needs.kept == device.captured
    assert needs.pass_token == pytest.approx(1000 - model.row.longest / 512, abs=1)
    assert needs.step_fixed == 64 * 300 * 48
    assert {(1, 512), (1, 511), (256, 2)} <= {*device.passes}
    assert 64 in device.steps
    pages = engine.pages.count * engine.pages.page_bytes
    beside = max(512 * 1000, needs.step_fixed + room.rows * needs.step_row)
    assert room.rows * model.row.usual <= pages <= device.limit - WEIGHTS - needs.kept - beside
    assert pages + model.row.longest + engine.pages.page_bytes > device.limit - WEIGHTS - needs.kept - beside
    device.hold(engine, device.captured)
    device.take(beside)


def test_it_is_as_long_a_piece_as_fits(on, llama):
    """Halved where a pass runs out of memory, where too little is left, and to leave more; not below what is asked."""
    loaded, pieces = load_model(llama), {}
    for limit, easy in ((10**8, True), (12 * 10**6, True), (12 * 10**6, False), (7 * 10**6, False), (2 * 10**6, True)):
        device = Device(limit, token=20_000)
        model = on(device, loaded)
        limits = Limits(limit, WEIGHTS, None, 512, easy=easy)
        guess = Room(2, None, 512, 1024)
        if limit == 2 * 10**6:
            with pytest.raises(ModelError, match=r"a pass of 64 tokens|bytes hold"):
                engine_that_fits(model, device, limits, guess, begun)
            continue
        _, room, _ = engine_that_fits(model, device, limits, guess, begun)
        pieces[limit, easy] = room.piece
    assert list(pieces.values()) == [512, 128, 512, 256]


def test_a_step_that_runs_out_of_memory_draws_fewer_scores_then_fewer_rows(on, llama):
    loaded = load_model(llama)
    device = Device(6 * 10**6, token=10, score=10_000)
    model = on(device, loaded)
    _, room, _ = engine_that_fits(
        model, device, Limits(device.limit, WEIGHTS, None, 64), Room(8, None, 64, 2048), begun
    )
    # Of one row.
    assert room.scores == 512
    device = Device(6 * 10**6, token=10, score=100, row=10**6)
    limits = Limits(device.limit, WEIGHTS, None, 64)
    _, room, _ = engine_that_fits(on(device, loaded), device, limits, Room(8, None, 64, 512), begun)
    assert (max(device.steps), room.rows) == (8, 4)
    device = Device(4 * 10**6, token=10, score=10_000)
    with pytest.raises(ModelError, match=r"a step of 8 rows ran out of memory .*Tried to allocate 1.30 GiB\n"):
        engine_that_fits(
            on(device, loaded), device, Limits(device.limit, WEIGHTS, 8, 64), Room(8, None, 64, 2048), begun
        )


def test_an_engine_that_takes_more_than_its_tensors_is_made_smaller(on, llama):
    """The allocator rounds, which only the engine itself shows; and one that runs out as it begins has less."""
    loaded = load_model(llama)
    sizes = {}
    for rounding, fails in ((0, 0), (5 * 10**5, 0), (0, 2)):
        device, failed = Device(12 * 10**6), []
        model = on(device, loaded)

        def begin(engine, piece, fails=fails, failed=failed):
            begun(engine, piece)
            if len(failed) < fails:
                failed.append(1)
                raise RuntimeError("Triton Error [CUDA]: out of memory")

        real, made = model.make, []

        def make(room, device=device, real=real, made=made, rounding=rounding):
            # Not the one that is measured on.
            device.rounding = rounding if room.rows > 1 else 0
            made.append(room.rows)
            return real(room)

        limits = Limits(device.limit, WEIGHTS, None, 256)
        engine, room, _ = engine_that_fits(model._replace(make=make), device, limits, Room(32, None, 256), begin)
        sizes[rounding, fails] = engine.pages.count * engine.pages.page_bytes
        assert len(made) == 3 + (rounding > 0) + fails
        assert device.settled() + device.captured + sum(room.beside[1:]) <= device.limit
    whole, rounded, late = sizes.values()
    page = engine.pages.page_bytes
    assert abs(whole - rounded - 5 * 10**5) <= page
    # Twice a sixteenth of all.
    assert abs(whole - late - 15 * 10**5) <= page


def test_tuning_kernels_is_no_part_of_what_is_measured(on, llama):
    loaded = load_model(llama)
    found = []
    for tuned in (0, 10**7):
        device = Device(16 * 10**6, tuned=tuned)
        model, limits = on(device, loaded), Limits(16 * 10**6, WEIGHTS, None, 256)
        found.append(engine_that_fits(model, device, limits, Room(32, None, 256), begun)[1:])
    assert found[0] == found[1]


def test_a_defect_is_no_want_of_memory(on, llama, monkeypatch):
    device = Device(16 * 10**6)
    model = on(device, load_model(llama))
    monkeypatch.setattr(device, "take", lambda count: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine_that_fits(model, device, Limits(device.limit, WEIGHTS, None, 256), Room(4, None, 256), begun)


@pytest.mark.parametrize("kind", ["gdn", "conversion"])
def test_a_server_on_a_gpu_begins_so(kind, folder, tmp_path):
    """The whole of it but for the device: its settings, an estimate to begin with, and what it tells."""
    settings = EngineSettings(str(folder), "cpu", "float32", max_length=256, memory=8 * 10**6, piece=128)
    if kind == "conversion":
        root = tiny_conversion(tmp_path / "dir")
        settings = replace(settings, model=str(root / "base"), conversion=str(root), configurations=[0, 3])
    from lapcli.serving.worker import _load

    model = _load(settings, resolve_model(settings.model), torch.device("cpu"))
    device, made = Device(settings.memory, token=500), []
    made_by = Engine.__init__

    def noted(self, *arguments, **options):
        made_by(self, *arguments, **options)
        # On a GPU no row is gathered by its index.
        for sub in self.plan.sublayers:
            if hasattr(sub.part, "by_index"):
                sub.part.by_index = False
        made.append(options["max_rows"])
        if len(made) > 1:
            device.made(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", noted)
        engine, room, needs = _engine(settings, model, device)
    # One to look at, two to measure on, and the one that stays.
    assert made[:3] == [1, 1, 1]
    assert made[-1] == room.rows == engine.max_rows > 1
    assert needs.measured
    assert (needs.pass_states > 0) == (kind == "conversion")
    assert room.piece == 128
    # Several prompts in a pass: as many as there are chunks in one.
    assert engine.plan.together == 2
    assert (2, 64) in device.passes
    assert sum(each[1] for each in device.engines) + sum(room.beside) + device.captured <= settings.memory


def test_a_device_without_an_index_gets_one(monkeypatch):
    """Torch's limit is the one function that wants it."""
    told = []
    fake = SimpleNamespace(
        current_device=lambda: 3,
        set_device=told.append,
        get_device_properties=lambda device: SimpleNamespace(total_memory=2**37),
        set_per_process_memory_fraction=lambda share, index: told.append((share, index)),
        synchronize=lambda device: None,
        empty_cache=lambda: None,
        memory_reserved=lambda device: 5,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    assert place(torch.device("cpu")) == torch.device("cpu")
    device = place(torch.device("cuda"))
    assert (device, place(torch.device("cuda:1"))) == (torch.device("cuda", 3), torch.device("cuda", 1))
    tuned = []
    monkeypatch.setattr(trials, "tune_within_memory", tuned.append)
    memory = CudaMemory(device, 2**31)
    CudaMemory(device, 2**40)
    assert told == [3, 1, (2**-6, 3), (1.0, 3)]
    assert tuned == [device, device]
    assert memory.settled() == 5


def test_what_is_want_of_memory():
    hidden = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    hidden.__context__ = torch.OutOfMemoryError(SAID)
    yes = [torch.OutOfMemoryError(), MemoryError(), hidden, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")]
    yes.append(RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"))
    assert all(map(out_of_memory, yes))
    assert not any(map(out_of_memory, [RuntimeError("shape mismatch"), ValueError("out of memory")]))
    assert shortly(torch.OutOfMemoryError(SAID)) == "CUDA out of memory. Tried to allocate 1.30 GiB"
    assert shortly(MemoryError()) == "MemoryError()"


def test_memory_that_runs_out_at_the_start_is_said(llama, capfd):
    """Of rows beyond any machine's memory, in the process itself and in a server."""
    settings = EngineSettings(str(llama.path), "cpu", "float32", max_length=2**45, max_rows=1)
    with pytest.raises(ModelError, match=r"on cpu: memory ran out while room was made: .*allocate memory") as raised:
        prepare(settings)
    assert "lower --max-length" in raised.value.hint
    with (
        pytest.raises(LapcliError, match="memory ran out while room was made"),
        local_server(llama.path, max_length=2**45, max_rows=1),
    ):
        pass
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "engine begins" in said
