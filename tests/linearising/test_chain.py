"""A conversion as a whole, on a tiny teacher: prefixes that work, going on, going further, controls, refusals."""

import json
import math
import shutil

import pytest
import torch

from lapcli.artifacts import read_artifact
from lapcli.cli.inspect_ import describe
from lapcli.errors import ArtifactError, FamilyError, ModelError, UsageError
from lapcli.evaluation import harness
from lapcli.families.loading import load_model
from lapcli.families.remote.lapcli_dual_state import dual_state_layers
from lapcli.families.source import resolve_model
from lapcli.linearising import captured, chain, passes
from lapcli.linearising.plan import holds_conversion
from lapcli.linearising.settings import DistillationSettings, LayerSettings, LinearisingSettings, SensitivitySettings
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.runtime import Engine
from lapcli.stages import linearising
from lapcli.stages.linearising import export_prefix, linearise_into, number_of, plan_linearising
from lapcli.testing.dual_state import recorded, tiny_source
from lapcli.testing.oracle import relative_error
from lapcli.training import distributed, engine

IDS = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_source("llama", tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["the", "state", "forgets", "slowly", "what", "a", "window", "never", "sees", "and", "reads", "again"]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, len(words), (400, 12), generator=generator)
    path.write_text("\n\n".join(" ".join(words[i] for i in row) for row in picks.tolist()))
    return str(path)


def settings(text, *, order="entropy", layer=None, sensitivity=None, **change):
    return LinearisingSettings(
        layer=LayerSettings(**(layer or {})),
        order=order,
        sensitivity=SensitivitySettings(**{"data": text, "samples": 3, "seq_len": 48, **(sensitivity or {})}),
        distillation=DistillationSettings(
            **{
                "data": text,
                "seq_len": 48,
                "steps": 4,
                "batch": 4,
                "validation": 2,
                "lr": 5e-3,
                "lr_min": 1e-3,
                **change,
            }
        ),
    )


def convert(source, chosen, fraction, root, **options):
    return linearise_into(plan_linearising(source, chosen, fraction, root, **options))


def logits(source):
    with torch.no_grad():
        return load_model(source)(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def done(source, text, tmp_path_factory):
    root = tmp_path_factory.mktemp("conversion") / "out"
    return root, convert(source, settings(text, steps=6, kl_weight=0.0), "1", root)


@pytest.fixture(scope="module")
def at_once(source, text, tmp_path_factory):
    """Two layers, never stopped."""
    root = tmp_path_factory.mktemp("at-once") / "out"
    return root, convert(source, settings(text), "0.7", root)


def test_every_prefix_is_a_model_and_each_step_teaches_its_layer(source, done):
    root, result = done
    assert sorted(result.order) == [0, 1, 2]
    assert result.worked
    assert set(result.correlations) == {"entropy ~ outlier"}
    teacher, earlier = logits(source), None
    for number, prefix in enumerate(result.prefixes, 1):
        assert prefix["alignment"]["after"] < prefix["alignment"]["before"]
        assert prefix["perplexity"] == pytest.approx(math.exp(prefix["cross_entropy"]))
        assert prefix["tokens"] == counted(root, prefix) > 6 * 4 * 40
        export_prefix(root, number, root.parent / f"prefix-{number}")
        made = resolve_model(str(root.parent / f"prefix-{number}"))
        assert made.config["dual_state"]["layers"] == result.order[:number]
        model = load_model(made)
        assert sorted(dual_state_layers(model)) == sorted(result.order[:number])
        found = logits(made)
        assert relative_error(found, teacher) > 1e-3
        assert earlier is None or relative_error(found, earlier) > 1e-3
        earlier = found
        changed = tuple(f"model.layers.{layer}.self_attn." for layer in result.order[:number])
        for name, tensor in load_model(source).state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor) == (not name.startswith(changed)), name
    assert result.output == root / "models" / "3-of-3"
    # The card's table, and the lineage.
    assert f"| 3 | {result.order[2]} |" in (result.output / "README.md").read_text()
    assert json.loads((result.output / "lapcli.json").read_text())["settings"]["stage"] == "linearising"


