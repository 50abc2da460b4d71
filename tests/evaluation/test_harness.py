"""lm-eval's tasks on local data, against a few lines that share no code with them or with ours."""

import json
import math
from contextlib import contextmanager

import pytest
import torch

from lapcli.errors import DataError, ModelError, UsageError
from lapcli.evaluation import harness
from lapcli.evaluation.harness import check_names, check_packages, load_task, measure_harness, run_harness
from lapcli.evaluation.scoring import LoadedModel
from lapcli.evaluation.settings import EvaluationSettings
from lapcli.evaluation.summaries import XSUM
from lapcli.evaluation.tasks import TASKS, TaskInfo
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.reporting import SilentReporter
from lapcli.testing import shared_data

MAX_LENGTH = 48

# Pages as they lie in the raw file, and what lm-eval's detokenisation makes of them, worked out by hand.
PAGES = [
    (
        ' = Kiln ( oven ) = \n \n A kiln @-@ fired pot holds 1 @,@ 000 ; it cost $ 2 @.@ 5 . " Hot " , he said . ',
        ' = Kiln (oven) =\n\nA kiln-fired pot holds 1,000; it cost $ 2.5. "Hot", he said. ',
    ),
    (" = Moss = \n \n = = Uses = = \n \n Few . \n", " = Moss =\n\n== Uses ==\n\nFew.\n"),
]


@pytest.fixture
def wikitext_folder(tmp_path):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    (folder / "wiki.test.raw").write_text(" \n" + "\n".join(page for page, _ in PAGES))
    return tmp_path


def measure(task, loaded, max_length=MAX_LENGTH, batch_size=None, **settings):
    found = measure_harness(
        task,
        loaded,
        EvaluationSettings(**settings),
        max_length=max_length,
        batch_size=batch_size,
        reporter=SilentReporter(),
    )
    return {score.metric: score for score in found}


def log_probabilities(model, ids):
    """log p of each token after the first, from one pass over at most the window that the caller cut."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
    return torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]]


def rolling(model, text_ids, window):
    """lm-eval's definition: windows of `window` predictions, the first after BOS, the last with full context."""
    ids = [1, *text_ids]
    total = float(log_probabilities(model, ids[: window + 1]).sum())
    done = min(window, len(ids) - 1)
    while done < len(ids) - 1:
        new = min(window, len(ids) - 1 - done)
        done += new
        total += float(log_probabilities(model, ids[done - window : done + 1])[-new:].sum())
    return total


def test_wikitext_is_what_its_definition_says(tiny, wikitext_folder):
    scores = measure(load_task("wikitext", "wikitext", wikitext_folder), tiny)
    total = sum(rolling(tiny.model, tiny.tokenizer(text).input_ids, MAX_LENGTH) for _, text in PAGES)
    # Counted before detokenisation; white space at both ends of a page makes an empty word each in lm-eval's count.
    words = sum(len(page.split()) + 2 for page, _ in PAGES)
    size = sum(len(page.encode()) for page, _ in PAGES)
    # Sums of some 200 fp32 log-probabilities of about 5.5.
    assert math.log(scores["word_perplexity"].estimate.value) == pytest.approx(-total / words, rel=1e-5)
    assert math.log(scores["byte_perplexity"].estimate.value) == pytest.approx(-total / size, rel=1e-5)
    assert scores["bits_per_byte"].estimate.value == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert scores["word_perplexity"].estimate.n == 2
    assert scores["word_perplexity"].higher_is_better is False
    assert scores["word_perplexity"].settings["max_length"] == MAX_LENGTH


