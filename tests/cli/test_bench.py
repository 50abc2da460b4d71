import json

import pytest

from lapcli.cli.bench import _without_paths

# Memory is freed after each case.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

FEW = ("--quick", "--device", "cpu", "--trials", "1")
ONE = ("--phase", "decode", "--ways", "lapcli", "--batch", "1", "--tokens", "8")


def test_decode_prints_a_table_and_keeps_its_rows(lapcli, tmp_path):
    code, out, err = lapcli(
        "bench", "decode", *FEW, "--ways", "lapcli,pytorch", "--batch", "2", "--ratio", "0,0.5",
        "--output", "rows.json", "--plot", "rows.png",
    )  # fmt: skip
    assert (code, out) == (0, "")
    for said in ("of the floor", "One decode step of the whole model", "lapcli / floor", "unpruned"):
        assert said in " ".join(err.split()), err
    # Which path runs, once.
    assert sum("decoding: " in line for line in err.splitlines()) == 1
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["command"] == (
        "lapcli bench decode --quick --device cpu --trials 1 --ways lapcli,pytorch --batch 2 --ratio 0,0.5"
    )
    assert {row["key_width"] for row in document["rows"]} == {32, 16}
    assert document["machine"]["copy_bytes"] > 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_alone_on_stdout(lapcli):
    code, out, err = lapcli(
        "bench", "operator", *FEW, "--phase", "decode", "--ways", "lapcli", "--batch", "2", "--json"
    )
    assert code == 0, err
    assert "decode operator, toy K 16" in err
    assert "measured; --output FILE keeps the rows" in err
    rows = json.loads(out)["rows"]
    assert {(row["what"], row["key_width"], row["state_dtype"], row["status"]) for row in rows} == {
        ("decode operator", width, state, "measured") for width in (32, 16) for state in ("float32", "bfloat16")
    }


def test_where_a_step_goes_is_told_by_kernel(lapcli):
    code, _out, err = lapcli("bench", "decode", *FEW, "--ways", "lapcli", "--batch", "2", "--ratio", "0", "--profile")
    assert code == 0
    assert "Kernels of a step, toy K 32, batch 2, lapcli" in err
    assert "aten::" in err
    assert "between kernels" in err


@pytest.mark.parametrize("named", [("decode",), ()], ids=["decode", "by itself"])
def test_memory_is_filled(lapcli, named):
    code, out, _err = lapcli("bench", *named, *FEW, "--memory", "1MiB", "--json")
    base, half = json.loads(out)["rows"]
    assert code == 0
    assert (base["memory"], base["status"]) == (2**20, "measured")
    assert half["fit"] > 1.9 * base["fit"]


def test_a_budget_ends_in_time_with_what_there_is(lapcli):
    code, out, _err = lapcli("bench", "decode", *FEW, "--budget", "0.0001", "--json")
    assert code == 0
    assert {row["status"] for row in json.loads(out)["rows"]} == {"no time"}


def test_the_papers_tables(lapcli):
    code, _out, err = lapcli("bench", "--paper", "--quick", "--device", "cpu")
    assert code == 0
    for number in (17, 18, 19):
        assert f"Table {number}" in err


