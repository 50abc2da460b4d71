import math

import pytest

from lapcli.evaluation.estimates import accuracy, perplexity
from lapcli.evaluation.results import Evaluation, ModelScores, Score
from lapcli.evaluation.table import evaluation_table, format_value


@pytest.mark.parametrize(
    ("value", "stderr", "signed", "text"),
    [
        pytest.param(38.9234, 0.213, False, "38.92 ± 0.21", id="two digits of the error"),
        pytest.param(0.97, 0.0171, False, "0.970 ± 0.017", id="accuracy"),
        pytest.param(1.5, 0.02, True, "+1.500 ± 0.020", id="signed"),
        pytest.param(412.3, 25.0, False, "412 ± 25", id="no decimals"),
        pytest.param(412.34567, None, False, "412.3", id="no error"),
        pytest.param(0.25, 0.0, False, "0.2500", id="no spread"),
        pytest.param(5.462e7, 1.6e7, False, "5.462e+07 ± 1.6e+07", id="large"),
        pytest.param(math.inf, None, False, "inf", id="infinite"),
        pytest.param(0.0, None, True, "+0.000", id="zero"),
    ],
)
def test_numbers_show_what_their_error_supports(value, stderr, signed, text):
    assert format_value(value, stderr, signed=signed) == text


def test_table_has_a_line_a_measure_and_says_what_it_refused():
    def one(label, rate, hits, length):
        settings = {"max_length": length}
        scores = (
            Score("builtin", "token_perplexity", False, perplexity([rate, rate * 1.1], [2, 2]), settings),
            Score("niah", "exact_match", True, accuracy(hits), {}, length=512),
        )
        return ModelScores(label, label, None, None, "float32", "auto", 1, scores)

    evaluation = Evaluation(
        models=(
            one("base", -6.0, [True, True], 64),
            one("sliced", -7.0, [True, False], 64),
            one("odd", -6.0, [True], 32),
        ),
        versions={},
    )
    table = evaluation_table(evaluation)
    assert table.columns == ("task", "metric", "base", "sliced", "odd", "sliced - base", "odd - base")
    assert [row[:2] for row in table.rows] == [("builtin", "token_perplexity ↓"), ("niah 512", "exact_match ↑")]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.rows[0][6] == ""
    assert table.rows[0][5].startswith("+")
    assert table.better == ((False, None), (False, None))
    assert any("max_length 64 and 32" in note for note in table.notes)
