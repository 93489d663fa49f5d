"""Loaded by Python at start where this folder is on PYTHONPATH: torch says that the CPU has no AVX-512."""

import torch

for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported"):
    setattr(torch.cpu, name, lambda: False)
