"""Training of whole models as a stage: what it leaves, when it works again, what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lapcli.artifacts import RunDirectory
from lapcli.errors import ArtifactError, DataError, LapcliError, ModelError, RecipeError
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.source import resolve_model
from lapcli.reporting import SilentReporter
from lapcli.stages import pretraining
from lapcli.stages.pretraining import plan_training, request_training, train_into
from lapcli.stages.recovery import teacher_of
from lapcli.testing.models import byte_tokenizer
from lapcli.training import reload
from lapcli.training.costs import costs_of
from lapcli.training.engine import Execution
from lapcli.training.fresh import HALF_LIVES, STEP, bare, fresh_config, fresh_model, spread_out, trainable_types
from lapcli.training.stream import TrainingStream
from lapcli.training_recipe import PretrainingSettings, read_training_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "train").glob("*.yaml"))
# What was trained is freed before it is read again.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

EXECUTION = Execution(micro_batch=2, save_every=2, validate_every=3)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
HEADS = {"head_dim": 16, "expand_v": 1.0}
MODELS = {
    "gated_deltanet": {"model_type": "gated_deltanet", **SIZES, **HEADS, "tie_word_embeddings": True},
    "delta_net": {"model_type": "delta_net", **SIZES},
    "qdelta": {"model_type": "qdelta", **SIZES, **HEADS, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a tokenizer without a model."""
    folder = tmp_path_factory.mktemp("place")
    lines = [{"text": f"The value of entry {i} is {i * i % 97}. " * (1 + i % 4)} for i in range(160)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def settings(place, **given):
    chosen = {
        "model": MODELS["gated_deltanet"], "data": str(place / "text.jsonl"), "tokenizer": str(place / "tokenizer"),
        "seq_len": 32, "batch_tokens": 128, "steps": 6, "validation": 4, "lr": 1e-2, **given,
    }  # fmt: skip
    return PretrainingSettings(**{name: value for name, value in chosen.items() if value is not None})


def trained(chosen, run, *, restart=False, reporter=None, **options):
    plan = plan_training(request_training(chosen), run, restart=restart, reporter=reporter)
    return train_into(plan, run, **{"execution": EXECUTION, **options}, reporter=reporter)


def in_this_process(checkpoint, written, ids, machine):
    """As `check_trained`, without waiting for the imports of another process."""
    request = {"checkpoint": str(checkpoint), "written": str(written), "ids": ids}
    found = reload._compare_whole(request, {"device": "cpu", "dtype": torch.float32})
    return reload.Restored(**found, bound=reload.EXACT)


@pytest.fixture(autouse=True, scope="module")
def _quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "check_trained", in_this_process)
        yield


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    """A finished training, to be copied."""
    run = RunDirectory(tmp_path_factory.mktemp("finished") / "run")
    trained(settings(place), run)
    return run


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of it, its model where the run says that it is."""
    shutil.copytree(finished.path, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    record = json.loads(run.record.read_text())
    record["model"]["name"] = str(run.trained.resolve())
    run.record.write_text(json.dumps(record))
    return run


def curve(run):
    lines = [json.loads(line) for line in (run.training / "curve.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.parametrize("name", MODELS)
def test_what_it_leaves(place, tmp_path, name, monkeypatch):
    if name == "qdelta":
        monkeypatch.setattr(pretraining, "check_trained", reload.check_trained)
    run = RunDirectory(tmp_path / "run")
    chosen = settings(place, model=MODELS[name], steps=4)
    result = trained(chosen, run)
    assert result.worked
    record = result.record
    assert record["step"] == 4
    assert record["after"]["cross_entropy"] < record["before"]["cross_entropy"]
    # What was written is what was trained, rounded once.
    assert record["reloaded"]["error"] <= record["reloaded"]["bound"] == 1e-4
    assert 0 < record["reloaded"]["rounding"] < 0.05
    assert 0 < record["contraction"]["mean"] < 2
    assert {path.name for path in run.training.iterdir()} == {
        "checkpoints", "curve.jsonl", "curve.png", "training.json",
    }  # fmt: skip
    assert {path.name for path in run.trained.iterdir()} >= {
        "config.json",
        "README.md",
        "lapcli.json",
        "tokenizer.json",
    }
    source = resolve_model(str(run.trained))
    model = load_model(source)
    assert len(load_tokenizer(source)) == model.config.vocab_size == 259
    stored = load_file(run.trained / "model.safetensors")
    checkpoint = load_file(run.training / "checkpoints" / "step-4" / "state.safetensors")
    for name_, tensor in stored.items():
        wide = name_.endswith(("A_log", "dt_bias"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name_
        assert torch.equal(tensor, checkpoint[f"parameter/{name_}"].to(tensor.dtype)), name_
    card = (run.trained / "README.md").read_text()
    assert all(word in card for word in ("4 of 4 steps of 4 x 32", str(place / "text.jsonl"), "seed 0", "beta k.x"))
    assert run.read_record()["model"] == {**source.describe(), "name": str(run.trained.resolve())}
    with pytest.raises(ArtifactError, match="pruned from"):
        teacher_of(source)


@pytest.mark.parametrize("name", ["gated_deltanet", "delta_net"])
def test_stock_fla_loads_it(place, finished, tmp_path, name):
    with warnings.catch_warnings():
        # fla says at its import that there is no GPU.
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        fla = pytest.importorskip("fla.models")
    folder = finished.trained
    if name == "delta_net":
        run = RunDirectory(tmp_path / "run")
        trained(settings(place, model=MODELS[name], steps=1), run)
        folder = run.trained
    theirs = {"gated_deltanet": fla.GatedDeltaNetForCausalLM, "delta_net": fla.DeltaNetForCausalLM}[name]
    model, report = theirs.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = load_model(resolve_model(str(folder))).state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in model.state_dict().items())


def test_it_is_not_done_twice_and_other_inputs_are_refused(place, copy, tmp_path):
    marks = {path: path.stat().st_mtime_ns for path in copy.path.rglob("*") if path.is_file()}
    assert not trained(settings(place), copy).worked
    # The same budget, and the same rates, in other words are the same.
    assert not trained(settings(place, steps=None, tokens=6 * 128 - 5, lr_min=1e-3), copy).worked
    assert {path: path.stat().st_mtime_ns for path in copy.path.rglob("*") if path.is_file()} == marks
    for changed, said in (
        ({"lr": 1e-3}, "lr: 0.001 wanted, 0.01 found"),
        ({"seed": 1}, "seed: 1 wanted, 0 found"),
        ({"model": MODELS["qdelta"]}, "model"),
        ({"documents": "joined"}, "documents"),
    ):
        with pytest.raises(ArtifactError, match=said) as refused:
            trained(settings(place, **changed), copy)
        assert "--restart" in str(refused.value)
    other = tmp_path / "text.jsonl"
    other.write_text((place / "text.jsonl").read_text().replace("value", "worth"))
    with pytest.raises(ArtifactError, match="data"):
        trained(settings(place, data=str(other)), copy)
    before = (copy.trained / "model.safetensors").read_bytes()
    assert trained(settings(place, seed=1), copy, restart=True).worked
    assert (copy.trained / "model.safetensors").read_bytes() != before
    assert copy.read_record()["model"]["digest"] == resolve_model(str(copy.trained)).digest


def test_killed_just_before_its_end_it_is_the_runs_model_all_the_same(place, copy):
    record = copy.read_record()
    copy.record.unlink()
    left = copy.path / ".trained.before-restart"
    shutil.copytree(copy.trained, left)
    assert not trained(settings(place), copy).worked
    assert copy.read_record() == record
    assert not left.exists()


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "README.md", "lapcli.json"])
def test_what_is_damaged_is_made_again_from_the_last_checkpoint(place, copy, lost):
    before = {path.name: path.read_bytes() for path in copy.trained.iterdir()}
    (copy.trained / lost).unlink()
    reporter = SilentReporter()
    assert trained(settings(place), copy, reporter=reporter).worked
    assert any("damaged" in warning for warning in reporter.warnings)
    assert any("after step 6 of 6" in notice for notice in reporter.notices)
    after = {path.name: path.read_bytes() for path in copy.trained.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in ("model.safetensors", "config.json", "tokenizer.json"))


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from lapcli.artifacts import RunDirectory
from lapcli.training import engine
from test_pretraining import settings, trained

class Dying(engine.Curve):
    def add(self, step, values):
        super().add(step, values)
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

engine.Curve = Dying
trained(settings(Path(sys.argv[2])), RunDirectory(Path(sys.argv[3])))
"""


