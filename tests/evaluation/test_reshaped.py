"""Reshaped copies against the hub's columns, worked out by hand, and against what lm-eval makes of them."""

import json

import pytest

from lapcli.errors import DataError
from lapcli.evaluation import reshaped
from lapcli.evaluation.local_data import LOCAL_TASKS, find_local
from lapcli.testing import shared_data


def test_arc_gets_its_letters_and_loses_the_repeated_choice():
    record = {"query": "Question: Is ice hot?", "choices": ["yes", "no", "yes", "it boils"], "gold": 3}
    assert reshaped.arc(record) == {
        "question": "Is ice hot?",
        "choices": {"text": ["yes", "no", "it boils"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }


def test_openbookqa_keeps_every_choice():
    record = {"query": "Predators eat", "choices": ["lions", "humans", "bunnies", "grass"], "gold": 2}
    found = reshaped.openbookqa(record)
    assert found["question_stem"] == "Predators eat"
    assert found["choices"]["text"][found["choices"]["label"].index(found["answerKey"])] == "bunnies"


def test_boolq_passage_may_hold_questions_itself():
    query = "Passage: Asked:\nQuestion: who?\nThen done.\nQuestion: is it done?"
    assert reshaped.boolq({"query": query, "choices": ["no", "yes"], "gold": 1}) == {
        "passage": "Asked:\nQuestion: who?\nThen done.",
        "question": "is it done",
        "label": 1,
    }


@pytest.mark.parametrize(
    ("query", "before", "begun"),
    [
        pytest.param("Roof: A man sits on a roof. he", "A man sits on a roof.", "he", id="a word"),
        pytest.param('Ad: "Buy now!" it says. the ad', '"Buy now!" it says.', "the ad", id="quotes"),
        pytest.param("Care: How to iron. Heat the iron.", "How to iron. Heat the iron.", "", id="whole sentences"),
        pytest.param("Sax: 1 a guy plays", "1 a guy plays", "", id="no sentence before"),
        pytest.param("Sale: It costs 2.5 dollars. 50", "It costs 2.5 dollars.", "50", id="a point in a number"),
    ],
)
def test_hellaswag_is_split_at_the_last_sentence_end(query, before, begun):
    found = reshaped.hellaswag({"query": query, "choices": ["a", "b", "c", "d"], "gold": 3})
    assert (found["ctx_a"], found["ctx_b"], found["label"]) == (before, begun, "3")


@pytest.mark.parametrize(
    ("options", "continuation", "wanted"),
    [
        pytest.param(
            ["Sarah was better than Maria so Sarah", "Sarah was better than Maria so Maria"],
            "got the easier cases.",
            ("Sarah was better than Maria so _ got the easier cases.", "Sarah", "Maria"),
            id="names",
        ),
        pytest.param(
            ["The wine hit the bed, not the bedding", "The wine hit the bed, not the bed"],
            ".",
            None,
            id="one begins the other",
        ),
        pytest.param(["Ann", "Andrea"], "sang.", ("_ sang.", "Ann", "Andrea"), id="first word, alike at the start"),
    ],
)
def test_winogrande_puts_the_blank_where_the_options_part(options, continuation, wanted):
    record = {"context_options": options, "continuation": continuation, "gold": 1}
    found = reshaped.winogrande(record)
    if wanted is not None:
        assert (found["sentence"], found["option1"], found["option2"]) == wanted
    assert found["answer"] == "2"
    # What lm-eval asks: the text before the blank with each option, and what follows the blank.
    before, after = found["sentence"].split("_")
    assert [before + found["option1"], before + found["option2"]] == options
    assert after.strip() == continuation


def test_squad_leaves_out_what_has_no_answer():
    question = {"question": "Where?", "answers": [{"text": "France"}, {"text": "in France"}], "is_impossible": False}
    none = {"question": "Why?", "answers": [], "is_impossible": True}
    document = {"data": [{"title": "Normans", "paragraphs": [{"context": "They came.", "qas": [none, question]}]}]}
    assert list(reshaped.squad(document)) == [
        {"text": "Title: Normans\n\nBackground: They came.\n\nQuestion: Where?\n\nAnswer:", "value": "France"}
    ]


def choices(query, found, gold=0):
    return {"query": query, "choices": found, "gold": gold}


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        pytest.param("arc_easy", choices("Is it?", ["a", "b"]), "begin with", id="prefix"),
        pytest.param("arc_easy", choices("Question: x", ["a", "b"], 2), "gold is 2", id="gold"),
        pytest.param("arc_easy", choices("Question: x", ["a", "a"]), "twice", id="right choice twice"),
        pytest.param("openbookqa", choices("x", "ab"), "no list", id="no choices"),
        pytest.param("openbookqa", {"goal": "x", "choices": ["a", "b"], "gold": 0}, "there is: goal", id="no query"),
        pytest.param("boolq", choices("Passage: x", ["no", "yes"]), "no line", id="no question"),
        pytest.param("boolq", choices("x", ["yes", "no"]), "not no and yes", id="order"),
        pytest.param("winogrande", {"context_options": ["a", "b", "c"], "gold": 0}, "not two", id="three options"),
        pytest.param("hellaswag", choices("no label", ["a", "b"]), "no label", id="no label"),
        pytest.param("squad_completion", {"data": [{"paragraphs": [{"qas": [{}]}]}]}, "laid out", id="squad"),
        pytest.param("piqa", {"goal": "x", "sol1": "a", "sol2": "b"}, "no labels beside", id="no labels"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, task, content, message):
    name = LOCAL_TASKS[task].paths[1]
    (tmp_path / name).write_text(json.dumps(content) + "\n")
    path, local = find_local(task, tmp_path) or pytest.fail("not found")
    with pytest.raises(DataError, match=message) as caught:
        local.read(path)
    assert name in str(caught.value)


def test_piqa_reads_its_labels_and_names_both_files(tmp_path):
    (tmp_path / "piqa_valid_official.jsonl").write_text(json.dumps({"goal": "g", "sol1": "a ", "sol2": "b"}) + "\n")
    (tmp_path / "piqa_valid_labels.lst").write_text("1\n")
    path, local = find_local("piqa", tmp_path) or pytest.fail("not found")
    assert local.read(path) == [{"goal": "g", "sol1": "a ", "sol2": "b", "label": 1}]
    assert [file.name for file in local.files(path)] == ["piqa_valid_official.jsonl", "piqa_valid_labels.lst"]
    (tmp_path / "piqa_valid_labels.lst").write_text("1\n0\n")
    with pytest.raises(DataError, match=r"1 problems and .* 2 labels"):
        local.read(path)


@pytest.mark.shared
def test_shared_copies_have_the_sizes_of_the_data_sets():
    root = shared_data()
    if root is None:
        pytest.skip("needs the shared data folder: eval")
    sizes = {
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "hellaswag": 10042,
        "piqa": 1838,
        "winogrande": 1267,
        "boolq": 3270,
        "openbookqa": 500,
        "squad_completion": 2910,
    }
    for name, size in sizes.items():
        path, local = find_local(name, root / "data") or pytest.fail(name)
        documents = local.read(path)
        assert len(documents) == size
        assert local.note(documents) is None or name in LOCAL_TASKS
        if name == "hellaswag":
            # The first 3243 are captions of ActivityNet, cut in mid-sentence; the rest are whole texts of WikiHow.
            begun = [bool(document["ctx_b"]) for document in documents]
            assert not any(begun[3243:])
            assert sum(begun[:3243]) > 3230
