"""Focus attention: one function for training, evaluation and speed."""

from focus.attention.api import choose_backend, focus_attention
from focus.attention.decode import GroupedCache
from focus.attention.reference import focus_attention_reference
from focus.attention.soft import soft_attention
from focus.attention.straight_through import straight_through_attention

__all__ = [
    "GroupedCache",
    "choose_backend",
    "focus_attention",
    "focus_attention_reference",
    "soft_attention",
    "straight_through_attention",
]
