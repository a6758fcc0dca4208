"""Focus attention: one function for training, evaluation and speed."""

from focus.attention.api import choose_backend, focus_attention
from focus.attention.reference import focus_attention_reference

__all__ = ["choose_backend", "focus_attention", "focus_attention_reference"]
