import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus import routing


def random_scores(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * scale


def naive_sinkhorn(scores, temperature, iterations, padding_mask=None):
    """By the paper's words, in the exp domain."""
    mass = torch.exp(scores / temperature)
    if padding_mask is not None:
        mass = mass * padding_mask[..., None]
    for _ in range(iterations):
        mass = mass / mass.sum(dim=1, keepdim=True)
        mass = (mass / mass.sum(dim=2, keepdim=True)).nan_to_num()  # a padded row is 0 / 0
    return mass


def test_scores_are_the_two_products_in_float32():
    hidden, projection, centroids = (random_scores(*shape) for shape in ((2, 5, 12), (3, 12), (4, 3)))
    expected = torch.einsum("btd,gd,kg->btk", hidden, projection, centroids)
    torch.testing.assert_close(routing.scores(hidden, projection, centroids), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = routing.scores(hidden, projection, centroids)
    assert under_autocast.dtype == torch.float32
    torch.testing.assert_close(under_autocast, expected)
    assert routing.scores(hidden.bfloat16(), projection.bfloat16(), centroids).dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 33),
    groups=st.integers(1, 9),
    iterations=st.integers(1, 12),
    temperature=st.sampled_from([0.05, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_rows_are_distributions(batch, tokens, groups, iterations, temperature, seed):
    scores = random_scores(batch, tokens, groups, seed=seed)
    assignment = routing.sinkhorn(scores, temperature=temperature, iterations=iterations)
    assert assignment.shape == scores.shape
    assert (assignment >= 0).all()
    torch.testing.assert_close(assignment.sum(dim=-1), torch.ones(batch, tokens))


@pytest.mark.parametrize("padded", [False, True])
def test_log_domain_equals_exp_domain(padded):
    scores = random_scores(2, 40, 5, dtype=torch.float64)
    mask = torch.arange(40).expand(2, 40) >= torch.tensor([[0], [13]]) if padded else None
    got = routing.sinkhorn(scores, temperature=0.1, iterations=10, padding_mask=mask)
    expected = naive_sinkhorn(scores, 0.1, 10, mask)
    real = slice(None) if mask is None else mask
    torch.testing.assert_close(got[real], expected[real], rtol=1e-10, atol=1e-12)


def test_columns_balance_as_iterations_grow():
    scores = random_scores(1, 256, 8, dtype=torch.float64) + torch.linspace(0, 2, 8)
    spreads = []
    for iterations in (1, 3, 10, 30):
        columns = routing.sinkhorn(scores, temperature=0.3, iterations=iterations).sum(dim=1)
        spreads.append((columns - 256 / 8).abs().max().item())
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 0.1 < spreads[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_stable_at_a_low_temperature(dtype, scale):
    scores = random_scores(2, 64, 8, dtype=dtype, scale=scale).requires_grad_()
    assignment = routing.sinkhorn(scores, temperature=0.05, iterations=10)
    expected = routing.sinkhorn(scores.detach().double(), temperature=0.05, iterations=10)
    assert assignment.dtype == torch.float32
    torch.testing.assert_close(assignment.double(), expected, rtol=0, atol=1e-3)
    (assignment**2).sum().backward()
    assert torch.isfinite(scores.grad).all()


def test_gradients_reach_the_scores_through_the_balance():
    scores = random_scores(1, 6, 3, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[False, True, True, True, True, True]])

    def real_rows(scores):
        return routing.sinkhorn(scores, temperature=0.5, iterations=4, padding_mask=mask)[mask]

    torch.autograd.gradcheck(real_rows, scores)


def test_padding_does_not_count():
    scores = random_scores(1, 20, 4, dtype=torch.float64)
    mask = torch.arange(20)[None] >= 6
    padded = routing.sinkhorn(scores, temperature=0.1, iterations=10, padding_mask=mask)
    alone = routing.sinkhorn(scores[:, 6:], temperature=0.1, iterations=10)
    torch.testing.assert_close(padded[:, 6:], alone)
    nothing_real = routing.sinkhorn(scores, temperature=0.1, iterations=10, padding_mask=torch.zeros_like(mask))
    assert torch.isfinite(nothing_real).all()


def test_potentials_carry_sinkhorn():
    scores = random_scores(3, 50, 6, dtype=torch.float64)
    potentials = routing.column_potentials(scores, temperature=0.1, iterations=10)
    assert potentials.shape == (3, 6)
    torch.testing.assert_close(potentials.sum(dim=-1), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(
        routing.assign(scores, temperature=0.1, potentials=potentials),
        routing.sinkhorn(scores, temperature=0.1, iterations=10),
    )
    one = routing.assign(scores, temperature=0.1, potentials=potentials[1])
    torch.testing.assert_close(one[1], routing.sinkhorn(scores, temperature=0.1, iterations=10)[1])


def test_frozen_potentials_are_causal_and_sinkhorn_is_not():
    before = random_scores(1, 12, 4)
    after = before.clone()
    after[:, -1] += 3 * torch.tensor([1.0, -1.0, 0.0, 0.5])
    frozen = torch.tensor([0.3, -0.2, 0.0, -0.1])
    causal = [routing.assign(scores, temperature=0.1, potentials=frozen)[:, :-1] for scores in (before, after)]
    leaking = [routing.sinkhorn(scores, temperature=0.1, iterations=10)[:, :-1] for scores in (before, after)]
    assert torch.equal(*causal)
    assert (leaking[0] - leaking[1]).abs().max() > 1e-3


def test_membership_takes_the_k_largest():
    assignment = torch.tensor([[[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]])
    assert routing.top_k_membership(assignment, 1).tolist() == [[[False, True, False], [True, False, False]]]
    assert routing.top_k_membership(assignment, 2).tolist() == [[[False, True, True], [True, False, True]]]
    ties = routing.top_k_membership(torch.full((2, 7, 5), 0.2), 3)
    assert (ties.sum(dim=-1) == 3).all()


def test_dominance_is_the_fullest_groups_share_of_real_tokens():
    assignment = torch.eye(3)[torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]])]
    assert routing.dominance(assignment) == pytest.approx((2 / 4 + 3 / 4) / 2)
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    assert routing.dominance(assignment, mask) == pytest.approx((2 / 4 + 1) / 2)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_pairs_kept_counts_what_the_definition_says(sinks, padded, sliding_window):
    window, tokens = 2, 11
    membership = routing.top_k_membership(random_scores(2, tokens, 3), 1)
    mask = torch.arange(tokens).expand(2, tokens) >= torch.tensor([[0], [3]]) if padded else None
    every = far = kept = far_kept = 0
    for row in range(2):
        start = 3 * row if padded else 0
        for i in range(start, tokens):
            for j in range(start, i + 1):
                if sliding_window and i - j >= sliding_window:
                    continue
                shares = bool((membership[row, i] & membership[row, j]).any())
                seen = i - j <= window or shares or j - start < sinks
                every, kept = every + 1, kept + seen
                far, far_kept = far + (i - j > window), far_kept + (seen and i - j > window)
    got = routing.pairs_kept(membership, window, sinks, mask, sliding_window)
    assert got == pytest.approx((kept / every, far_kept / far))


def test_pairs_kept_without_far_pairs_drops_nothing():
    membership = routing.top_k_membership(random_scores(1, 5, 4), 1)
    assert routing.pairs_kept(membership, window=8) == (1.0, 1.0)
