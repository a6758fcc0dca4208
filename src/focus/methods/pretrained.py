"""The base model as it is."""

from focus.methods.base import MethodKind


class Pretrained(MethodKind):
    """Nothing is added and nothing trains."""