def test_a_dry_run_measures_and_writes_nothing(lapcli, tmp_path, monkeypatch):
    monkeypatch.setattr("lapcli.benchmarks.speed.request.run", None)
    code, out, _err = lapcli("bench", "decode", "--device", "cpu", "--output", "rows.json", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["models"] == ["gdn, K 256", "gdn, K 128", "gdn, K 64"]
    assert list(tmp_path.iterdir()) == []


def test_require_fast(lapcli, tmp_path):
    code, out, err = lapcli("bench", "decode", *FEW, "--require-fast", "--output", "rows.json")
    assert (code, out) == (1, "")
    assert "--require-fast: decode would run the reference kernel" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "name one benchmark, or --paper"),
        (["decode", "--paper"], 2, "name one benchmark, or --paper"),
        (["decoding"], 2, "no benchmark 'decoding'"),
        (["selection", "--ratio", "0.5"], 2, "--ratio is not for `bench selection`"),
        (["--paper", "--batch", "1"], 2, "--batch is not for `bench --paper`"),
        (["decode", "--kernel", "fla"], 2, "--kernel is not for `bench decode`"),
        (["decode", "--model", "demo:gdn"], 2, "--model is not for"),
        (["decode", "--batch", "0"], 2, "--batch 0: whole numbers from 1 on"),
        (["decode", "--batch", "a"], 2, "no list of whole numbers"),
        (["decode", "--ratio", "50"], 2, "did you mean 0.5"),
        (["decode", "--ratio", "1"], 2, "ratio"),
        (["decode", "--share", "0.5"], 2, "--share is about Transformers, and gdn is none"),
        (["decode", "--config", "llama-like", "--ratio", "0.5"], 2, "llama-like is a Transformer"),
        (["decode", "--config", "llama-like", "--share", "50"], 2, "did you mean 0.5"),
        (["mixer", "--config", "llama-like"], 2, "measure it whole"),
        (["operator", "--share", "0.5"], 2, "--share is not for `bench operator`"),
        (["decode", "--config", "nothing"], 1, "there is no config 'nothing'"),
        (["decode", "--memory", "much"], 2, "much"),
        (["prefill", "--memory", "1GiB"], 2, "--memory is for `bench decode`"),
        (["decode", "--ways", "vllm"], 2, "--ways vllm: none of lapcli"),
        (["decode", "--state-dtype", "int8"], 2, "--state-dtype 'int8'"),
        (["decode", "--budget", "-1"], 2, "--budget -1"),
        (["decode", "--trials", "0"], 2, "--trials 0"),
        (["operator", "--phase", "training"], 2, "--phase 'training'"),
        (["operator", "--config", "gdm"], 2, "no layer"),
        (["decode", "--backward"], 2, "--backward is for"),
        (["prefill", "--profile"], 2, "--profile is for"),
        (["decode", "--plot", "rows.xyz"], 2, "the ending is none of .png"),
        (["decode", "--plot", "a.png", "--output", "a.png"], 2, "both a.png"),
        (["decode", "--budget", "nan"], 2, "--budget nan"),
        (["decode", "--widths", "64"], 2, "--widths is not for `bench decode`"),
        (["prefill", "--phase", "decode"], 2, "--phase is not for `bench prefill`"),
        (["operator", "--ratio", "0.5"], 2, "--ratio is not for `bench operator`"),
        (["prefill", "--state-dtype", "bfloat16"], 2, "--state-dtype is not for `bench prefill`"),
        (["decode", "--state-dtype", "float32,bfloat16"], 2, "one at a time"),
        (["decode", "--memory", "1MiB", "--batch", "4"], 2, "--batch is not for `bench decode --memory`"),
        (["decode", "--memory", "1MiB", "--ways", "fla"], 2, "--ways is not for `bench decode --memory`"),
        (["decode", "--memory", "9000000GiB"], 2, "is more than the"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_what_makes_no_sense_is_refused_before_any_work(lapcli, arguments, code, said):
    found, out, err = lapcli("bench", *arguments, "--device", "cpu")
    assert (found, out) == (code, "")
    assert said in err


def test_results_take_no_other_files_place(lapcli, tmp_path):
    """Found before anything is measured; results themselves give way, and say whose they are."""
    (tmp_path / "thesis.json").write_text("[1]")
    (tmp_path / "folder").mkdir()
    for place in ("thesis.json", "thesis.json/x.json", "folder"):
        for dry in ((), ("--dry-run",)):
            code, _out, err = lapcli("bench", "decode", *FEW, "--output", place, *dry)
            assert code == 1, err
            assert place.split("/")[0] in err
    code, _out, err = lapcli("bench", "decode", *FEW, "--plot", "thesis.json/x.png")
    assert code == 2, err
    assert (tmp_path / "thesis.json").read_text() == "[1]"
    for _ in range(2):
        code, _out, err = lapcli("bench", "mixer", *FEW, *ONE, "--output", "rows.json")
        assert code == 0, err
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["quick"]
    assert [(one["model"], one["config"]["head_dim"]) for one in document["subjects"]] == [("toy", 32), ("toy", 16)]


def test_the_shipped_model_is_a_config(lapcli):
    code, out, err = lapcli("bench", "decode", "--device", "cpu", "--config", "demo:gdn", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["models"] == ["demo:gdn, K 64", "demo:gdn, K 32", "demo:gdn, K 16"]


def test_where_results_go_is_not_kept_with_them():
    typed = ["bench", "decode", "--output", "/home/me/x.json", "--plot=/tmp/y.png", "--batch", "1"]
    assert _without_paths(typed) == ["bench", "decode", "--batch", "1"]
