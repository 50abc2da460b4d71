"""The commands as a person meets them: exit codes, stdout alone for JSON, one clear message for bad input."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lapcli.cli as lapcli_cli
from lapcli.testing.models import tiny_gated_deltanet


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_gated_deltanet(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def job(tiny, text):
    return ["prune", tiny, "--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu"]


def test_help_and_inspect_import_no_torch(tiny):
    program = (
        "import sys\nsys.argv = ['lapcli', *{}]\nfrom lapcli.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "heavy = {{'torch', 'triton', 'transformers', 'numpy'}} & sys.modules.keys()\nassert not heavy, heavy\n"
    )
    for arguments in (["--help"], ["prune", "--help"], ["inspect", str(tiny)], ["--version"]):
        subprocess.run([sys.executable, "-c", program.format(arguments)], check=True, capture_output=True)


def test_the_main_job_and_again(lapcli, job):
    code, out, err = lapcli(*job, "--ratio", "0.5")
    assert code == 0, err
    assert out == ""
    assert "pruned: lapcli-run/sliced" in err
    assert "next: lapcli eval" in err
    code, out, err = lapcli(*job, "--ratio", "0.5", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["worked"] == {"calibration": False, "selection": False, "slicing": False}
    assert document["kept_width"] == 16
    assert document["state_bytes"]["after"] * 2 == document["state_bytes"]["before"]


def test_json_moves_the_result_alone_and_quiet_silences(lapcli, job, text):
    """Every stage's command: progress and what is next on stderr, unless somebody wants neither."""
    data = ["--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu"]
    for said, command in (
        ("calibrating", [*job, "--ratio", "0.5"]),
        ("next: lapcli select", ["calibrate", job[1], *data, "--overwrite"]),
        ("selected", ["select", "--ratio", "0.25", "--overwrite"]),
        ("sliced", ["slice", "--overwrite"]),
        ("evaluated: ", ["eval", f"text:{text}", "--limit", "2", "--device", "cpu"]),
        ("reported: ", ["report", "lapcli-run"]),
    ):
        code, out, err = lapcli(*command, "--json")
        assert code == 0, err
        assert json.loads(out)
        assert said in err, err
        again = [] if "--overwrite" in command or command[0] == "report" else ["--overwrite"]
        code, out, err = lapcli(*command, *again, "--json", "--quiet")
        assert (code, err) == (0, ""), command
        assert json.loads(out)


