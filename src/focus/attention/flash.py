"""Attention pieces: attention over some pairs that returns its log-sum-exp, so that pieces can be merged exactly.

    forward(query, key, value, mask, causal)                        -> out, lse
    backward(grad_out, query, key, value, out, lse, mask, causal)   -> grad_query, grad_key, grad_value

query: [N, H, Tq, D]; key, value: [N, Hkv, Tk, D] with H a multiple of Hkv; lse: [N, H, Tq], float32 or float64; mask:
float32, added to the scores, [1 or N, 1, Tq, Tk]; causal: query i sees the keys up to i. `backward` may be given the
out and lse of the whole, merged attention: then it returns this piece's share of the whole gradient.

The mask is finite (`MASKED`), so that a query without any pair in a piece gets a lse near MASKED and no weight.
`working_dtype` says in which dtype pieces want their inputs.

The CUDA pieces have never run on a device. Tests on a CPU check the arguments against the operators' schemas and meta
kernels, and the arithmetic around the operators with stand-ins that compute what these are documented to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus.attention.dense import Dense
from focus.errors import UserError

LOW_PRECISION = (torch.bfloat16, torch.float16)
WIDEST_FLASH = 256
WIDTH_STEP, MASK_STEP, LSE_STEP = 8, 16, 32


@dataclass(frozen=True)
class CpuFlash:
    """The flash kernel that torch ships for the CPU: memory in O(Tq + Tk)."""

    scale: float | None = None
    softcap: None = None
    name = "cpu-flash"

    def working_dtype(self, given: torch.dtype) -> torch.dtype:
        return torch.promote_types(given, torch.float32)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=_fitting(mask, query), scale=self.scale
        )

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=_fitting(mask, query), scale=self.scale
        )


@dataclass(frozen=True)
class CudaEfficient:
    """PyTorch's memory-efficient kernel: any mask, float32 and lower. Never run on a device.

    It knows no shared key heads: heads that share one are laid one after the other as more queries, except in causal
    pieces, for which keys and values are repeated.
    """

    scale: float | None = None
    softcap: None = None
    name = "cuda-efficient"

    def working_dtype(self, given: torch.dtype) -> torch.dtype:
        return given

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        heads, shared = query.shape[1], query.shape[1] // key.shape[1]
        key, value = (_repeated(x, shared) if causal else x for x in (key, value))
        q = query if causal else _folded(query, key)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *map(_wide, (q, key, value)), _bias(mask, q, key), True, 0.0, causal, scale=self._scale(query)
        )
        out, lse = out[..., : value.shape[3]], lse[:, :, : q.shape[2]]
        return out.reshape(*query.shape[:3], -1), lse.reshape(len(query), heads, -1)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared, key_shape = query.shape[1] // key.shape[1], key.shape
        key, value = (_repeated(x, shared) if causal else x for x in (key, value))
        q, g, o = (x if causal else _folded(x, key) for x in (query, grad_out, out))
        lse = lse.float().reshape(*q.shape[:3])
        seed = torch.empty((), dtype=torch.long, device=query.device)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            _wide(g),
            *map(_wide, (q, key, value)),
            _bias(mask, q, key),
            _tokens_outermost(_wide(o)),
            pad(lse, (0, -q.shape[2] % LSE_STEP), value=torch.inf).contiguous(),
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=self._scale(query),
        )
        grad_query, *of_keys = (x[..., : y.shape[3]] for x, y in zip(grads, (query, key, value), strict=False))
        if causal:
            of_keys = [x.unflatten(1, (key_shape[1], shared)).sum(2) for x in of_keys]
        return grad_query.reshape(query.shape), *of_keys

    def _scale(self, query: Tensor) -> float:
        return query.shape[3] ** -0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class CudaFlash(CudaEfficient):
    """PyTorch's flash kernel, bfloat16 and float16; pieces with a mask go to the memory-efficient one. Never run.

    The kernel is flash-attention 2, or 3 after `torch.nn.attention.activate_flash_attention_impl("FA3")`.
    """

    name = "cuda-flash"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        if mask is not None or (causal and query.shape[2] != key.shape[2]):
            return super().forward(query, key, value, mask, causal)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *map(_wide, (query, key, value)), 0.0, causal, False, scale=self._scale(query)
        )
        return out[..., : value.shape[3]], lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask is not None or (causal and query.shape[2] != key.shape[2]):
            return super().backward(grad_out, query, key, value, out, lse, mask, causal)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *map(_wide, (grad_out, query, key, value, out)),
            lse.float().contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            torch.empty(2, dtype=torch.uint64, device=query.device),
            torch.empty((), dtype=torch.uint64, device=query.device),
            scale=self._scale(query),
        )
        return tuple(x[..., : y.shape[3]] for x, y in zip(grads, (query, key, value), strict=True))


@dataclass(frozen=True)
class FlashAttn(Dense):
    """The package flash-attn (2.7 or later) where scores are capped; pieces with a mask are dense. Never run.

    Without a cap the package would run the kernel that PyTorch ships.
    """

    name = "flash-attn"

    def working_dtype(self, given: torch.dtype) -> torch.dtype:
        return given

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        if mask is not None or (causal and query.shape[2] != key.shape[2]):
            return super().forward(query, key, value, mask, causal)
        out, lse, *_ = _flash_attn()._wrapped_flash_attn_forward(
            *(_wide(x).transpose(1, 2) for x in (query, key, value)),
            **self._arguments(query, causal),
            return_softmax=False,
        )
        return out.transpose(1, 2)[..., : value.shape[3]], lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask is not None or (causal and query.shape[2] != key.shape[2]):
            return super().backward(grad_out, query, key, value, out, lse, mask, causal)
        g, q, k, v, o = (_wide(x).transpose(1, 2).contiguous() for x in (grad_out, query, key, value, out))
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn()._wrapped_flash_attn_backward(
            g, q, k, v, o, lse.float().contiguous(), *grads, **self._arguments(query, causal), deterministic=False
        )
        return tuple(x.transpose(1, 2)[..., : y.shape[3]] for x, y in zip(grads, (query, key, value), strict=True))

    def _arguments(self, query: Tensor, causal: bool) -> dict:
        return {
            "dropout_p": 0.0,
            "softmax_scale": query.shape[3] ** -0.5 if self.scale is None else self.scale,
            "causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": self.softcap,
            "alibi_slopes": None,
        }


Pieces = CpuFlash | CudaEfficient | CudaFlash | FlashAttn | Dense


def choose_pieces(query: Tensor, value: Tensor, *, scale: float | None, softcap: float | None) -> Pieces:
    """The one place that decides which kernel computes a piece; query and value as the caller has them.

    Without a cap: flash on a CPU and, in bfloat16 and float16, on CUDA; memory-efficient on CUDA in float32. With a
    cap: flash-attn on CUDA if it is installed. Dense for everything else, float64 on CUDA among it.
    """
    device, width = query.device.type, query.shape[-1]
    flash = query.dtype in LOW_PRECISION and width <= WIDEST_FLASH
    if width == value.shape[-1]:
        if softcap is None and device == "cpu":
            return CpuFlash(scale)
        if softcap is None and device == "cuda" and query.dtype != torch.float64:
            return CudaFlash(scale) if flash else CudaEfficient(scale)
        if softcap is not None and device == "cuda" and flash and _flash_attn() is not None:
            return FlashAttn(scale, softcap)
    return Dense(scale, softcap)


@lru_cache(maxsize=1)
def _flash_attn() -> ModuleType | None:
    """flash-attn's own interface, or None where it is not installed or does not load."""
    try:
        from flash_attn import flash_attn_interface
    except ImportError:
        return None
    return flash_attn_interface


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise UserError unless the three fit each other."""
    if query.dim() != 4 or key.dim() != 4 or key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
        raise UserError(
            "attention: expected query [B, H, Tq, D] with key and value [B, Hkv, Tk, D], got "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1] or query.shape[2] > key.shape[2]:
        raise UserError(
            "attention: expected one batch size, query heads a multiple of key heads and no more queries than keys, "
            f"got query {list(query.shape)} and key {list(key.shape)}"
        )


def _fitting(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask in a dtype that the kernel adds rightly: with a float32 mask, float64 scores come out wrong."""
    return mask.double() if mask is not None and query.dtype == torch.float64 else mask


