"""What the decode steps of all operators share: rows of a pool, the ring of convolution inputs, rounding, workspace."""

from lapkernels.decoding.rows import ConvState, store_inputs

__all__ = ["ConvState", "store_inputs"]
