"""`lapcli plan` as a person meets it."""

import json
import subprocess
import sys

import pytest

from lapcli.cli.app import main
from lapcli.families.source import resolve_model
from lapcli.testing.models import tiny_gated_deltanet


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny", num_v_heads=4)


@pytest.fixture
def plan(capsys, monkeypatch, tmp_path):
    """Run `lapcli plan` in an empty directory; gives exit code, stdout and stderr in one line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lapcli", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, " ".join(err.split())

    return run


def test_it_says_what_a_ratio_means_and_writes_nothing(plan, tiny, tmp_path):
    code, out, err = plan(tiny, "--ratio", "0.3")
    assert (code, out) == (0, "")
    for words in (
        "16 of 32 channels kept (50.00% removed; 0.3 asked for, K' a multiple of 8)",
        "the ratio alone keeps 22",
        "32 -> 16",
        "sequences that fit",
        "fla, chunked",
        f"next: lapcli prune {tiny} --ratio 0.3 --align 8",
    ):
        assert words in err
    assert list(tmp_path.iterdir()) == []


def test_json_is_alone_on_stdout(plan, tiny):
    code, out, err = plan(tiny, "--keep", "8", "--tp", "2", "--state-dtype", "bf16", "--memory", "1GiB", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["width"] | {"removed": 0.75, "of": 32, "kept": 8} == document["width"]
    assert document["tensor_parallel"]["heads_per_device"] == [{"key": 1, "value": 2}]
    assert document["state_bytes"]["after"] * 4 == document["state_bytes"]["before"]
    assert document["concurrency"]["memory"] == 1 << 30
    assert {row["verdict"] for row in document["kernels"]} >= {"takes it", "never took it", "not checked"}


def test_without_a_model_it_is_the_shipped_one_or_the_run_s(plan, tiny, tmp_path):
    assert json.loads(plan("--json")[1])["model"] == "demo:gdn"
    folder = tmp_path / "lapcli-run"
    folder.mkdir()
    from lapcli.artifacts import RunDirectory

    RunDirectory(folder).note(resolve_model(str(tiny)).describe(), "prune", {})
    assert json.loads(plan("--json")[1])["model"] == str(tiny)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ratio", "50"], ["50", "did you mean 0.5"]),
        (["--ratio", "0.5", "--keep", "8"], ["either --ratio or --keep"]),
        (["--align", "64"], ["--align 64 is outside 1..32"]),
        (["--tp", "3"], ["--tp 3 does not divide 2 key heads and 4 value heads", "--tp 2"]),
        (["--memory", "80"], ["--memory 80", "did you mean 80GiB?"]),
        (["--state-dtype", "int8"], ["int8", "fp32, bf16"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_is_refused_as_usage(plan, tiny, arguments, words):
    code, out, err = plan(tiny, *arguments)
    assert (code, out) == (2, "")
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "gated_deltanet"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised (fp8)"]),
        ({"hidden_size": 32}, ["config.json implies"]),
    ],
    ids=["gpt2", "fp8", "misfit"],
)
def test_models_that_cannot_be_pruned_are_refused(plan, tiny, tmp_path, changes, words):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tiny / "model.safetensors")
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    code, out, err = plan(folder)
    assert (code, out) == (1, "")
    assert all(word in err for word in words), err


def test_it_imports_neither_torch_nor_numpy(tiny):
    program = (
        f"import sys\nsys.argv = ['lapcli', 'plan', {str(tiny)!r}]\nfrom lapcli.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy'} & sys.modules.keys()\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
