"""How well groups agree with categories, and how well groups would that know nothing of them.

Shapes: L layers, N tokens, K groups, C categories, S draws of a baseline. Groups are int [L, N], categories int [N].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy import ndarray


@dataclass(frozen=True)
class Null:
    """What a baseline gave: purity and information (bits), each float64 [S, L]."""

    purity: ndarray
    information: ndarray


def contingency(groups: ndarray, categories: ndarray, size: tuple[int, int]) -> ndarray:
    """How many tokens of each category each group holds, layer by layer: size (K, C) -> int64 [L, K, C]."""
    layers, (group_count, category_count) = len(groups), size
    cells = (np.arange(layers)[:, None] * group_count + groups) * category_count + categories
    counted = np.bincount(cells.ravel(), minlength=layers * group_count * category_count)
    return counted.reshape(layers, group_count, category_count)


def purity(table: ndarray) -> ndarray:
    """Share of the tokens that are in their group's most frequent category: [L, K, C] -> [L]."""
    return table.max(axis=2).sum(axis=1) / table.sum(axis=(1, 2))


def information(table: ndarray) -> ndarray:
    """Mutual information of group and category in bits: [L, K, C] -> [L]."""
    joint = table / table.sum(axis=(1, 2), keepdims=True)
    apart = joint.sum(axis=2, keepdims=True) * joint.sum(axis=1, keepdims=True)
    ratio = np.divide(joint, apart, out=np.ones_like(joint), where=joint > 0)
    return (joint * np.log2(ratio)).sum(axis=(1, 2))


def shuffled(groups: ndarray, categories: ndarray, size: tuple[int, int], draws: int, seed: int) -> Null:
    """The groups of each layer dealt anew to its tokens, so that their sizes stay.

    One permutation serves every layer, so that layers are as alike in a draw as they are in truth.
    """
    generator = np.random.default_rng(seed)
    dealt = (contingency(groups, generator.permutation(categories), size) for _ in range(draws))
    return _null(dealt)


def by_token(
    groups: ndarray, tokens: ndarray, categories: ndarray, size: tuple[int, int], draws: int, seed: int
) -> Null:
    """Each token of the vocabulary (tokens int [N]) sent to one group at random, with the layer's shares as chances.

    Such groups know nothing of categories either, but a frequent token lies in one group whole, as it nearly does
    wherever the group follows from the token; so they are purer than shuffled ones.
    """
    generator = np.random.default_rng(seed)
    kinds, place = np.unique(tokens, return_inverse=True)
    shares = contingency(groups, np.zeros_like(categories), (size[0], 1))[:, :, 0] / groups.shape[1]
    bounds = shares.cumsum(axis=1)[:, :-1]

    def draw() -> ndarray:
        chance = generator.random(len(kinds))
        sent = np.stack([np.searchsorted(layer, chance, side="right") for layer in bounds])
        return contingency(sent[:, place], categories, size)

    return _null(draw() for _ in range(draws))


def p_values(observed: ndarray, null: ndarray) -> ndarray:
    """Share of the draws at least as large, the observation counted as one: [L], [S, L] -> [L]."""
    return (1 + (null >= observed).sum(axis=0)) / (1 + len(null))


def excess(observed: ndarray, null: ndarray) -> ndarray:
    """How far each layer lies above the mean of its draws: [L], [S, L] -> [L]."""
    return observed - null.mean(axis=0)


def chosen_p_value(observed: ndarray, null: ndarray, layer: int) -> float:
    """A p-value of one layer's excess that counts the choice of it among all layers.

    A draw counts when any of its layers lies as far above its own mean.
    """
    drawn = (null - null.mean(axis=0)).max(axis=1)
    return float((1 + (drawn >= excess(observed, null)[layer]).sum()) / (1 + len(null)))


def _null(tables: Iterator[ndarray]) -> Null:
    drawn = [(purity(table), information(table)) for table in tables]
    return Null(np.stack([each for each, _ in drawn]), np.stack([each for _, each in drawn]))
