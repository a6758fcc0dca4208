"""The compared methods: one file each, found by the config's `kind`."""

from focus.methods.base import MethodKind
from focus.methods.bigbird import BigBird
from focus.methods.far_scale import FarScale
from focus.methods.fixed_groups import FixedGroups
from focus.methods.focus import Focus
from focus.methods.full_finetuning import FullFinetuning
from focus.methods.kmeans_groups import KMeansGroups
from focus.methods.longformer import Longformer
from focus.methods.lora import Lora
from focus.methods.magicpig import MagicPIG
from focus.methods.moba import Moba
from focus.methods.oracle_top_k import OracleTopK
from focus.methods.performer import Performer
from focus.methods.pretrained import Pretrained
from focus.methods.quest import Quest
from focus.methods.routing_transformer import RoutingTransformer
from focus.methods.s2 import S2
from focus.methods.sparq import SparQ
from focus.methods.window import Window

METHODS: dict[str, MethodKind] = {
    "pretrained": Pretrained(),
    "full_finetuning": FullFinetuning(),
    "window": Window(),
    "longformer": Longformer(),
    "bigbird": BigBird(),
    "routing_transformer": RoutingTransformer(),
    "s2": S2(),
    "moba": Moba(),
    "quest": Quest(),
    "oracle_top_k": OracleTopK(),
    "sparq": SparQ(),
    "magicpig": MagicPIG(),
    "performer": Performer(),
    "focus": Focus(),
    "lora": Lora(),
    "far_scale": FarScale(),
    "fixed_groups": FixedGroups(),
    "kmeans_groups": KMeansGroups(),
}

__all__ = ["METHODS", "MethodKind"]