@pytest.fixture
def parrot(tiny_folder):
    """After `a` comes a blank, after a blank comes `b`: with the mixers and MLPs silenced the head reads the
    embedding of the last token alone, and each row of the head is the embedding of the token to follow."""
    source = resolve_model(str(tiny_folder))
    model, tokenizer = load_model(source), load_tokenizer(source)
    a, blank, b = (tokenizer(text).input_ids[0] for text in ("a", " ", "b"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = model.model.embeddings.weight
        model.lm_head.weight.copy_(0.1 * embeddings)
        model.lm_head.weight[blank] = 10 * embeddings[a]
        model.lm_head.weight[b] = 10 * embeddings[blank]
    return LoadedModel(model=model, tokenizer=tokenizer, name="parrot")


PASSAGES = ["the cat sat on a b", "a b a b a", "one line\nand one more a b", "b a c", "x a bz"]


@pytest.fixture
def lambada_folder(tmp_path):
    (tmp_path / "eval").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES)
    (tmp_path / "eval" / "lambada_test.jsonl").write_text(lines)
    return tmp_path


def test_lambada_is_what_its_definition_says(parrot, lambada_folder):
    scores = measure(load_task("lambada", "lambada_openai", lambada_folder), parrot)
    total, hits = 0.0, []
    for text in PASSAGES:
        context, last = text.rsplit(" ", 1)
        ids = parrot.tokenizer(f"{context} {last}").input_ids
        count = len(f" {last}".encode())
        total += float(log_probabilities(parrot.model, ids)[-count:].sum())
        with torch.no_grad():
            said = parrot.model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        hits.append(said[-count - 1 : -1] == ids[-count:])
    assert hits == [True, False, True, False, False]
    assert scores["acc"].estimate.value == pytest.approx(2 / 5)
    # lm-eval's: the sample standard deviation over the root of n.
    assert scores["acc"].estimate.stderr == pytest.approx(math.sqrt(2 / 5 * 3 / 5 / 4))
    assert math.log(scores["perplexity"].estimate.value) == pytest.approx(-total / len(PASSAGES), rel=1e-5)
    assert scores["acc"].task == "lambada"
    assert scores["acc"].counts == {"documents": 5}


@pytest.mark.parametrize("name", ["wikitext", "lambada_openai"])
def test_values_are_those_of_lm_eval_alone(tiny, wikitext_folder, lambada_folder, name):
    """The same task with lm-eval's own scoring of the same model."""
    task = load_task(name, name, wikitext_folder)
    found = measure(task, tiny)
    with harness._quiet():
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        stock = HFLM(
            pretrained=tiny.model, tokenizer=tiny.tokenizer, backend="causal", max_length=MAX_LENGTH, batch_size=3
        )
        alone = evaluate(lm=stock, task_dict=task.loaded, bootstrap_iters=0, log_samples=False)["results"][name]
    assert len(found) >= 2
    for metric, score in found.items():
        assert score.estimate.value == pytest.approx(alone[f"{metric},none"], rel=1e-4)


def test_batches_of_one_equal_batches_of_eight(tiny, lambada_folder):
    task = load_task("lambada", "lambada_openai", lambada_folder)
    one, eight = measure(task, tiny, batch_size=1), measure(task, tiny, batch_size=8)
    for metric in one:
        assert one[metric].estimate.value == pytest.approx(eight[metric].estimate.value, rel=1e-4)
        assert one[metric].settings == eight[metric].settings


def test_limit_takes_the_first_documents(tiny, lambada_folder):
    task = load_task("lambada", "lambada_openai", lambada_folder)
    all_of_them, two = measure(task, tiny)["acc"], measure(task, tiny, limit=2)["acc"]
    assert (all_of_them.estimate.n, two.estimate.n) == (5, 2)
    assert all_of_them.settings["data"] != two.settings["data"]


def test_bos_is_stored_and_reaches_the_model(tiny, lambada_folder, wikitext_folder):
    task = load_task("lambada", "lambada_openai", lambada_folder)
    auto, always = measure(task, tiny)["perplexity"], measure(task, tiny, bos="always")["perplexity"]
    # The byte tokenizer has no rule that would add its BOS, and lm-eval asks the tokenizer.
    assert auto.settings["adds_bos"] is False
    assert always.settings["adds_bos"] is True
    assert auto.settings != always.settings


def test_nothing_is_printed(tiny, lambada_folder, capfd):
    measure(load_task("lambada", "lambada_openai", lambada_folder), tiny)
    assert capfd.readouterr() == ("", "")


def test_progress_is_told_in_tokens(tiny, lambada_folder):
    told = []

    class Telling(SilentReporter):
        @contextmanager
        def task(self, description, total=None, unit=""):
            told.append((description, total, unit))
            yield type("Handle", (), {"advance": lambda self, amount=1: told.append(amount)})()

    measure_harness(
        load_task("lambada", "lambada_openai", lambada_folder),
        tiny,
        EvaluationSettings(),
        max_length=MAX_LENGTH,
        batch_size=2,
        reporter=Telling(),
    )
    description, total, unit = told[0]
    assert (description, unit) == ("lambada on tiny", "tokens")
    assert sum(told[1:]) == total == sum(len(text.encode()) for text in PASSAGES) - len(PASSAGES)


def test_a_folder_without_the_data_names_the_option_and_the_places(tmp_path):
    with pytest.raises(DataError, match="holds no copy") as caught:
        load_task("wikitext", "wikitext", tmp_path)
    assert "--task-data" in str(caught.value)
    assert "DIR/wikitext-2/wiki.test.raw" in str(caught.value)


def test_without_data_and_network_the_option_is_named(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        assert datasets.config.HF_HUB_OFFLINE
        raise ConnectionError("offline mode is enabled")

    monkeypatch.setattr(harness, "_hub_answers", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    saved = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(DataError, match="the hub cannot be reached") as caught:
        load_task("lambada", "lambada_openai", None)
    assert datasets.config.HF_HUB_OFFLINE is saved
    assert "--task-data DIR: DIR/eval/lambada_test.jsonl" in str(caught.value)


def test_a_broken_data_set_says_what_is_wrong_with_it(monkeypatch):
    import datasets

    def broken(*args, **kwargs):
        raise ValueError("no split called test\nand a long list")

    monkeypatch.setattr(harness, "_hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(DataError, match=r"\(no split called test\)"):
        load_task("lambada", "lambada_openai", None)


def test_a_copy_of_the_hub_data_set_serves(tiny, tmp_path):
    folder = tmp_path / "EleutherAI" / "lambada_openai"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: data/test.jsonl\n---\n"
    )
    scores = measure(load_task("lambada", "lambada_openai", tmp_path), tiny)
    assert scores["acc"].estimate.n == 5


class FakeManager:
    all_tasks = ("arc_easy", "lambada_openai")


def test_unknown_names_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(harness, "_manager", lambda names: FakeManager)
    check_names(["wikitext", "arc_easy"])
    with pytest.raises(UsageError, match="arc_esay") as caught:
        check_names(["wikitext", "arc_esay"])
    assert "arc_easy" in str(caught.value)
    with pytest.raises(UsageError, match="'arc_esay', 'lamdba'"):
        check_names(["arc_esay", "wikitext", "lamdba"])


def test_without_lm_eval_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(harness, "_installed", lambda: False)
    with pytest.raises(ModelError, match="not installed") as caught:
        check_names(["wikitext"])
    assert "pip install lm-eval" in str(caught.value)
    with pytest.raises(UsageError, match="lamdba") as slip:
        check_names(["lamdba"])
    assert "lambada" in str(slip.value)


def test_a_continuation_longer_than_a_request_is_refused(tiny, lambada_folder):
    with pytest.raises(DataError, match="3 tokens"):
        measure(load_task("lambada", "lambada_openai", lambada_folder), tiny, max_length=2)


def questions(folder, name, records):
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_too_long_a_context_loses_its_beginning(tiny, tmp_path):
    """A question of 90 bytes before windows of 48: the answer is scored after the last of them."""
    query, choices = ("abcdefghi " * 9).strip(), ["yes", "never", "at times", "no"]
    folder = questions(tmp_path, "openbook_qa.jsonl", [{"query": query, "choices": choices, "gold": 1}])
    scores = measure(load_task("openbookqa", "openbookqa", folder), tiny)
    sums = []
    for choice in choices:
        ids = tiny.tokenizer(f"{query} {choice}").input_ids
        sums.append(float(log_probabilities(tiny.model, ids[-MAX_LENGTH - 1 :])[-len(choice) - 1 :].sum()))
    by_length = [total / len(choice) for total, choice in zip(sums, choices, strict=True)]
    assert scores["acc"].estimate.value == (sums.index(max(sums)) == 1)
    assert scores["acc_norm"].estimate.value == (by_length.index(max(by_length)) == 1)
    found, _ = run_harness(
        load_task("openbookqa", "openbookqa", folder),
        tiny,
        EvaluationSettings(),
        max_length=MAX_LENGTH,
        batch_size=None,
        reporter=SilentReporter(),
    )
    (sample,) = found["samples"]["openbookqa"]
    assert [float(answer[0]) for (answer,) in sample["resps"]] == pytest.approx(sums, rel=1e-5)


def test_accuracies_golden(tiny_folder, tmp_path):
    """With every token as probable as any other, 1 / 259, all can be worked out by hand."""
    source = resolve_model(str(tiny_folder))
    model = load_model(source)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    even = LoadedModel(model=model, tokenizer=load_tokenizer(source), name="even")
    # A choice of n letters is n + 1 bytes with its space: of the sums the shortest has the largest, by letter the
    # longest, -(n + 1) / n log 259.
    choices = ["yes", "never", "at times", "no"]
    records = [{"query": f"{number}?", "choices": choices, "gold": gold} for number, gold in enumerate((3, 3, 2, 0))]
    scores = measure(load_task("openbookqa", "openbookqa", questions(tmp_path, "openbook_qa.jsonl", records)), even)
    assert scores["acc"].estimate.value == 2 / 4
    assert scores["acc_norm"].estimate.value == 1 / 4
    # sqrt of the sample's variance over the count: (4 / 4) / 3 / 4 of 1, 1, 0, 0; (3 / 4) / 3 / 4 of 0, 0, 1, 0.
    assert scores["acc"].estimate.stderr == pytest.approx(math.sqrt(1 / 3 / 4))
    assert scores["acc_norm"].estimate.stderr == pytest.approx(1 / 4)
    # LAMBADA: 259 to the mean of the last words' bytes, each with its space: 3 and 5.
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a bc"}\n{"text": "a bcde"}\n')
    scores = measure(load_task("lambada", "lambada_openai", tmp_path), even)
    assert scores["perplexity"].estimate.value == pytest.approx(259.0**4, rel=1e-5)
    assert scores["acc"].estimate.value == 0


def test_documents_and_templates_are_made_once(tiny, tmp_path, monkeypatch):
    """Whatever lm-eval does with them, for two models; and it is as it was afterwards."""
    import lm_eval.utils
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    records = [
        {"query": f"Baking: He eats. He bakes {n}", "choices": ["a b", "c", "de", "f g h"], "gold": n % 4}
        for n in range(3)
    ]
    folder = questions(tmp_path, "hellaswag_val.jsonl", records)
    splits = [getattr(ConfigurableTask, name) for name in harness._SPLITS]
    wanted = measure(load_task("hellaswag", "hellaswag", folder), tiny)
    mapped, compiled, encoded = [], [], []
    change, build, encode = Dataset.map, type(lm_eval.utils.env).compile, tiny.tokenizer_copy.encode
    monkeypatch.setattr(Dataset, "map", lambda self, *args, **more: mapped.append(1) or change(self, *args, **more))
    monkeypatch.setattr(
        type(lm_eval.utils.env),
        "compile",
        lambda self, source, *args, **more: compiled.append(source) or build(self, source, *args, **more),
    )
    monkeypatch.setattr(
        tiny.tokenizer_copy, "encode", lambda text, **more: encoded.append(text) or encode(text, **more)
    )
    task = load_task("hellaswag", "hellaswag", folder)
    for _ in range(2):
        encoded.clear()
        assert measure(task, tiny) == wanted
    assert len(mapped) == 1
    assert len(compiled) <= 3 * len(set(compiled))  # in loading, and once for each model
    assert len(compiled) < 3 * len(records)
    # A question and its four ends, each with the question before it.
    assert len(encoded) == 5 * len(records)
    assert "from_string" not in vars(lm_eval.utils.env)
    assert [getattr(ConfigurableTask, name) for name in harness._SPLITS] == splits


def test_contains_golden(tmp_path):
    (task,) = squad(tmp_path, ["a"]).loaded["tasks"].values()
    document = {"text": "Which?", "value": "Blue Nile"}
    for written, wanted in ((" the blue nile, I think", 1), (" Blue  Nile", 0), (" Nile", 0), ("", 0)):
        assert task.process_results(document, [written])["contains"] == wanted


def test_a_group_of_lm_eval_has_the_error_of_its_tasks(tiny, tmp_path):
    records = [
        {"query": f"Question: is {number} odd?", "choices": ["yes", "no"], "gold": number % 2} for number in range(9)
    ]
    questions(tmp_path, "arc_easy.jsonl", records[:3])
    questions(tmp_path, "openbook_qa.jsonl", records)
    names = ["arc_easy", "openbookqa"]
    tasks = [load_task(name, name, tmp_path).loaded["tasks"][name] for name in names]
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    weighted = {"metric": "acc", "weight_by_size": True}
    group = Group.from_config(GroupConfig(group="pair", aggregate_metric_list=[weighted]))
    for task in tasks:
        group.add(task)
    loaded = harness._manager(names).load([group])
    found = measure_harness(
        harness.HarnessTask("pair", loaded),
        tiny,
        EvaluationSettings(),
        max_length=MAX_LENGTH,
        batch_size=4,
        reporter=SilentReporter(),
    )
    scores = {(score.task, score.metric): score.estimate for score in found}
    small, large, both = (scores[name, "acc"] for name in (*names, "pair"))
    assert (small.n, large.n, both.n) == (3, 9, 12)
    assert both.value == pytest.approx((3 * small.value + 9 * large.value) / 12)
    assert both.stderr == pytest.approx(math.hypot(3 / 12 * small.stderr, 9 / 12 * large.stderr))


def squad(folder, contexts):
    paragraphs = [
        {"context": context, "qas": [{"question": "Which?", "answers": [{"text": "e"}], "is_impossible": False}]}
        for context in contexts
    ]
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]}))
    return load_task("squad", "squad_completion", folder)


