"""The parts of `scripts/dsla_study.py`."""
