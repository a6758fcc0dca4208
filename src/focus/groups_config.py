"""The settings of the look into groups."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from focus.strict import Count, Name, Strict


class GroupsSettings(Strict):
    """What the groups of one method hold: categories of words, layer by layer (the paper's section 5)."""

    model: Name = Field(description="a key of model_settings")
    corpus: Name = Field(description="the corpus it is trained on, whose held-out windows are read")
    method: Name = Field(description="a key of methods, of kind focus; its first seed is looked at")
    attention: Literal["soft", "hard"] = Field(
        "hard", description="under which tokens are assigned; hard with the adapter's top_k"
    )
    windows: Count = Field(16, description="windows in all")
    shuffles: Count = Field(1000, description="draws of each baseline")
    passage_tokens: Count = Field(300, description="tokens of the first window shown with their groups")
    pairs: Count = Field(20, description="far pairs listed for each layer, the strongest of the first window")
