"""Top-k attention by the true scores: the most weight that so many keys a query can hold, so a bound for selection.

No method of its own but the bound that papers on selection report (arXiv 2312.04985, arXiv 2410.16179): it computes all
scores only to find the largest, so it saves nothing that a clever selection would. It bounds the weight held, not the
perplexity: the weight that is left out is shared among what is read, whatever its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.methods.selection import PairCounter, attend_to, causal_blocks, nearest_top
from focus.methods.structural import Call, Structural


class OracleTopK(Structural):
    """Each query of each head reads the `settings.tokens` keys of largest weight; of equal ones the nearest."""

    name = "oracle_top_k"

    def attend(self, call: Call) -> Tensor:
        """All scores of some queries, then attention over the chosen keys."""
        call.state.backend = "scores, gathered"
        counter, outputs = PairCounter(call.state), []
        for block in causal_blocks(call):
            with torch.no_grad():
                every = slice(None)
                scores = block.scores(every).masked_fill(~block.visible(every), -torch.inf)
                index = nearest_top(scores, call.state.settings.tokens)
                read = scores.gather(-1, index) > -torch.inf
            outputs.append(attend_to(block, index, read))
            counter.add(block, index, read)
        counter.report()
        return torch.cat(outputs[::-1], dim=2)
