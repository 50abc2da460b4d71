"""How `demo:gdn` is made: corpus, tokenizer, recall rows, optimiser, captured training step, evaluation, card."""
