"""XSum as a task of lm-eval, which has none: the prompt, length and scores of its `cnn_dailymail_abisee`."""

from typing import Any

XSUM = "lapcli_xsum"
XSUM_DATA = "EdinburghNLP/xsum"
_METRICS = ("rouge1", "rouge2", "rougeL")


def xsum_task(**override: Any) -> Any:
    """The task, with its data loaded.

    Args:
        override: of the configuration, such as `dataset_path` or `custom_dataset`.
    """
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": XSUM,
        "dataset_path": XSUM_DATA,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "Summarize the following article:\n\n{{document}}\n\nSummary:",
        "doc_to_target": "{{summary}}",
        "process_results": _scores,
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in _METRICS],
        "generation_kwargs": {"max_gen_toks": 128, "do_sample": False},
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config={**config, **override})


def _scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    from rouge_score import rouge_scorer

    # White space is evened out and words are stemmed, as in lm-eval's cnn_dailymail.
    said, wanted = (" ".join(text.split()) for text in (results[0], doc["summary"]))
    found = rouge_scorer.RougeScorer(_METRICS, use_stemmer=True).score(wanted, said)
    return {metric: found[metric].fmeasure for metric in _METRICS}
