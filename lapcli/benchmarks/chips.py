"""What data sheets say of chips, by the names that CUDA gives them."""

NOMINAL_FLOPS = {
    # NVIDIA's data sheets give BF16 with sparsity for Hopper (1979 TFLOP/s); dense is half of that. SXM only: the PCIe
    # and NVL cards of the same generation are slower.
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    # NVIDIA A100 data sheet, BF16 dense, the same for SXM and PCIe.
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}
"""Dense bf16 products a second."""

NOMINAL_BANDWIDTH = {
    # The same data sheets, memory bandwidth.
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100-PCIE-40GB": 1.555e12,
    "NVIDIA A100 80GB PCIe": 1.935e12,
}
"""Bytes of memory a second."""
