"""The compared methods: one file each, found by the config's `kind`."""

from focus.methods.base import MethodKind
from focus.methods.focus import Focus
from focus.methods.full_finetuning import FullFinetuning
from focus.methods.lora import Lora
from focus.methods.pretrained import Pretrained
from focus.methods.window import Window

METHODS: dict[str, MethodKind] = {
    "pretrained": Pretrained(),
    "full_finetuning": FullFinetuning(),
    "window": Window(),
    "focus": Focus(),
    "lora": Lora(),
}

__all__ = ["METHODS", "MethodKind"]