def counted(root, prefix):
    """Tokens that the curve of a layer's training says have counted."""
    curve = next(root.glob(f"training/*-layer-{prefix['layer']:03d}/curve.jsonl")).read_text()
    return max(json.loads(line).get("tokens", 0) for line in curve.splitlines())


def test_the_first_steps_are_small_where_states_are_hundreds_of_times_too_large(text, tmp_path):
    """A layer's sums must shrink to thousandths; what trains them must not take steps of the size of a weight."""
    chosen = settings(text, steps=2, seq_len=256, batch=2, lr=3e-3, warmup=0.0)
    root = tmp_path / "out"
    convert(resolve_model("demo:transformer"), chosen, "0.1", root)
    curve = [json.loads(line) for line in next(root.glob("training/*/curve.jsonl")).read_text().splitlines()]
    before, *steps = (line["validation"]["loss"] if "validation" in line else line["loss"] for line in curve)
    # Folded into the projection at once, the factors made this 20000.
    assert max(steps) < 2 * before
    # Who writes into what is kept does not alter what is shipped.
    assert (root / "base" / "model.safetensors").stat().st_nlink == 1


def test_what_is_done_is_not_done_again_and_a_fraction_can_grow(source, text, tmp_path, at_once):
    root = tmp_path / "out"
    first = convert(source, settings(text), "0.3", root)
    assert len(first.order) == 1
    stamp = (root / "prefixes").stat().st_mtime_ns
    again = convert(source, settings(text), "0.3", root)
    assert not again.worked
    assert (root / "prefixes").stat().st_mtime_ns == stamp
    further = plan_linearising(source, settings(text), "0.7", root)
    assert (further.done, further.number) == (1, 2)
    more = linearise_into(further)
    assert more.order[:1] == first.order
    assert more.prefixes[0] == first.prefixes[0]
    # Growing is as converting at once, to the bit.
    whole_root, whole = at_once
    assert tensors_of(root) == tensors_of(whole_root)
    assert [each["kl"] for each in whole.prefixes] == [each["kl"] for each in more.prefixes]


def tensors_of(root):
    found = {}
    for path in sorted((root / "prefixes").glob("*.safetensors")):
        found |= {f"{path.name}/{name}": tensor.tolist() for name, tensor in read_artifact(path).tensors().items()}
    assert found
    return found


