"""Focus attention: one function for training, evaluation and speed."""

from focus.attention.api import focus_attention
from focus.attention.reference import focus_attention_reference

__all__ = ["focus_attention", "focus_attention_reference"]
