"""Claims that need no run: counts from model shapes, combinatorics of groups, and printed numbers against each other.

Each formula is a function; its parameters annotated `Shape` take a model's name, the numbers a number or a printed one
as table.row.column.
"""

from __future__ import annotations

import inspect
import math
from typing import get_type_hints

from focus.errors import UserError
from focus.paper import printed
from focus.paper.shapes import SHAPES, Shape


def centroid_parameters(model: Shape, groups: float, routing_dim: float) -> float:
    """Of all layers: L (d d_g + K d_g), PAPER section 1."""
    return model.layers * layer_parameters(model, groups, routing_dim)


def layer_parameters(model: Shape, groups: float, routing_dim: float) -> float:
    """Of one layer: d d_g + K d_g."""
    return routing_dim * (model.width + groups)


def centroid_percent(model: Shape, groups: float, routing_dim: float) -> float:
    """Centroids in percent of the model's own parameters."""
    return 100 * centroid_parameters(model, groups, routing_dim) / model.parameters


def implied_total(model: Shape, groups: float, routing_dim: float, percent: float) -> float:
    """Millions of parameters of which the centroids are the printed percentage."""
    return centroid_parameters(model, groups, routing_dim) / percent / 1e4


def model_parameters(model: Shape) -> float:
    """All parameters of a model."""
    return model.parameters


def lora_on_attention_input(model: Shape, rank: float) -> float:
    """LoRA on GPT-2's c_attn, the one matrix for queries, keys and values: L r (d + 3 d)."""
    return model.layers * rank * 4 * model.width


def lora_on_query_and_value(model: Shape, rank: float) -> float:
    """LoRA on q_proj and v_proj: L r (2 d + d + d_kv)."""
    return model.layers * rank * (3 * model.width + model.key_width)


def queries_a_key(model: Shape) -> float:
    """Query heads that share a key head: 1 for multi-head attention, more for grouped queries."""
    return model.heads / model.key_heads


def models_with_softcap() -> float:
    """How many of the models in the table of shapes cap their attention scores."""
    return sum(shape.softcap for shape in SHAPES.values())


def groups_over_memberships(groups: float, top_k: float) -> float:
    """K / k, as Table 7's speed-ups are computed."""
    return groups / top_k


def shared_group_percent(groups: int, top_k: int) -> float:
    """Chance that two tokens share a group when each joins k of K evenly and independently: 1 - C(K-k, k) / C(K, k)."""
    return 100 * (1 - math.comb(groups - top_k, top_k) / math.comb(groups, top_k))


def shared_two_groups_percent(groups: int, top_k: int) -> float:
    """Chance that two tokens share at least two groups, which one call a group would count twice (hypergeometric)."""
    at_most_one = math.comb(groups - top_k, top_k) + top_k * math.comb(groups - top_k, top_k - 1)
    return 100 * (1 - at_most_one / math.comb(groups, top_k))


def least_shared_groups(groups: int, top_k: int) -> float:
    """Groups that any two tokens share at least, by the pigeonhole principle: 2 k - K, whatever the routing."""
    return max(0, 2 * top_k - groups)


def speed_of_group_calls(groups: float, top_k: float) -> float:
    """Speed-up of one call a group of k T / K tokens each: K / k^2."""
    return groups / top_k**2


def speed_limit(pairs_kept: float) -> float:
    """Most speed-up at an equal cost a pair, from the percentage of pairs kept."""
    return 100 / pairs_kept


def speed_limit_with_window(groups: float, tokens: float, window: float) -> float:
    """Most speed-up of even groups at an equal cost a pair, appendix D: 1 / (1/K + 2 w / n)."""
    return 1 / (1 / groups + 2 * window / tokens)


def percent_change(value: float, reference: float) -> float:
    """One number against another in percent of it."""
    return 100 * (value / reference - 1)


def difference(value: float, reference: float) -> float:
    """One number less another."""
    return value - reference


def smallest(numbers: list[float]) -> float:
    """The smallest of some numbers."""
    return min(numbers)


def largest(numbers: list[float]) -> float:
    """The largest of some numbers."""
    return max(numbers)


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(centroid_parameters, layer_parameters, centroid_percent, implied_total, model_parameters),
        *(lora_on_attention_input, lora_on_query_and_value, queries_a_key, models_with_softcap),
        *(groups_over_memberships, shared_group_percent, shared_two_groups_percent, least_shared_groups),
        *(speed_of_group_calls, speed_limit, speed_limit_with_window),
        *(percent_change, difference, smallest, largest),
    )
}


def call(name: str, arguments: dict) -> float:
    """The value of a formula. Raises UserError for an unknown function, argument, model or printed number."""
    if name not in FUNCTIONS:
        raise UserError(f"function: expected one of {', '.join(FUNCTIONS)}, got {name}")
    function = FUNCTIONS[name]
    expected = list(inspect.signature(function).parameters)
    if set(arguments) != set(expected):
        raise UserError(f"arguments of {name}: expected {', '.join(expected)}, got {', '.join(arguments) or 'none'}")
    hints = get_type_hints(function)
    return float(function(**{key: _resolve(value, hints[key]) for key, value in arguments.items()}))


def _resolve(value: object, annotation: object) -> object:
    if annotation is Shape:
        if value not in SHAPES:
            raise UserError(f"model: expected one of {', '.join(SHAPES)}, got {value}")
        return SHAPES[value]
    if isinstance(value, list):
        return [_resolve(each, float) for each in value]
    return printed.number(value) if isinstance(value, str) else value
