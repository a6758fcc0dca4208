"""Which floating type a run's products take."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def product_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of `precision` on a device; "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if precision != "auto":
        return getattr(torch, precision)
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has products in bfloat16, which torch can also emulate, slowly."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)


def products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager:
    """Autocast to `dtype`; nothing happens for float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