def _folded(x: Tensor, key: Tensor) -> Tensor:
    """[N, H, T, D] -> [N, Hkv, H / Hkv * T, D]: heads that share keys one after the other."""
    return x.reshape(len(x), key.shape[1], -1, x.shape[3])


def _repeated(x: Tensor, shared: int) -> Tensor:
    return x if shared == 1 else x.repeat_interleave(shared, dim=1)


def _wide(x: Tensor) -> Tensor:
    """Zeros behind the last dimension up to a multiple of WIDTH_STEP, contiguous."""
    if x.shape[3] % WIDTH_STEP:
        return pad(x, (0, -x.shape[3] % WIDTH_STEP))
    return x if x.stride(3) == 1 else x.contiguous()


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel wants it: [N, H, Tq, Tk], query's dtype, rows aligned in memory."""
    if mask is None:
        return None
    rows, columns = mask.shape[2:]
    bias = query.new_empty(len(mask), 1, query.shape[2] // rows, rows, columns + -columns % MASK_STEP)
    bias[..., :columns] = mask.clamp(min=torch.finfo(query.dtype).min / 2).unsqueeze(2)
    return bias.flatten(2, 3)[..., :columns].expand(len(query), query.shape[1], -1, -1)


def _tokens_outermost(x: Tensor) -> Tensor:
    """[N, H, T, D] that lies in memory as [N, T, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
