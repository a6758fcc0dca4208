"""What happens to the groups of a few fixed windows while a model trains: dominance, stability and collapse.

The windows are the first of training, so that held-out text stays unread until the evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COLLAPSED = 0.9
"""Dominance above which groups count as collapsed. With nine tokens of ten in one group at least 0.81 of the far pairs
share it, whatever K: the groups prune next to nothing. At K=8 (even: 0.125) the paper prints 0.994 for its collapse and
0.16 and less for what it calls stable (its table of dominance), so nothing printed there lies near the line."""


def look(now: Tensor, before: Tensor, *, steps: int, ends_phase: bool) -> dict:
    """What a log's record holds of a probe, from the groups [L, B, T] of the same tokens now and `steps` steps before.

    Of each layer: dominance, the share of the tokens in the largest group, all windows together; stability, the share
    that kept its group.
    """
    layers = [
        {
            "dominance": layer.flatten().bincount().max().item() / layer.numel(),
            "stability": (layer == earlier).double().mean().item(),
        }
        for layer, earlier in zip(now, before, strict=True)
    ]
    return {"steps": steps, "ends_phase": ends_phase, "layers": layers}


def mean(record: dict, name: str) -> float:
    """Mean over the layers of dominance or stability of a log's record with a probe."""
    return fmean(layer[name] for layer in record["probe"]["layers"])


def summary(records: Sequence[dict]) -> dict:
    """The metrics of a training's log: nothing without probes, else those of the last probe and of each phase's end.

    collapse_step: the first probed step whose mean dominance is above `COLLAPSED`, or None.
    """
    probed = [record for record in records if "probe" in record]
    if not probed:
        return {}
    collapsed = (record["step"] for record in probed if mean(record, "dominance") > COLLAPSED)
    phases = [
        {
            "trains": record["phase"],
            "step": record["step"],
            "dominance": mean(record, "dominance"),
            "stability": mean(record, "stability"),
            "layers": record["probe"]["layers"],
        }
        for record in probed
        if record["probe"]["ends_phase"]
    ]
    return {
        "dominance": mean(probed[-1], "dominance"),
        "stability": mean(probed[-1], "stability"),
        "collapse_step": next(collapsed, None),
        "phases": phases,
    }
