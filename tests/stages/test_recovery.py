"""Recovery as a stage: what it leaves, when it works again, what it refuses. Training itself: tests/training."""

import json
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from lapcli.artifacts import RunDirectory
from lapcli.cli.context import loading
from lapcli.errors import ArtifactError, DataError, FamilyError, ModelError, RecipeError
from lapcli.families import stand_ins
from lapcli.families.loading import load_model
from lapcli.families.registry import family_for
from lapcli.families.right_gradients import use_right_gradients
from lapcli.families.source import resolve_model
from lapcli.machine import Machine
from lapcli.recipe import RecoverySettings
from lapcli.reporting import SilentReporter
from lapcli.stages import recovery
from lapcli.stages.recovery import plan_recovery, recover_into, teacher_of
from lapcli.testing.models import byte_tokenizer, tiny_gated_deltanet
from lapcli.testing.slices import random_kept, sliced_by
from lapcli.testing.stock_models import tiny_stock_model
from lapcli.training import reload as reloading
from lapcli.training.engine import Execution
from lapkernels.delta_rule import fla_backend
from lapkernels.delta_rule.api import Choice

EXECUTION = Execution(micro_batch=2, save_every=2)

pytestmark = pytest.mark.usefixtures("quick_reload")


@pytest.fixture
def new_interpreter(monkeypatch):
    """What is written is loaded by a process that has seen nothing else, as outside of tests."""
    monkeypatch.setattr(reloading, "subprocess", subprocess)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "text.jsonl"
    lines = [
        {"text": f"Sentence {i} has the value {i * i % 97}, which nobody asked for. " * (1 + i % 4)} for i in range(99)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model and a slice of it."""
    folder = tmp_path_factory.mktemp("made")
    base = resolve_model(str(tiny_gated_deltanet(folder / "base")))
    return base, sliced_by(base, random_kept(base, 16), folder)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


def settings(words, **given):
    return RecoverySettings(**{
        "data": str(words), "seq_len": 48, "steps": 3, "batch": 2, "lr": 3e-3, "lr_min": 3e-4, "validation": 2,
        "rank": 4, **given,
    })  # fmt: skip


def healed(student, teacher, chosen, run, *, restart=False, overwrite=False, reporter=None, **options):
    plan = plan_recovery(student, teacher, chosen, run, restart=restart, overwrite=overwrite)
    return recover_into(plan, run, **{"execution": EXECUTION, **options}, reporter=reporter)


@pytest.fixture(scope="module")
def finished(made, words, tmp_path_factory):
    """A finished recovery, to be copied."""
    run = RunDirectory(tmp_path_factory.mktemp("finished") / "run")
    healed(made[1], made[0], settings(words), run)
    return run


def weights(folder):
    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


def test_what_it_leaves(made, words, run, new_interpreter):
    base, student = made
    before = weights(student.path)
    result = healed(student, base, settings(words), run)
    assert result.worked
    assert result.record["step"] == 3
    after = weights(run.recovered)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # LoRA's projections, their convolutions and the norms of the blocks; neither MLPs, embeddings, head nor gates.
    whose = {name.split(".")[-2] for name in changed}
    assert whose == {
        "q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "attn_norm", "mlp_norm",
    }  # fmt: skip
    found = result.record["reloaded"]
    assert found["error"] < found["bound"] < found["effect"]
    card = (run.recovered / "README.md").read_text()
    assert all(word in card for word in (base.digest[:12], "3 of 3 steps", str(words), "| before |", "rank 4"))
    assert {path.name for path in run.recovery.iterdir()} == {
        "adapter", "checkpoints", "curve.jsonl", "curve.png", "recovery.json",
    }  # fmt: skip
    assert (run.recovery / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert resolve_model(str(run.recovered)).digest != student.digest


def test_it_is_not_done_twice_and_other_inputs_are_refused(made, words, run, tmp_path):
    base, student = made
    first = healed(student, base, settings(words), run)
    marks = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    again = healed(student, base, settings(words), run)
    assert not again.worked
    assert {key: again.record[key] for key in first.record} == first.record
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()} == marks
    # The same budget in other words is the same.
    assert not healed(student, base, settings(words, steps=None, samples=6), run).worked

    with pytest.raises(ArtifactError, match=r"lr: 0\.001 wanted, 0\.003 found") as refused:
        healed(student, base, settings(words, lr=1e-3), run)
    assert "--restart" in str(refused.value)
    other = sliced_by(base, random_kept(base, 8), tmp_path)
    with pytest.raises(ArtifactError, match="model"):
        healed(other, base, settings(words), run)
    changed = tmp_path / "other.jsonl"
    shutil.copy(words, changed)
    changed.write_text(changed.read_text().replace("nobody", "anyone"))
    with pytest.raises(ArtifactError, match="data"):
        healed(student, base, settings(changed), run)
    with pytest.raises(ArtifactError, match="teacher"):
        healed(student, student, settings(words), run)

    assert healed(student, base, settings(words, lr=1e-3), run, restart=True).worked
    # As `lapcli run --overwrite`: only what is of other inputs gives way.
    assert healed(student, base, settings(words), run, overwrite=True).worked
    assert not healed(student, base, settings(words), run, overwrite=True).worked


class Killed(Exception):
    """As if the process ended here."""


@pytest.mark.parametrize("at", ["merge", "write_document"])
def test_killed_after_training_it_ends_the_same(made, words, finished, run, monkeypatch, at):
    base, student = made

    def end(*_arguments, **_options):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(recovery, at, end)
        with pytest.raises(Killed):
            healed(student, base, settings(words), run)
    assert at == "write_document" or not run.recovered.exists()
    assert healed(student, base, settings(words), run).record["step"] == 3
    wanted, found = weights(finished.recovered), weights(run.recovered)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert not list(run.path.glob(".*"))


def test_a_merged_model_that_computes_something_else_is_not_kept(made, words, run, monkeypatch):
    base, student = made
    merge = recovery.merge

    def merge_badly(source, adapter, output, **options):
        done = merge(source, adapter, output, **options)
        shutil.copyfile(source.path / "model.safetensors", output / "model.safetensors")
        return done

    monkeypatch.setattr(recovery, "merge", merge_badly)
    with pytest.raises(ArtifactError, match="does not compute what was trained"):
        healed(student, base, settings(words), run)
    assert not run.recovered.exists()
    assert (run.recovery / "adapter").is_dir()


def test_a_merged_model_that_does_not_load_is_not_kept(made, words, run, monkeypatch, new_interpreter):
    base, student = made
    merge = recovery.merge

    def merge_half(source, adapter, output, **options):
        done = merge(source, adapter, output, **options)
        kept = load_file(output / "model.safetensors")
        kept.pop(next(name for name in kept if "mlp" in name))
        save_file(kept, output / "model.safetensors", metadata={"format": "pt"})
        return done

    monkeypatch.setattr(recovery, "merge", merge_half)
    with pytest.raises(ArtifactError, match="cannot be run by a fresh process"):
        healed(student, base, settings(words), run)
    assert not run.recovered.exists()


@pytest.mark.parametrize("kind", ["bf16", "full", "without a teacher", "nothing held out"])
def test_variants(made, words, run, tmp_path, kind):
    base, student = made
    given = {"full": {"full": True}, "without a teacher": {"kl_weight": 0.0}, "nothing held out": {"validation": 0}}
    if kind == "bf16":
        stored = tiny_gated_deltanet(tmp_path / "base") / "model.safetensors"
        save_file({name: value.bfloat16() for name, value in load_file(stored).items()}, stored, {"format": "pt"})
        base = resolve_model(str(stored.parent))
        student = sliced_by(base, random_kept(base, 16), tmp_path)
    teacher = None if kind == "without a teacher" else base
    result = healed(student, teacher, settings(words, **given.get(kind, {})), run)
    assert result.record["reloaded"]["error"] <= result.record["reloaded"]["bound"]
    assert (result.record["before"] is None) == (kind == "nothing held out")
    if kind == "without a teacher":
        assert result.record["after"]["kl"] == 0
    if kind == "bf16":
        assert {value.dtype for value in weights(run.recovered).values()} == {torch.bfloat16}


@pytest.mark.parametrize("model_type", ["qwen3_5", "mamba2", "kimi_linear"])
def test_stock_models_are_healed_and_load(words, run, tmp_path, model_type, request):
    if model_type == "kimi_linear":
        # Its code lies beside its weights, and must be found there.
        request.getfixturevalue("new_interpreter")
    base = resolve_model(str(tiny_stock_model(model_type, tmp_path / "base")))
    student = sliced_by(base, random_kept(base, 16), tmp_path)
    reporter = SilentReporter()
    result = healed(student, base, settings(words, steps=1), run, reporter=reporter)
    assert result.record["reloaded"]["error"] <= reloading.EXACT
    assert any("reads no boundaries" in notice for notice in reporter.notices)
    told = "trust_remote_code" in (run.recovered / "README.md").read_text()
    assert told == ("trust_remote_code" in loading(run.recovered)) == (model_type == "kimi_linear")
    model = load_model(resolve_model(str(run.recovered)))
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 6)


def test_the_control_lies_beside(made, words, run):
    base, student = made
    healed(student, base, settings(words), run)
    control = healed(base, base, settings(words, control=True), run)
    assert control.output == run.control
    assert control.record["before"]["kl"] == pytest.approx(0, abs=1e-9)
    assert run.recovered.is_dir()
    assert "control" in (run.control / "README.md").read_text().splitlines()[0]
    # The same text, the same tokens.
    saved = json.loads((run.recovery / "recovery.json").read_text())
    assert control.record["tokens"] == saved["record"]["tokens"]


def test_the_teacher_is_the_model_that_was_pruned(made, tmp_path):
    base, student = made
    assert teacher_of(student).digest == base.digest
    with pytest.raises(ArtifactError, match="--teacher"):
        teacher_of(base)
    copy = tmp_path / "base"
    shutil.copytree(base.path, copy)
    moved = sliced_by(resolve_model(str(copy)), random_kept(base, 16), tmp_path)
    weights_file = copy / "model.safetensors"
    changed = load_file(weights_file)
    changed["model.norm.weight"] += 1
    save_file(changed, weights_file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="has changed since"):
        teacher_of(moved)
    shutil.rmtree(copy)
    with pytest.raises(ModelError):
        teacher_of(moved)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"data": "nowhere.txt"}, DataError, "nowhere.txt"),
        ({"targets": ["q_conv1d"]}, RecipeError, "q_conv1d"),
        ({"targets": ["nothing"]}, RecipeError, "nothing"),
        ({"seq_len": 4000}, DataError, "4000"),
    ],
)
def test_refused_before_any_work(words, run, tmp_path, given, error, text):
    base = resolve_model(str(tiny_gated_deltanet(tmp_path / "base", max_position_embeddings=2048)))
    with pytest.raises(error, match=text):
        plan_recovery(base, base, settings(words, **given), run)
    assert not run.path.exists()


def test_a_narrow_slice_gets_the_rank_that_fits_unless_one_was_asked_for(made, words, run):
    """Two heads of 3 channels leave projections of 6 rows."""
    base, _wider = made
    run.path.mkdir()
    student = sliced_by(base, random_kept(base, 3), run.path)
    heard = []

    class Listener(SilentReporter):
        def notice(self, text):
            heard.append(text)

    def planned(**given):
        return plan_recovery(student, base, settings(words, **given), run, reporter=Listener())

    plan = planned(rank=None)
    heads = family_for(base.config).layers(base.config)[0].heads
    assert (
        (plan.settings.rank, plan.settings.alpha) == (plan.adapters.rank, plan.adapters.alpha) == (3 * heads, 6 * heads)
    )
    assert sum("instead of 32" in text for text in heard) == 1
    assert planned(rank=None, alpha=5).settings.alpha == 5
    assert planned(rank=2).settings.alpha == 64
    assert planned(rank=None, full=True).settings.rank == 32
    assert sum("instead of 32" in text for text in heard) == 2
    with pytest.raises(RecipeError, match="rank 32"):
        planned(rank=32)


def test_another_vocabulary_is_refused_with_its_first_id(made, words, run, tmp_path):
    _base, student = made
    other = tiny_gated_deltanet(tmp_path / "other")
    for file in other.glob("*.json"):
        file.write_text(file.read_text().replace('"</s>"', '"<end>"'))
    with pytest.raises(ModelError, match="id 2 is"):
        plan_recovery(student, resolve_model(str(other)), settings(words), run)


def test_a_model_without_states_is_refused(words, run, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    source = resolve_model(str(folder))
    with pytest.raises(FamilyError):
        plan_recovery(source, source, settings(words), run)


def test_what_is_not_lapclis_is_not_thrown_away(made, words, run):
    base, student = made
    run.recovered.mkdir(parents=True)
    (run.recovered / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="did not write it"):
        healed(student, base, settings(words), run, restart=True)
    assert (run.recovered / "thesis.tex").is_file()


def test_a_folder_of_another_is_not_written_into(made, words, run):
    base, student = made
    run.recovery.mkdir(parents=True)
    # Which a process may have made that was killed then.
    plan_recovery(student, base, settings(words), run)
    (run.recovery / "thesis.tex").touch()
    with pytest.raises(ArtifactError, match="did not write it"):
        plan_recovery(student, base, settings(words), run)


def test_a_restart_that_comes_to_nothing_leaves_what_was_there(made, words, finished, run, tmp_path):
    base, student = made
    shutil.copytree(finished.path, run.path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    short = tmp_path / "short.txt"
    short.write_text("All of it is held out, as one piece. " * 30)
    for _ in range(2):
        for text in (empty, short):
            with pytest.raises(DataError):
                healed(student, base, settings(text), run, restart=True)
    with pytest.raises(ModelError, match="nothing was learned"):
        healed(student, base, settings(words, lr=1e30), run, restart=True)
    assert not healed(student, base, settings(words), run).worked
    assert healed(student, base, settings(words, lr=1e-3), run, restart=True).worked
    assert not list(run.path.glob(".*"))


def test_too_little_text_ties_nobody_to_it(made, words, run, tmp_path):
    base, student = made
    short = tmp_path / "short.txt"
    short.write_text("All of it is held out, as one piece. " * 30)
    with pytest.raises(DataError):
        healed(student, base, settings(short), run)
    assert not (run.recovery / "checkpoints").exists()
    assert healed(student, base, settings(words, lr=1e-3), run).worked


def test_the_adapter_says_in_which_dtype_the_model_was_trained(made, words, run):
    base, student = made
    healed(student, base, settings(words, steps=1), run, machine=Machine(device="cpu", dtype="bfloat16"))
    record = json.loads((run.recovery / "adapter" / "lapcli.json").read_text())["record"]
    assert set(record["dtypes"].values()) == {"bfloat16"}


def test_a_damaged_result_is_made_again(made, words, finished, run):
    base, student = made
    shutil.copytree(finished.path, run.path)
    file = run.recovered / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        assert healed(student, base, settings(words), run).worked
        assert file.read_bytes() == whole


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_lost_files_beside_the_weights_are_put_back(made, words, finished, run):
    base, student = made
    shutil.copytree(finished.path, run.path)
    whole = contents(run.recovered)
    # Weights and adapter are enough for it.
    shutil.rmtree(run.recovery / "checkpoints")
    (run.recovered / "tokenizer.json").unlink()
    (run.recovered / "tokenizer_config.json").write_text("{}")
    (run.recovered / "README.md").unlink()
    (run.recovered / "lapcli.json").write_text("[]")
    lost = {"tokenizer.json", "tokenizer_config.json", "README.md", "lapcli.json"}
    plan = plan_recovery(student, base, settings(words), run)
    assert set(plan.document()["puts_back"]) == set(plan.lost) == lost
    reporter = SilentReporter()
    assert healed(student, base, settings(words), run, reporter=reporter).worked
    assert all(name in reporter.warnings[0] for name in lost)
    assert contents(run.recovered) == whole
    assert not healed(student, base, settings(words), run).worked


def test_a_damaged_summary_is_made_again_or_named_with_a_remedy(made, words, finished, run):
    base, student = made
    shutil.copytree(finished.path, run.path)
    summary, merged = run.recovery / "recovery.json", contents(run.recovered)
    before = json.loads(summary.read_text())["record"]
    for damage in ('{"kind": "recovery", ', "[]", '{"kind": "recovery", "schema": 1}'):
        summary.write_text(damage)
        reporter = SilentReporter()
        plan = plan_recovery(student, base, settings(words), run, reporter=reporter)
        assert plan.resumes_after == 3
        assert "recovery.json" in reporter.warnings[0]
    with pytest.raises(ArtifactError, match="lr: 0"):
        plan_recovery(student, base, settings(words, lr=1e-3), run)
    recover_into(plan, run, execution=EXECUTION)
    after = json.loads(summary.read_text())["record"]
    assert {**after, "wall_seconds": 0, "reloaded": 0} == {**before, "wall_seconds": 0, "reloaded": 0}
    assert contents(run.recovered) == merged
    summary.write_text("{")
    shutil.rmtree(run.recovery / "checkpoints")
    with pytest.raises(ArtifactError, match=r"recovery\.json") as refused:
        plan_recovery(student, base, settings(words), run)
    assert "--restart" in refused.value.hint


def test_a_recovered_model_learns_from_the_unpruned_one(made, finished):
    assert teacher_of(resolve_model(str(finished.recovered))).digest == made[0].digest


def test_where_flas_gradients_are_wrong_pytorch_runs(tmp_path, monkeypatch):
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.qwen3_5 import modeling_qwen3_5

    package = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    package.chunk_gated_delta_rule = lambda *_arguments, **_options: None
    monkeypatch.setitem(sys.modules, "fla", package)
    bound = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(torch.nn.functional.silu)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", bound)
    model = load_model(resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "m"))))
    for wrong in (None, "wrong here"):
        monkeypatch.setattr(fla_backend, "why_wrong", lambda *_arguments, _said=wrong, **_options: _said)
        reporter = SilentReporter()
        use_right_gradients(model, torch.device("cuda"), reporter)
        choice = modeling_qwen3_5.torch_chunk_gated_delta_rule._lapcli_choice
        assert choice.without_gradient == (wrong is not None)
        assert bool(reporter.warnings) == (wrong is not None)
    assert "wrong here" in reporter.warnings[0]
    assert "fla's chunk_gated_delta_rule" in reporter.warnings[0]
    # Where lapkernels run it, they have the gradient.
    monkeypatch.setattr(stand_ins, "select_impl", lambda *_, **__: Choice("triton", "of the test"))
    reporter = SilentReporter()
    use_right_gradients(model, torch.device("cuda"), reporter)
    assert reporter.warnings == []


def test_a_plan_counts_what_it_will_do(made, words, run):
    base, student = made
    plan = plan_recovery(student, base, settings(words), run)
    document = plan.document()
    assert document["tokens"] == 3 * 2 * 48
    assert document["trained_parameters"] == plan.adapters.trained
    active = sum(value.numel() for name, value in weights(student.path).items() if "embed" not in name)
    assert document["operations"] == document["tokens"] * (6.0 * active + 2.0 * plan.adapters.trained)
    assert json.loads(json.dumps(document)) == document