def test_texts_that_are_written_do_not_depend_on_the_batch(tiny, tmp_path):
    task = squad(tmp_path, ["a" * 5, "words of a longer kind " * 4, "b" * 60, "c d"])
    written = [
        run_harness(task, tiny, EvaluationSettings(), max_length=256, batch_size=batch_size, reporter=SilentReporter())[
            0
        ]["samples"]["squad_completion"]
        for batch_size in (1, 4)
    ]
    assert [sample["resps"] for sample in written[0]] == [sample["resps"] for sample in written[1]]
    assert any(sample["resps"][0][0] for sample in written[0])


def test_texts_that_are_written_are_those_of_lm_eval_alone(tiny, tmp_path):
    """Prompts of unlike lengths, one of them cut to its last 208 tokens, with ends that come early in some rows."""
    task = squad(tmp_path, ["a" * 5, "words of a longer kind " * 10, "b" * 60, "c d"])
    (part,) = task.loaded["tasks"].values()
    shapes = []
    hook = tiny.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    def samples(until):
        part.set_config(key="generation_kwargs", value={"do_sample": False, "temperature": 0.0, "until": until})
        ours, _ = run_harness(task, tiny, EvaluationSettings(), max_length=256, batch_size=4, reporter=SilentReporter())
        return [sample["resps"][0][0] for sample in ours["samples"]["squad_completion"]]

    try:
        whole = samples([])
        # A prompt goes through once, every further token alone; the longest prompt has 256 - 48 tokens.
        assert shapes == [(4, 256 - 48), *[(4, 1)] * 47]
    finally:
        hook.remove()
    early = whole[0][3:5]
    ours = samples([early])
    assert any(len(short) < len(text) for short, text in zip(ours, whole, strict=True))
    with harness._quiet():
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        stock = HFLM(pretrained=tiny.model, tokenizer=tiny.tokenizer, backend="causal", max_length=256, batch_size=2)
        alone = evaluate(lm=stock, task_dict=task.loaded, bootstrap_iters=0, log_samples=True)
    assert ours == [sample["resps"][0][0] for sample in alone["samples"]["squad_completion"]]


