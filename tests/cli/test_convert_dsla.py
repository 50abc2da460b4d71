"""`lapcli convert --to dsla`: dry run, a conversion, going on, `--export`, and what is asked wrongly."""

import json

import pytest

from lapcli.families.remote import lapcli_dual_state
from lapcli.families.source import resolve_model
from lapcli.testing.dual_state import tiny_source

SMALL = ("--steps", "2", "--batch-size", "2", "--seq-len", "48", "--validation", "2", "--samples", "2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny_source("llama", tmp_path_factory.mktemp("model") / "teacher").path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"Line {i} says {i * i % 89}, and more. " * 3}) + "\n" for i in range(99))
    )
    return path


def test_convert_and_export(lapcli, teacher, text, tmp_path):
    root = tmp_path / "made"
    command = ("convert", teacher, "--to", "dsla", "--fraction", "0.34", "--data", text, *SMALL, "--output", root)
    code, out, err = lapcli(*command, "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["layers"], plan["converts"], plan["tokens_a_layer"]) == (3, 1, 2 * 2 * 48)
    # Keys and values of two heads of 8 in bf16, of three layers; two fp32 states of 8 x 8 a head.
    assert plan["kv_bytes_a_token"] == {"before": 192, "after": 128}
    assert plan["state_bytes"] == 1024
    assert not root.exists()

    code, out, err = lapcli(*command, "--json", "--task", f"text:{text}", "--limit", "2")
    assert code == 0, err
    made = json.loads(out)
    assert made["worked"]
    assert "keeping " in err
    assert f"converted: {root}" in err
    assert "each row is a working model" not in err
    assert made["converted"] == str(root / "models" / "1-of-3")
    assert {each["metric"] for each in made["prefixes"][0]["tasks"]} >= {"token_perplexity"}
    assert resolve_model(made["converted"]).config["dual_state"]["layers"] == made["order"]

    code, out, err = lapcli(*command)
    assert code == 0
    assert "nothing to do" in err
    assert "trust_remote_code" in err
    assert "each row is a working model" in err
    assert out == ""

    code, out, err = lapcli(
        "convert", "--export", "0.34", "--output", root, "--export-to", tmp_path / "model", "--json", "--quiet"
    )
    assert (code, err) == (0, "")
    assert json.loads(out) == {"converted": str(tmp_path / "model"), "layers": 1, "worked": True}
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.touch()
    for place, said in (
        (thesis.parent, "did not write it"),
        (root, "is, holds or lies in"),
        (root / "base" / "x", "lies"),
    ):
        for more in ((), ("--dry-run",)):
            code, _out, err = lapcli(
                "convert", "--export", "0.34", "--output", root, "--export-to", place, "--overwrite", *more
            )
            assert code == 1
            assert said in err
    code, _out, err = lapcli(
        "convert", root / "base", "--to", "dsla", "--data", text, *SMALL, "--output", root, "--overwrite"
    )
    assert code == 1
    assert "which --overwrite would remove" in " ".join(err.split())
    assert thesis.is_file()
    assert resolve_model(str(root / "base")).digest == resolve_model(str(teacher)).digest
    code, _out, err = lapcli("convert", "--export", "1", "--output", root)
    assert code == 1
    assert "holds 1 converted layers of 3, and 3 are asked for" in err
    code, _out, err = lapcli("inspect", tmp_path / "model")
    assert code == 0, err
    code, out, err = lapcli("inspect", root, "--json")
    assert code == 0, err
    held = json.loads(out)
    assert (held["kind"], held["facts"]["converted"]) == ("conversion", "1 of 3 layers")
    assert held["facts"]["models written"] == "1-of-3"
    assert held["facts"]["what they became"]["states"] == 2
    assert [row["layer"] for row in held["layers"]] == made["order"]
    assert held["layers"][0]["perplexity"] == made["prefixes"][0]["perplexity"]
    code, out, err = lapcli("inspect", root)
    assert code == 0, err
    assert "layers in the order of their conversion" in out + err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "dsla"), "--output is missing"),
        (("--to", "dsla", "--output", "x", "--fraction", "25"), "did you mean 0.25, or 25%?"),
        (("--to", "dsla", "--output", "x", "--sensitivity", "entropie"), "--sensitivity 'entropie' is none of"),
        (("--to", "dsla", "--output", "x", "--states", "0"), "--states"),
        (("--to", "dsla", "--output", "x", "--align-loss", "l1"), "--align-loss"),
        (("--to", "dsla", "--output", "x", "--window", "wide"), "--window 'wide'"),
        (("--to", "dsla", "--output", "x", "--window", "0"), "--window"),
        (("--to", "dsla", "--output", "x", "--lambda-init", "0.5"), "--lambda-init is about --to qdelta"),
        (("--to", "qdelta", "--output", "x", "--steps", "5"), "--steps is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--no-fit"), "--no-fit is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--kernel", "chunked"), "--kernel is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--no-cuda-graphs"), "--no-cuda-graphs is about --to dsla"),
        (("--to", "qdelta", "--output", "x", "--require-fast"), "--require-fast is about --to dsla"),
        (("--to", "dsla", "--output", "x", "--export", "0.5"), "a model beside --export"),
        (("--to", "dsla", "--output", "x", "--export-to", "y"), "--export-to without --export"),
        (("--to", "dsla", "--output", "x", "--seq-len", "4096"), "longer than the 512 tokens"),
        (("--to", "dsla", "--output", "x", "--align-weight", "0", "--kl-weight", "0"), "nothing says what to learn"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_asked_wrongly(lapcli, teacher, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _out, err = lapcli("convert", teacher, *arguments)
    assert code in (1, 2)
    assert said in " ".join(err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--overwrite", "--dry-run")], ids=" ".join)
def test_a_conversion_lies_outside_of_its_model(lapcli, teacher, more):
    before = sorted(path.name for path in teacher.iterdir())
    for output, said in ((teacher / "sub", "lies in the directory of"), (teacher, "which no conversion writes")):
        code, _out, err = lapcli("convert", teacher, "--to", "dsla", "--output", output, *more)
        assert code == 1
        assert said in " ".join(err.split())
    assert sorted(path.name for path in teacher.iterdir()) == before


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_the_kernel_that_is_named_runs_in_every_new_layer(lapcli, teacher, text, tmp_path, monkeypatch, kernel):
    operator, asked = lapcli_dual_state._operator, []

    def heard(*arguments, **options):
        asked.append(options["impl"])
        return operator(*arguments, **options)

    monkeypatch.setattr(lapcli_dual_state, "_operator", heard)
    # By their loss, layers are replaced before any is trained, too.
    code, _out, err = lapcli(
        "convert", teacher, "--to", "dsla", "--fraction", "0.34", "--sensitivity", "loss", "--data", text, *SMALL,
        "--output", tmp_path / "made", "--kernel", kernel, "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    assert len(asked) > 3
    assert set(asked) == {kernel}
    assert sum(f"kernel: {kernel} (asked for by name) in new layers" in line for line in err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--kernel", "fla"), "--kernel fla cannot run here: "),
        (("--kernel", "triton"), "--kernel triton: layers with gated states have auto, reference, chunked, fla"),
        (("--require-fast",), "--require-fast: the chunked kernel would run"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_kernel_that_cannot_run_is_refused_before_any_work(lapcli, teacher, tmp_path, option, said):
    job = ("convert", teacher, "--to", "dsla", "--output", tmp_path / "x", *option, "--device", "cpu")
    for more in ((), ("--dry-run",)):
        found, _out, err = lapcli(*job, *more)
        assert found == 1
        assert said in " ".join(err.split())
    assert not (tmp_path / "x").exists()


def test_other_models_are_refused(lapcli, tmp_path):
    code, _out, err = lapcli("convert", "demo:gdn", "--to", "dsla", "--output", tmp_path / "x")
    assert code == 1
    assert "no attention that can become dual-state" in " ".join(err.split())
    assert not (tmp_path / "x").exists()