def test_killed_it_goes_on_bit_for_bit(place, finished, tmp_path):
    run = RunDirectory(tmp_path / "run")
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    arguments = [str(Path(__file__).parent), str(place), str(run.path)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(path.name for path in (run.training / "checkpoints").glob("step-*"))[-1] == "step-4"
    assert not run.trained.exists()
    assert trained(settings(place), run).worked
    for name in ("model.safetensors", "config.json"):
        assert (run.trained / name).read_bytes() == (finished.trained / name).read_bytes()
    assert curve(run) == curve(finished)


def test_a_model_is_trained_on_from_where_it_is(place, finished, tmp_path):
    run = RunDirectory(tmp_path / "run")
    chosen = settings(place, model=None, base=str(finished.trained), tokenizer=None, steps=2, lr=1e-3, stored="float32")
    result = trained(chosen, run)
    ended = json.loads((finished.training / "training.json").read_text())["record"]["after"]["cross_entropy"]
    # Rounded to bf16 it has lost next to nothing of what it had learned.
    assert result.record["before"]["cross_entropy"] == pytest.approx(ended, rel=0.02)
    assert result.record["reloaded"]["rounding"] == 0
    assert {tensor.dtype for tensor in load_file(run.trained / "model.safetensors").values()} == {torch.float32}
    assert str(finished.trained) in (run.trained / "README.md").read_text()


@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_one_that_learned_nothing_leaves_the_earlier_one(place, copy, monkeypatch, when):
    before = (copy.trained / "model.safetensors").read_bytes()
    real = pretraining.fresh_model

    def broken(config, seed, start):
        model = real(config, seed, start)
        torch.nn.init.constant_(model.model.layers[0].mlp.up_proj.weight, float("nan"))
        return model

    if when == "before the first step":
        monkeypatch.setattr(pretraining, "fresh_model", broken)
    with pytest.raises(ModelError, match=r"before any training|nothing was learned, and the earlier model"):
        trained(settings(place, seed=2, lr=1e30), copy, restart=True, execution=Execution())
    monkeypatch.undo()
    assert (copy.trained / "model.safetensors").read_bytes() == before
    assert not trained(settings(place), copy).worked


def test_what_is_refused_before_any_work(place, finished, tmp_path):
    run = RunDirectory(tmp_path / "run")

    def refused(error, match, **given):
        with pytest.raises(error, match=match):
            plan_training(request_training(settings(place, **given)), run)

    model = MODELS["gated_deltanet"]
    refused(RecipeError, "did you mean 'gated_deltanet'", model={**model, "model_type": "gated_delta_net"})
    refused(RecipeError, "did you mean 'head_dim'", model={**model, "head_dims": 16})
    refused(RecipeError, "vocab_size 100 is less than the 259 tokens", model={**model, "vocab_size": 100})
    refused(RecipeError, "max_position_embeddings", model={**model, "max_position_embeddings": 16})
    refused(RecipeError, "use_l2warp", model={**model, "use_l2warp": True})
    refused(RecipeError, "model: expand_v = 1.03", model={**model, "expand_v": 1.03})
    refused(ModelError, "no tokenizer", tokenizer=str(tmp_path))
    refused(ModelError, "no directory", tokenizer="./nowhere")
    refused(DataError, "nowhere", data="./nowhere.jsonl")
    refused(DataError, "tokens", validation=5000)
    refused(LapcliError, "no directory", model=None, base="./nowhere")
    refused(DataError, "longer than the 32 tokens", model=None, base=str(finished.trained), seq_len=64)
    assert not run.path.exists()
    foreign = RunDirectory(tmp_path / "other")
    foreign.note({"name": "demo:gdn", "revision": None, "digest": "0" * 64}, "prune", {})
    with pytest.raises(ArtifactError, match="a run of demo:gdn"):
        plan_training(request_training(settings(place)), foreign)
    for number, name in enumerate(("trained", "training")):
        folder = tmp_path / f"third-{number}" / name
        folder.mkdir(parents=True)
        # Which a process may have made that was killed then.
        plan_training(request_training(settings(place)), RunDirectory(folder.parent))
        (folder / "thesis.tex").touch()
        with pytest.raises(ArtifactError, match="did not write it"):
            plan_training(request_training(settings(place)), RunDirectory(folder.parent))


def test_a_run_that_was_moved_is_the_same_run(place, copy, tmp_path):
    moved = RunDirectory(tmp_path / "elsewhere")
    copy.path.rename(moved.path)
    assert not trained(settings(place), moved).worked
    assert moved.read_record()["model"]["name"] == str(moved.trained)


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("hidden_size", "256", "a whole number above 0"),
        ("hidden_size", 32.5, "a whole number above 0"),
        ("num_hidden_layers", True, "a whole number above 0"),
        ("intermediate_size", -4, "a whole number above 0"),
        ("norm_eps", float("nan"), "a number above 0"),
        ("initializer_range", "0.02", "a number above 0"),
        ("lamb_bias", float("inf"), "a number"),
        # Any text is true.
        ("use_decay", "no", "true or false"),
        ("hidden_act", 3, "a text"),
        ("eos_token_id", [1, 2], "the number of a token"),
        ("pad_token_id", 259, "no token of a vocabulary of 259"),
        ("num_heads", 3, "a multiple of num_heads = 3 is wanted"),
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_named(place, field, wrong, said):
    model = {**MODELS["qdelta"], "num_v_heads": 4, field: wrong}
    with pytest.raises(RecipeError, match=said) as refused:
        request_training(settings(place, model=model))
    assert refused.value.message.startswith(f"model: {'num_v_heads' if field == 'num_heads' else field}")
    assert "config.json" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "give either model"),
        ({"tokens": 5}, "give either tokens or steps"),
        ({"batch_tokens": 100}, "batch_tokens 100 is no multiple of seq_len 32"),
        ({"lr_min": 1.0}, "lr_min 1 is above lr"),
        ({"warmup": 0.1, "warmup_steps": 3}, "give either warmup or warmup_steps"),
        ({"model": None, "base": "demo:gdn", "start": "spread"}, "is for a fresh model"),
        ({"model": {"hidden_size": 64}}, "model_type"),
        ({"steps": True}, "a number is wanted"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(place, given, said):
    with pytest.raises(ValueError, match=said):
        settings(place, **given)


def test_recipes_are_told_apart_and_misspellings_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: demo:gdn\ncalibration: {data: builtin, samples: 1, seq_len: 64}\nselection: {ratio: 0.5}\n")
    with pytest.raises(RecipeError, match="is a recipe of a chain, not of training"):
        read_training_recipe(path)
    path.write_text("from: demo:gdn\ndata: builtin\nseq_len: 64\nbatch_token: 64\nsteps: 1\n")
    with pytest.raises(RecipeError, match="did you mean 'batch_tokens'"):
        read_training_recipe(path)
    path.write_text("from: demo:gdn\ndata: builtin\nseq_len: 64\nbatch_tokens: 64\nsteps: 1\nwarmup: 0.5\n")
    found = read_training_recipe(path, tokens=640, seed=3)
    assert (found.training().steps, found.seed, found.training().warmup) == (10, 3, 0.5)
    assert found.tokenizer_name == "demo:gdn"
    # A model that is named goes before one that the recipe begins anew.
    path.write_text(path.read_text().replace("from: demo:gdn", "model: {model_type: qdelta}\nstart: spread"))
    assert read_training_recipe(path, base="demo:gdn").model is None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_makes_its_model(path):
    recipe = read_training_recipe(path)
    config = fresh_config(recipe.model, load_tokenizer(resolve_model("demo:gdn")), recipe.seq_len)
    model = bare(config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    paper = {"340m": 380e6, "370m": 377e6, "1.3b": 1387e6}.get(path.stem.rpartition("-")[2], 6.4e6)
    assert numbers == pytest.approx(paper, rel=0.05)
    if not path.stem.startswith("small"):
        assert recipe.batch_tokens == 2**19
        billions = {"q-delta-340m": 15, "q-delta-1.3b": 30}.get(path.stem, 10)
        assert recipe.seen == pytest.approx(billions * 1e9, rel=0.001)
        assert recipe.training().lr_min == recipe.lr / 10


def test_small_recipes_differ_in_the_model_alone():
    small = [read_training_recipe(path) for path in RECIPES if path.stem.startswith("small")]
    assert len(small) == 8
    assert len({json.dumps(each.model_dump(exclude={"model"})) for each in small}) == 1
    assert len({json.dumps(each.model, sort_keys=True) for each in small}) == 8


def test_a_start_is_the_seeds_alone_and_spreads_what_a_model_has(place):
    tokenizer = byte_tokenizer()
    for name in trainable_types():
        config = fresh_config(MODELS[name], tokenizer, 32)
        torch.manual_seed(5)
        first, state = fresh_model(config, 0), torch.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(torch.get_rng_state(), state), "a model is drawn beside the generators of others"
        again, other = fresh_model(config, 0).state_dict(), fresh_model(config, 1).state_dict()
        assert all(torch.equal(value, again[key]) for key, value in first.state_dict().items())
        assert not torch.equal(again["model.embeddings.weight"], other["model.embeddings.weight"])
        spread_out(first)
        mixer = first.model.layers[1].attn
        assert torch.allclose(mixer.o_proj.weight, again["model.layers.1.attn.o_proj.weight"] / 2)
        if getattr(mixer, "A_log", None) is not None:
            step = torch.nn.functional.softplus(mixer.dt_bias)
            assert torch.allclose(step, torch.full_like(step, STEP), rtol=1e-4)
            half_lives = torch.log(torch.tensor(2.0)) / (mixer.A_log.exp() * step)
            assert torch.allclose(half_lives[[0, -1]], torch.tensor(HALF_LIVES), rtol=1e-3)


def test_joined_documents_have_no_boundaries_and_the_same_tokens(place):
    tokenizer = byte_tokenizer()
    apart, joined = (
        TrainingStream(str(place / "text.jsonl"), tokenizer, 32, seed=0, joined=joined) for joined in (False, True)
    )
    many = 0
    for _ in range(20):
        one, other = next(apart), next(joined)
        assert torch.equal(one.ids, other.ids)
        assert other.starts == (0,)
        many += len(one.starts) > 1
    assert many
    with pytest.raises(DataError, match="joined was True and is False"):
        apart.restore(joined.state())


def test_costs_are_those_of_the_model(place):
    config = fresh_config(MODELS["gated_deltanet"], byte_tokenizer(), 64)
    layers = pretraining.request_training(settings(place)).layers
    model = fresh_model(config, 0)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    found = costs_of(config, layers, 1000, seq_len=64, micro_batch=2, half=False, checkpointing=False)
    states = 2 * 2 * 16 * 16
    assert found.operations == 1000 * (6 * numbers + 18 * states)
    assert found.state_bytes == 4 * states
    assert found.held_bytes == 16 * numbers
    lean = costs_of(config, layers, 1000, seq_len=64, micro_batch=2, half=False, checkpointing=True, shards=4)
    assert lean.held_bytes == 4 * numbers
    # Muon keeps one number where AdamW keeps two, of the blocks' matrices alone.
    matrices = sum(
        value.numel() for name, value in model.named_parameters() if value.ndim == 2 and "embeddings" not in name
        and "lm_head" not in name
    )  # fmt: skip
    with_muon = costs_of(config, layers, 1000, seq_len=64, micro_batch=2, half=False, checkpointing=False, muon=True)
    assert with_muon.held_bytes == 16 * numbers - 4 * matrices < found.held_bytes
    assert lean.passing_bytes < found.passing_bytes
    # What a real pass keeps, beside what the loss takes.
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    model.set_kernel("chunked")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.train().model(input_ids=torch.zeros(2, 64, dtype=torch.long), use_cache=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    real = sum(storage.nbytes() for place_, storage in kept.items() if place_ not in weights)
    loss = 256 * 2**20 + 4 * (2 * 64 * 32 + 259 * 32)
    assert output.last_hidden_state.shape == (2, 64, 32)
    assert found.passing_bytes - loss == pytest.approx(real, rel=0.01)
