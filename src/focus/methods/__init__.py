"""The compared methods: one file each, found by the config's `kind`."""

from focus.methods.base import MethodKind
from focus.methods.focus import Focus
from focus.methods.full_finetuning import FullFinetuning
from focus.methods.magicpig import MagicPIG
from focus.methods.oracle_top_k import OracleTopK
from focus.methods.performer import Performer
from focus.methods.pretrained import Pretrained
from focus.methods.sparq import SparQ
from focus.methods.window import Window

METHODS: dict[str, MethodKind] = {
    "pretrained": Pretrained(),
    "full_finetuning": FullFinetuning(),
    "window": Window(),
    "oracle_top_k": OracleTopK(),
    "sparq": SparQ(),
    "magicpig": MagicPIG(),
    "performer": Performer(),
    "focus": Focus(),
}

__all__ = ["METHODS", "MethodKind"]
