"""Focus attention: one function for training, evaluation and speed."""

from focus.attention.reference import focus_attention_reference

__all__ = ["focus_attention_reference"]