def test_killed_in_the_middle_it_goes_on_to_the_same_bits(source, text, tmp_path, monkeypatch, at_once):
    """In the third step of the second layer; its last checkpoint is taken up."""
    advance, count = engine._Loop._advance, [0]

    def killed(self, share):
        count[0] += 1
        if count[0] == 7:
            raise KeyboardInterrupt
        return advance(self, share)

    root = tmp_path / "killed"
    monkeypatch.setattr(engine._Loop, "_advance", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(source, settings(text), "0.7", root)
    assert len(list((root / "prefixes").glob("*"))) == 1
    assert list(root.rglob("step-*"))
    monkeypatch.undo()
    resumed = convert(source, settings(text), "0.7", root)
    whole_root, whole = at_once
    assert tensors_of(root) == tensors_of(whole_root)
    assert [each["kl"] for each in resumed.prefixes] == [each["kl"] for each in whole.prefixes]
    assert not list(root.rglob("step-*"))


VARIANTS = {
    "one state of twice the width": {"layer": {"states": 1, "width": 2}, "kl_weight": 0.0},
    "a window of equal memory": {"layer": {"window": "equal", "sinks": 2}},
    "by the paper's letter": {"align": "kl", "fit": False, "penalty": 0.0, "layer": {"start": "random"}},
    "each by itself": {"chained": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_controls(source, text, tmp_path, variant):
    chosen = settings(text, order="first", steps=1, **VARIANTS[variant])
    result = convert(source, chosen, "0.7", tmp_path / "out")
    assert result.order == [0, 1]
    made = resolve_model(str(result.output))
    assert logits(made).isfinite().all()
    layers = dual_state_layers(load_model(made))
    if "window" in variant:
        # Two fp32 states of 8 x 8 are the bf16 keys and values of 16 tokens.
        assert (layers[0].settings.window, layers[0].settings.sinks) == (14, 2)
        assert result.prefixes[0]["mixture"] is None
    if variant == "each by itself":
        assert {"alignment", "cross_entropy", "kl"} == result.prefixes[1]["alone"].keys()
        assert result.prefixes[0]["alone"]["kl"] == pytest.approx(result.prefixes[0]["kl"])


@pytest.mark.parametrize("order", ["loss", "task:niah_noise"])
def test_other_orders_are_measured_beside_the_entropy(source, text, tmp_path, order, monkeypatch):
    root = tmp_path / "out"
    if order.startswith("task:"):
        # Its prompts are longer than a tiny byte tokenizer makes sense of; the task itself is tested elsewhere.
        from lapcli.linearising import layer_order

        values = iter([0.5, 0.7, 0.9, 0.6])
        monkeypatch.setattr(layer_order, "_task_measure", lambda task, tokenizer, samples: lambda model: next(values))
    chosen = settings(text, steps=1, order=order)
    with_order = plan_linearising(source, chosen, "0.3", root)
    result = linearise_into(with_order)
    artifact = read_artifact(with_order.place.sensitivity)
    assert {"entropy", "outlier", order} <= set(artifact.names)
    assert any(order in name for name in result.correlations)
    values = artifact.tensors()[order]
    assert result.order[0] == min(range(3), key=lambda layer: (values[layer].item(), -layer))


def test_other_inputs_are_refused_and_give_way_if_asked(source, text, tmp_path):
    root = tmp_path / "out"
    convert(source, settings(text, steps=1), "0.3", root)
    for change, said in (
        ({"steps": 2}, "distillation"),
        ({"steps": 1, "layer": {"states": 4}}, "layer"),
        ({"steps": 1, "sensitivity": {"samples": 2}}, "samples: 2 wanted, 3 found"),
    ):
        with pytest.raises(ArtifactError, match=said):
            plan_linearising(source, settings(text, **change), "0.3", root)
    before = tensors_of(root)
    convert(source, settings(text, steps=2), "0.3", root, overwrite=True)
    assert tensors_of(root) != before


def test_what_is_refused_before_any_work(source, text, tmp_path):
    with pytest.raises(UsageError, match="more than all of the layers"):
        plan_linearising(source, settings(text), "30", tmp_path / "out")
    with pytest.raises(FamilyError, match="no attention that can become dual-state"):
        plan_linearising(resolve_model("demo:gdn"), settings(text), "0.3", tmp_path / "out")
    with pytest.raises(UsageError, match="no task is called 'nosuch'"):
        plan_linearising(source, settings(text), "0.3", tmp_path / "out", tasks=["nosuch"])
    no_room = settings(text, layer={"window": "equal", "sinks": 20})
    with pytest.raises(UsageError, match="20 sinks take the memory"):
        plan_linearising(source, no_room, "0.3", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ArtifactError, match=r"holds thesis\.txt"):
            linearise_into(plan_linearising(source, settings(text), "0.3", tmp_path / "mine", overwrite=overwrite))
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert not (tmp_path / "out").exists()


def test_tasks_of_lapcli_need_no_lm_eval(source, text, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "_installed", lambda: False)
    plan_linearising(source, settings(text), "0.3", tmp_path / "out", tasks=["builtin", "niah"])
    with pytest.raises(ModelError, match="not installed"):
        plan_linearising(source, settings(text), "0.3", tmp_path / "out", tasks=["builtin", "lambada"])


def test_a_converted_model_is_no_teacher(done, text, tmp_path):
    _root, result = done
    with pytest.raises(ModelError, match="is converted already"):
        plan_linearising(resolve_model(str(result.output)), settings(text), "0.3", tmp_path / "out")


def test_exports(done, source, text, tmp_path):
    root, result = done
    assert number_of(root, "0.34") == 1
    with pytest.raises(ArtifactError, match="holds no conversion"):
        number_of(tmp_path, "0.5")
    shutil.copytree(root, tmp_path / "teacherless")
    (tmp_path / "teacherless" / "base" / "config.json").unlink()
    for base in ("an empty folder", "gone"):
        for read in (holds_conversion, lambda folder: number_of(folder, "0.5"), lambda folder: describe(str(folder))):
            with pytest.raises(ArtifactError, match=r"not the model that they are of: there is no .*base.config\.json"):
                read(tmp_path / "teacherless")
        assert (tmp_path / "teacherless" / "base").exists() == (base != "gone")
        shutil.rmtree(tmp_path / "teacherless" / "base", ignore_errors=True)
    # As is said there.
    convert(source, settings(text, steps=6, kl_weight=0.0), "1", tmp_path / "teacherless")
    assert number_of(tmp_path / "teacherless", "0.34") == 1
    shutil.copytree(root, tmp_path / "copy")
    for path in sorted((tmp_path / "copy" / "prefixes").glob("*"))[2:]:
        path.unlink()
    with pytest.raises(ArtifactError, match="holds 2 converted layers of 3, and 3 are asked for"):
        export_prefix(tmp_path / "copy", 3, tmp_path / "model")
    assert export_prefix(tmp_path / "copy", 2, tmp_path / "model")
    assert not export_prefix(tmp_path / "copy", 2, tmp_path / "model")
    with pytest.raises(ArtifactError, match="made with other inputs"):
        export_prefix(tmp_path / "copy", 1, tmp_path / "model")
    assert export_prefix(tmp_path / "copy", 1, tmp_path / "model", overwrite=True)
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert export_prefix(tmp_path / "copy", 1, tmp_path / "model", reporter=SilentReporter())
    assert resolve_model(str(tmp_path / "model")).config["dual_state"]["layers"] == result.order[:1]
    (tmp_path / "foreign").mkdir()
    with pytest.raises(ArtifactError, match="lapcli did not write it"):
        export_prefix(root, 1, tmp_path / "foreign")


def test_an_engine_runs_all_of_its_prefixes_at_once(done, tmp_path):
    """As the exported models do, and knows of each what the summary says."""
    root, _result = done
    runtime = Engine.load(root, max_rows=4, max_length=128)
    summary = json.loads((root / "conversion.json").read_text())
    measured = [{**summary["teacher"], "kl": 0.0}, *summary["prefixes"]]
    ids, names = IDS[0].tolist(), [each.name for each in runtime.configurations]
    for number, found in enumerate(runtime.prefill_rows([ids] * 4, configurations=names)):
        path = tmp_path / str(number) if number else root / "base"
        if number:
            export_prefix(root, number, path)
        assert relative_error(found.logits, logits(resolve_model(str(path)))[0, -1]) < 1e-5
        quality = runtime.configurations[number].quality
        for name in ("cross_entropy", "perplexity", "kl"):
            assert quality[name] == pytest.approx(measured[number][name])
        increase = measured[number]["perplexity"] / summary["teacher"]["perplexity"] - 1
        assert quality["increase"] == pytest.approx(increase)


def test_a_teacher_that_changed_is_noticed(done, tmp_path):
    root, _result = done
    # A copy of the directory has no hard links.
    shutil.copytree(root, tmp_path / "copy")
    weights = tmp_path / "copy" / "base" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ArtifactError, match="has changed since"):
        export_prefix(tmp_path / "copy", 1, tmp_path / "model")
    with pytest.raises(ArtifactError, match="has changed since"):
        Engine.load(tmp_path / "copy")


def test_half_precision_on_a_cpu_is_refused(source, text, tmp_path):
    plan = plan_linearising(source, settings(text), "0.3", tmp_path / "out")
    with pytest.raises(UsageError, match="--dtype bfloat16 on a CPU"):
        linearise_into(plan, machine=Machine(device="cpu", dtype="bfloat16"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layer", "change"),
    [({}, {}), ({"states": 1, "width": 2}, {}), ({"window": 8}, {}), ({}, {"chained": False})],
    ids=["dual", "wide", "window", "independent"],
)
def test_layers_in_fp32_are_trained_among_layers_in_bf16(source, text, tmp_path, monkeypatch, layer, change):
    """As on a GPU, whose autocast this processor's stands in for."""
    monkeypatch.setattr(distributed, "product_precision", lambda device: torch.autocast(device.type, torch.bfloat16))
    monkeypatch.setattr(linearising, "_refuse_half_on_cpu", lambda *_: None)
    plan = plan_linearising(source, settings(text, layer=layer, steps=12, **change), "1", tmp_path / "out")
    result = linearise_into(plan, machine=Machine(device="cpu", dtype="bfloat16"))
    assert [prefix["alignment"]["after"] < prefix["alignment"]["before"] for prefix in result.prefixes].count(True) > 1
    model = load_model(resolve_model(str(result.output)), device=torch.device("cpu"), dtype=torch.bfloat16)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert bool(model(IDS).logits.isfinite().all())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Documents by ranks, and steps as graphs."""
    monkeypatch.setattr(chain, "_ranks_pay", lambda device: True)
    monkeypatch.setattr(captured, "record_cuda_graph", recorded)


class Told(SilentReporter):
    def __init__(self):
        self.notices = []

    def notice(self, text):
        self.notices.append(text)


@pytest.mark.parametrize("variant", ["", "a window of equal memory", "each by itself"])
def test_by_ranks_and_from_graphs_it_is_the_same_conversion(source, text, tmp_path, as_on_a_gpu, monkeypatch, variant):
    chosen = settings(text, order="first", validation=5, **VARIANTS.get(variant, {}))
    told = Told()
    found = convert_with(source, chosen, tmp_path / "graphs", told)
    assert [each for each in told.notices if "CUDA graphs" in each] == [
        "training steps are CUDA graphs; each layer's first one is compared with the same without it"
    ]
    assert not any("launched" in each or "the host" in each for each in told.notices)
    monkeypatch.undo()
    wanted = convert(source, chosen, "0.7", tmp_path / "plain")
    for one, other in zip(found.prefixes, wanted.prefixes, strict=True):
        assert {**one, "seconds": 0}.keys() == {**other, "seconds": 0}.keys()
        for name in ("kl", "cross_entropy"):
            # A few steps of AdamW in fp32, from gradients that differ by its rounding.
            assert one[name] == pytest.approx(other[name], rel=1e-3), name
    # Neither is part of what a layer is known by: either goes on from the other.
    assert convert(source, chosen, "0.7", tmp_path / "graphs").worked is False


def convert_with(source, chosen, root, reporter, **options):
    return linearise_into(plan_linearising(source, chosen, "0.7", root), reporter=reporter, **options)


def test_where_no_graph_can_be_made_it_says_so_once(source, text, tmp_path, as_on_a_gpu, monkeypatch):
    tries = []

    def fails(call, device):
        tries.append(call())
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(captured, "record_cuda_graph", fails)
    told, chosen = Told(), settings(text, order="first")
    found = convert_with(source, chosen, tmp_path / "out", told)
    assert len(tries) == 1
    assert [each for each in told.notices if "launched" in each] == [
        "training steps are launched kernel by kernel: operation not permitted when stream is capturing"
    ]
    unasked = convert_with(source, chosen, tmp_path / "unasked", SilentReporter(), cuda_graphs=False)
    assert len(tries) == 1
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "unasked")
    assert [each["kl"] for each in found.prefixes] == [each["kl"] for each in unasked.prefixes]


@pytest.mark.parametrize("wrong", [True, False], ids=["other numbers", "no memory"])
def test_where_ranks_are_wrong_here_the_host_tells_documents_apart(
    source, text, tmp_path, as_on_a_gpu, monkeypatch, wrong
):
    attend = passes.attention_mask

    def leaks(ranks, dtype, window=None):
        if not wrong:
            raise torch.OutOfMemoryError("much")
        return attend(torch.arange(ranks.shape[1]).expand_as(ranks), dtype, window)

    monkeypatch.setattr(passes, "attention_mask", leaks)
    told, chosen = Told(), settings(text, order="first")
    convert_with(source, chosen, tmp_path / "out", told)
    assert len([each for each in told.notices if each.startswith("the host tells documents apart: ")]) == 1
    monkeypatch.undo()
    convert(source, chosen, "0.7", tmp_path / "plain")
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "plain")


def test_the_directory_stands_alone(source, text, tmp_path):
    """The teacher may go: its copy serves every export."""
    moved = tmp_path / "teacher"
    shutil.copytree(source.path, moved)
    root = tmp_path / "out"
    convert(resolve_model(str(moved)), settings(text, steps=1), "0.3", root)
    shutil.rmtree(moved)
    assert export_prefix(root, 1, tmp_path / "model")
    assert logits(resolve_model(str(tmp_path / "model"))).isfinite().all()
