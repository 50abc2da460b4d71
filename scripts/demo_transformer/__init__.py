"""How `demo:transformer` is made: Llama's architecture in the run that makes `demo:gdn` (`scripts/demo_gdn`)."""