def test_no_command_lets_json_silence_what_goes_to_stderr():
    """Wherever a reporter or a last line is made: only --quiet decides."""
    speaking, found = {"DisplayReporter", "SweepDisplay", "closing"}, 0
    for file in sorted((Path(lapcli_cli.__file__).parent).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in speaking:
                names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                assert "as_json" not in names, f"{file.name}, line {node.lineno}"
                found += 1
    assert found > 40


def test_steps_one_by_one_give_what_prune_gives(lapcli, job, tiny, text, tmp_path):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    whole = (tmp_path / "lapcli-run" / "sliced" / "model.safetensors").read_bytes()
    data = ["--data", text, "--samples", "8", "--seq-len", "64", "--device", "cpu"]
    assert lapcli("calibrate", tiny, *data, "--run", "steps")[0] == 0
    assert lapcli("select", "--ratio", "0.5", "--run", "steps")[0] == 0
    code, _out, err = lapcli("slice", "--run", "steps")
    assert code == 0, err
    assert (tmp_path / "steps" / "sliced" / "model.safetensors").read_bytes() == whole


def test_another_ratio_stops_before_any_work_unless_told(lapcli, job):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    for arguments in ([], ["--dry-run"]):
        code, _out, err = lapcli(*job, "--ratio", "0.25", *arguments)
        assert code == 1
        assert "kept_width: 24 wanted, 16 found" in err
        assert "--overwrite" in err
    code, out, err = lapcli(*job, "--ratio", "0.25", "--overwrite", "--json")
    assert code == 0, err
    assert json.loads(out)["worked"] == {"calibration": False, "selection": True, "slicing": True}


def test_grad_extends_the_calibration(lapcli, job):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    code, out, err = lapcli(*job, "--ratio", "0.5", "--method", "grad", "--overwrite", "--json")
    assert code == 0, err
    assert json.loads(out)["worked"]["calibration"]
    # The Gram sums are unchanged, so the first selection is still one of this calibration.
    code, out, err = lapcli(*job, "--ratio", "0.5", "--overwrite", "--json")
    assert code == 0, err
    assert not json.loads(out)["worked"]["calibration"]


def test_a_damaged_calibration_gives_way_when_told(lapcli, job, tmp_path):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    calibration = tmp_path / "lapcli-run" / "calibration.safetensors"
    whole = calibration.read_bytes()
    calibration.write_bytes(whole[:-10])
    assert lapcli(*job, "--ratio", "0.5")[0] == 1
    code, _out, err = lapcli(*job, "--ratio", "0.5", "--overwrite")
    assert code == 0, err
    assert calibration.read_bytes() == whole


def test_dry_run_does_nothing(lapcli, job, tmp_path):
    code, out, err = lapcli(*job, "--ratio", "0.3", "--dry-run")
    assert code == 0, err
    assert out == ""
    assert "nothing was done" in err
    assert "16 of 32 channels kept (50.00% removed; 0.3 asked for, K' a multiple of 8)" in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []
    code, out, _err = lapcli(*job, "--ratio", "0.3", "--dry-run", "--json")
    assert json.loads(out)["width"]["kept"] == 16


def test_evaluation_of_a_run(lapcli, job, tmp_path):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    tasks = ["eval", "builtin", "niah", "--limit", "2", "--niah-lengths", "400", "--max-length", "64"]
    code, out, err = lapcli(*tasks, "--json")
    assert code == 0, err
    assert out == (tmp_path / "lapcli-run" / "evaluation.json").read_text()
    document = json.loads(out)
    assert [model["label"] for model in document["models"]] == ["base", "sliced"]
    assert {row["task"] for row in document["rows"]} == {"builtin", "niah"}
    code, out, err = lapcli(*tasks)
    assert code == 0, err
    assert "sliced - base" in err


def test_a_recipe_is_the_whole_chain(lapcli, tiny, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {tiny}\ncalibration: {{data: {text}, samples: 8, seq_len: 64}}\n"
        "selection: {ratio: 0.5}\nevaluation: {tasks: [niah_noise], limit: 1}\n"
    )
    code, out, err = lapcli("run", recipe, "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["evaluation"]["models"][1]["label"] == "sliced"
    recipe.write_text("model: x\ncalibration: {data: y, samples: 8, seqlen: 64}\nselection: {ratio: 0.5}\n")
    code, _out, err = lapcli("run", recipe, "--validate")
    assert code == 1
    assert "did you mean 'seq_len'?" in err
    recipe.write_text("model: x\ncalibration: {data: y, samples: 8, seq_len: 64}\nselection: {}\n")
    assert "either ratio or keep" in lapcli("run", recipe, "--validate")[2]


def test_inspect_shows_widths_and_lineage(lapcli, job):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    for place, words in {
        "lapcli-run": ("sliced", "base model"),
        "lapcli-run/sliced": ("made from", "gated_deltanet"),
        "lapcli-run/calibration.safetensors": ("calibration", "tokens"),
        "lapcli-run/selection.safetensors": ("drrqr", "rho"),
    }.items():
        code, out, err = lapcli("inspect", place)
        assert code == 0, err
        assert all(word in err for word in words), err
        assert json.loads(lapcli("inspect", place, "--json")[1])["title"] == place
        assert out == ""


def test_inspect_says_what_to_do_with_a_transformer(lapcli):
    """Nothing of it can be pruned before."""
    facts = json.loads(lapcli("inspect", "demo:transformer", "--json")[1])["facts"]
    assert facts["next"].startswith("lapcli convert demo:transformer --to dsla")
    assert "next" not in json.loads(lapcli("inspect", "demo:gdn", "--json")[1])["facts"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--ratio", "50"], 2, ["50", "did you mean 0.5"]),
        (["--ratio", "1"], 2, ["outside (0, 1)"]),
        (["--ratio", "0.99"], 2, ["leaves no channel of 32"]),
        (["--ratio", "0.5", "--keep", "8"], 2, ["either --ratio or --keep"]),
        (["--ratio", "0.5", "--align", "64"], 2, ["--align 64 is outside 1..32"]),
        (["--keep", "32"], 2, ["keep 32 of 32"]),
        (["--method", "drrq"], 2, ["did you mean drrqr"]),
        (["--score-from", "values"], 2, ["--score-from", "values"]),
        (["--samples", "0"], 2, ["samples", "found 0"]),
        (["--seq-len", "4096"], 1, ["4096", "2048"]),
        (["--data", "no-such.txt"], 1, ["no-such.txt"]),
        (["--device", "gpu"], 2, ["gpu"]),
        (["--dtype", "int8"], 2, ["int8", "bfloat16"]),
        (["--kernel", "fast"], 2, ["fast", "chunked"]),
        (["--kernel", "fla"], 1, ["fla"]),
        (["--require-fast"], 1, ["--require-fast"]),
        (["--f", "0.5"], 2, ["f", "0.5"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_bad_input_is_one_clear_message(lapcli, job, tmp_path, arguments, code, words):
    found, out, err = lapcli(*job, *arguments)
    assert found == code, err
    assert out == ""
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune", "./nowhere"], ["./nowhere is no directory"]),
        (["prune", "demo:none"], ["demo:none", "demo:gdn"]),
        (["eval", "builtin"], ["there is no run", "lapcli prune"]),
        (["eval", "builtn", "--model", "demo:gdn"], ["builtn", "did you mean builtin"]),
        (["inspect", "nowhere.safetensors"], ["nowhere.safetensors"]),
        (["list", "colours"], ["families"]),
        (["select"], ["there is no calibration", "lapcli calibrate"]),
        (["slice"], ["there is no selection", "lapcli select"]),
        (["bench", "everything"], ["selection"]),
        (["run", "nothing.yaml"], ["nothing.yaml", "lapcli list recipes"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and len(value) < 5 else "",
)
def test_what_is_not_there_is_named(lapcli, arguments, words):
    code, out, err = lapcli(*arguments)
    assert code in (1, 2)
    assert out == ""
    assert all(word in err.replace("\n", " ") for word in words), err
    assert "Traceback" not in err


def damaged(folder, tiny, change):
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    return folder


def edit_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def only_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def only_adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only_pickled, ["pickled", "save_pretrained"]),
        (truncated, ["truncated"]),
        (only_adapter, ["adapter", "merge"]),
        (no_tokenizer, ["no tokenizer"]),
        (edit_config(model_type="gpt2"), ["gpt2", "gated_deltanet"]),
        (edit_config(quantization_config={"quant_method": "fp8"}), ["fp8"]),
        (lambda folder: tiny_gated_deltanet(folder, vocab_size=100), ["has the id 100", "embeds 100 ids"]),
    ],
    ids=["pickled", "truncated", "adapter", "no-tokenizer", "gpt2", "fp8", "tokenizer-too-large"],
)
def test_models_that_cannot_be_pruned_say_why(lapcli, job, tiny, tmp_path, change, words):
    folder = damaged(tmp_path / "damaged", tiny, change)
    code, _out, err = lapcli("prune", folder, *job[2:])
    assert code == 1, err
    assert all(word in err.replace("\n", " ") for word in words), err
    assert "Traceback" not in err


def test_a_selection_for_another_model_is_refused(lapcli, job, tiny, tmp_path):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    other = tiny_gated_deltanet(tmp_path / "other", seed=1)
    code, _out, err = lapcli("slice", other, "lapcli-run/selection.safetensors", "--output", "x")
    assert code == 1
    assert "was made for" in err
    assert not (tmp_path / "x").exists()


def test_a_slice_is_not_put_into_its_model_but_a_run_may_lie_there(lapcli, job, tiny, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    monkeypatch.chdir(folder)
    assert lapcli("prune", ".", *job[2:])[0] == 0
    for more in ((), ("--dry-run",)):
        code, _out, err = lapcli("slice", "--output", "below", *more)
        assert code == 1
        assert "below lies in the directory of ." in " ".join(err.split())
    assert not (folder / "below").exists()


def test_a_run_without_its_slice_is_no_comparison(lapcli, job, tmp_path):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    (tmp_path / "lapcli-run" / "sliced").rename(tmp_path / "elsewhere")
    code, _out, err = lapcli("eval", "niah")
    assert code == 1
    assert "there is no sliced model" in err


def test_a_pruned_model_can_be_pruned_again_and_says_so(lapcli, job, tmp_path):
    assert lapcli(*job, "--ratio", "0.5")[0] == 0
    code, _out, err = lapcli("prune", "lapcli-run/sliced", *job[2:], "--ratio", "0.5", "--run", "second")
    assert code == 0, err
    assert "was pruned before" in err
    assert "16 channels that are there now" in err


def test_a_run_whose_model_changed_is_noticed(lapcli, job, tiny, tmp_path):
    model = damaged(tmp_path / "model", tiny, lambda folder: None)
    assert lapcli("prune", model, *job[2:], "--ratio", "0.5")[0] == 0
    edit_config(norm_eps=1e-5)(model)
    code, _out, err = lapcli("eval", "niah")
    assert code == 1
    assert "has changed since" in err


def test_module_and_script_are_the_same():
    environment = {**os.environ, "COLUMNS": "100"}
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for command in (
            [sys.executable, "-m", "lapcli", "--version"],
            [Path(sys.executable).with_name("lapcli"), "--version"],
        )
    ]
    assert outputs[0] == outputs[1] != ""


def test_a_second_signal_changes_nothing_any_more(lapcli, monkeypatch):
    from lapcli.cli import app, display

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(app, "app", lambda: signal.raise_signal(signal.SIGTERM))
    closing = display.closing

    def hit_again(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        closing(*arguments, **options)

    monkeypatch.setattr(display, "closing", hit_again)
    try:
        code, _out, err = lapcli("list", "families")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert code == 130
    assert err.startswith("interrupted")
