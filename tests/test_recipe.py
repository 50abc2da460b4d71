"""What is said of settings that do not fit: which they are, what is wrong, and what was found."""

import pytest

from lapcli.cli.context import from_command_line
from lapcli.errors import RecipeError, UsageError
from lapcli.linearising.recipe import ConversionRecipe
from lapcli.recipe import CalibrationSettings, Recipe, RecoverySettings, SettingsError, validate
from lapcli.training_recipe import PretrainingSettings

CHAIN = {"calibration": {"data": "builtin", "samples": 2, "seq_len": 8}, "selection": {"ratio": 0.5}}
RECOVERY = {"data": "builtin", "seq_len": 8, "steps": 2}
TRAINING = {"from": "demo:gdn", "data": "builtin", "seq_len": 8, "batch_tokens": 16, "steps": 1}
CONVERSION = {
    "model": "m",
    "sensitivity": {"data": "builtin", "samples": 1, "seq_len": 8},
    "distillation": {"data": "builtin", "seq_len": 8, "steps": 1},
}
CASES = {
    "both budgets": (
        Recipe, {**CHAIN, "recovery": {**RECOVERY, "samples": 5}}, ("recovery.samples", "recovery.steps"),
        "give either samples or steps (found samples 5, steps 2)",
    ),
    "no budget": (
        Recipe, {**CHAIN, "recovery": {"data": "builtin", "seq_len": 8}}, ("recovery.samples", "recovery.steps"),
        "give either samples or steps (found neither)",
    ),
    "a default among them": (
        Recipe, {**CHAIN, "recovery": {**RECOVERY, "lr": 1e-7}}, ("recovery.lr_min", "recovery.lr"),
        "lr_min 1e-05 is above lr 1e-07 (found lr 1e-07)",
    ),
    "of a sweep": (
        Recipe, {**CHAIN, "sweep": {"ratio": [0.5], "keep": [4]}}, ("sweep.ratio", "sweep.keep"),
        "give either ratio or keep (found ratio [0.5], keep [4])",
    ),
    "at the top": (
        PretrainingSettings, {**TRAINING, "batch_tokens": 15}, ("batch_tokens", "seq_len"),
        "batch_tokens 15 is no multiple of seq_len 8 (found batch_tokens 15, seq_len 8)",
    ),
    "by another name in a recipe": (
        PretrainingSettings, {**TRAINING, "model": {"model_type": "qdelta"}}, ("model", "from"),
        "give either model (a config, to begin anew) or from (a model to train on from) "
        "(found model {'model_type': 'qdelta'}, from 'demo:gdn')",
    ),
    "weights": (
        ConversionRecipe,
        {**CONVERSION, "distillation": {**CONVERSION["distillation"], "align_weight": 0, "kl_weight": 0}},
        ("distillation.align_weight", "distillation.kl_weight"),
        "align_weight and kl_weight are both 0: nothing says what to learn (found align_weight 0, kl_weight 0)",
    ),
    "one alone": (
        Recipe, {**CHAIN, "calibration": {**CHAIN["calibration"], "rows": 99}}, ("calibration.rows",),
        "more than the 16 tokens of samples x seq_len that they are drawn from (found 99)",
    ),
    "an order": (
        ConversionRecipe, {**CONVERSION, "order": "last"}, ("order",),
        "'last' is none of entropy, loss, outlier, task:NAME, first (found 'last')",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "values", "fields", "complaint"), CASES.values(), ids=CASES)
def test_the_settings_that_do_not_fit_are_named(model, values, fields, complaint):
    with pytest.raises(SettingsError) as refused:
        validate(model, values, "r.yaml")
    assert refused.value.fields == fields
    assert str(refused.value) == f"r.yaml: {', '.join(fields)}: {complaint}"


def test_a_misspelled_key_is_said_before_what_it_leaves_missing():
    with pytest.raises(RecipeError, match=r"no setting 'recovery\.stepss'") as refused:
        validate(Recipe, {**CHAIN, "recovery": {**RECOVERY, "stepss": 3}}, "r.yaml")
    assert refused.value.hint == "did you mean 'steps'?"


def test_options_are_named_where_one_does_not_fit_and_settings_where_several_do_not():
    with pytest.raises(UsageError) as refused:
        from_command_line(RecoverySettings, {**RECOVERY, "samples": 5})
    assert str(refused.value) == "give either samples or steps"
    with pytest.raises(UsageError) as refused:
        from_command_line(CalibrationSettings, {**CHAIN["calibration"], "seq_len": 1}, {"seq_len": "length"})
    assert str(refused.value) == "--length: Input should be greater than 1 (found 1)"
