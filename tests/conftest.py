"""Set before torch is imported: spinning OpenMP threads make small LAPACK calls a hundred times slower on two cores."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