def test_room_to_write_is_asked_for(tiny, tmp_path):
    with pytest.raises(DataError, match="write up to 48 tokens; a request holds 48") as caught:
        measure(squad(tmp_path, ["a"]), tiny)
    assert "--max-length above 48" in str(caught.value)


def test_missing_packages_are_named_before_any_work(monkeypatch):
    monkeypatch.setattr(harness, "_installed", lambda package="lm_eval": package != "rouge_score")
    with pytest.raises(ModelError, match="rouge_score") as caught:
        check_packages([TASKS["lambada"], TASKS["xsum"]])
    assert "pip install rouge_score" in str(caught.value)


def test_xsum_is_scored_by_rouge(tmp_path):
    pytest.importorskip("rouge_score")
    folder = tmp_path / "EdinburghNLP" / "xsum"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"document": "Cats sat on mats.", "summary": "The cats\\nsat down"}\n')
    (task,) = load_task("xsum", XSUM, tmp_path).loaded["tasks"].values()
    (document,) = task.test_docs()
    assert task.doc_to_text(document) == "Summarize the following article:\n\nCats sat on mats.\n\nSummary:"
    # Stemmed: "sat the cat" against "the cat sat down": three of three and of four words, two of them in order.
    found = task.process_results(document, [" sat  the cat"])
    assert found["rouge1"] == pytest.approx(2 * (3 / 3) * (3 / 4) / (3 / 3 + 3 / 4))
    assert found["rougeL"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))


@pytest.mark.parametrize("name", [task.harness_name for task in TASKS.values() if task.harness_name])
def test_metrics_that_are_listed_are_those_that_lm_eval_lists(name):
    """The registry speaks of metrics before lm-eval is imported; where lm-eval lists them too, they are the same."""
    listed = harness.metrics_of(TaskInfo("x", "harness", (), "", "", name))
    (ours,) = {task.metrics for task in TASKS.values() if task.harness_name == name}
    assert listed is None or set(listed) == set(ours)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "documents"), [("wikitext", 1), ("lambada_openai", 8)])
def test_shared_data_runs_without_a_network(tiny, monkeypatch, name, documents):
    root = shared_data()
    if root is None:
        pytest.skip("needs the shared data folder: wikitext-2 and eval")
    monkeypatch.setattr(harness, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    scores = measure(load_task(name, name, root / "data"), tiny, max_length=512, limit=documents)
    assert all(score.estimate.n == documents for score in scores.values())
    assert all(math.isfinite(score.estimate.value) for score in scores.values())
