"""What is claimed of the policy losses, checked by enumeration or on grids, each beside a variant that must fail.

Tree of the importance-sampling tests: 3 tokens, length 3, all 27 sequences, tabular softmax policies pi and mu.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from akl_dist.objective import POLICY_LOSSES, policy_loss, rollout_correction, token_gradient, trust_region_weights

LENGTH, TOKENS = 3, 3
SEQUENCES = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))
WIDE = {"clip_low": 18.0, "clip_high": 18.0, "power": 0.0}  # a window that no prefix of the tree leaves
row = functools.partial(torch.tensor, dtype=torch.float64)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- CTPO: which gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ctpo", "ctpo_geomean"])
def test_first_mini_batch_is_the_plain_policy_gradient(name):
    logp, advantages = random(0, 2, 5), random(1, 2, 5)
    gradient = token_gradient(
        lambda x: policy_loss(name, logp=x, anchor_logp=logp, advantages=advantages, mask=torch.ones(2, 5)), logp
    )
    torch.testing.assert_close(gradient, -advantages, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_inserted_tool_tokens_change_nothing(name):
    """Masked spans in the middle of a row, whatever they hold: losses and gradients of the other tokens stay."""
    logp, anchor, advantages = -random(2, 2, 6).abs(), -random(3, 2, 6).abs(), random(4, 2, 6)

    def spread(values, fill):
        return torch.cat([values[:, :2], torch.full((2, 3), fill, dtype=values.dtype), values[:, 2:]], dim=1)

    def loss_and_gradient(logp, anchor, advantages, mask):
        leaf = logp.clone().requires_grad_(True)
        loss = policy_loss(name, logp=leaf, anchor_logp=anchor, advantages=advantages, mask=mask)
        loss.sum().backward()
        return loss.detach(), leaf.grad

    plain = loss_and_gradient(logp, anchor, advantages, torch.ones(2, 6))
    tool = loss_and_gradient(*(spread(tensor, math.nan) for tensor in (logp, anchor, advantages)), spread(torch.ones(2, 6), 0.0))
    for got, expected in zip(tool, plain, strict=True):
        torch.testing.assert_close(got, spread(expected, 0.0), rtol=1e-12, atol=1e-15)


def jacobian(loss, logp: torch.Tensor) -> torch.Tensor:
    out = torch.autograd.functional.jacobian(loss, logp)
    assert isinstance(out, torch.Tensor)
    return out.reshape(logp.numel(), logp.numel())


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_jacobian_is_diagonal(name):
    anchor, logp, advantages = -random(5, 2, 4).abs(), -random(6, 2, 4).abs(), random(7, 2, 4)
    matrix = jacobian(
        lambda x: policy_loss(name, logp=x, anchor_logp=anchor, advantages=advantages, mask=torch.ones(2, 4)), logp
    )
    assert (matrix - matrix.diag().diag()).abs().max() == 0
    assert matrix.diag().abs().max() > 0


def test_differentiating_the_prefix_product_is_another_algorithm():
    """Negative control: same value, but a token's gradient then holds the losses of all later tokens."""
    anchor, logp, advantages = random(8, 1, 4) * 0.1, random(9, 1, 4) * 0.1, random(10, 1, 4)

    def product(x):
        return -advantages * (x - anchor).cumsum(-1).exp()

    def ours(x):
        return policy_loss("ctpo", logp=x, anchor_logp=anchor, advantages=advantages, mask=torch.ones(1, 4), **WIDE)

    torch.testing.assert_close(ours(logp), product(logp))
    wrong, right = jacobian(product, logp), jacobian(ours, logp)
    torch.testing.assert_close(wrong.diag(), right.diag())
    assert (wrong - right).abs().max() > 0.1


def test_without_growth_the_window_is_uniform():
    """p = 0 (which the authors' code cannot run): rho clipped to [e^-.1, e^.2] at every position."""
    x = row([[0.3, 0.3, 0.3, -1.2, -0.3, 0.0]])
    arguments = {"logp": x, "anchor_logp": torch.zeros_like(x), "mask": torch.ones(1, 6)}
    params = {"clip_low": 0.1, "clip_high": 0.2, "power": 0.0}
    up = policy_loss("ctpo", advantages=torch.ones(1, 6), **arguments, **params)
    sums = [0.3, 0.6, 0.9, -0.3, -0.6, -0.6]
    assert up[0].tolist() == pytest.approx([-math.exp(min(s, 0.2)) for s in sums])
    down = policy_loss("ctpo", advantages=-torch.ones(1, 6), **arguments, **params)
    assert down[0].tolist() == pytest.approx([math.exp(max(s, -0.1)) for s in sums])


# --- importance sampling on a tree --------------------------------------------------------------------------------


class Tree:
    """Tabular policies over prefixes of up to 2 tokens, and rewards of whole sequences."""

    def __init__(self, seed: int) -> None:
        prefixes = [()] + [tuple(p) for n in (1, 2) for p in itertools.product(range(TOKENS), repeat=n)]
        self.index = {prefix: number for number, prefix in enumerate(prefixes)}
        self.logits = random(seed, len(prefixes), TOKENS).requires_grad_(True)
        self.mu = torch.log_softmax(random(seed + 1, len(prefixes), TOKENS), -1)
        self.rewards = random(seed + 2, len(SEQUENCES))
        states = [[self.index[tuple(y[:t].tolist())] for t in range(LENGTH)] for y in SEQUENCES]
        self.states = torch.tensor(states)

    def log_table(self) -> torch.Tensor:
        return torch.log_softmax(self.logits, -1)

    def tokens_of(self, table: torch.Tensor) -> torch.Tensor:
        """[27, 3] log-probabilities of the tokens of every sequence."""
        return table[self.states, SEQUENCES]

    def gradient(self, objective: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(objective, self.logits)
        return gradient

    def estimate(self, per_token: torch.Tensor) -> torch.Tensor:
        """Expected gradient, under mu, of minus a per-token loss summed over the sequence."""
        return self.gradient(-(self.tokens_of(self.mu).sum(-1).exp() * per_token.sum(-1)).sum())

    def stated(self, *, states_of: torch.Tensor) -> torch.Tensor:
        """sum_t E over states of a policy, [sum_a grad pi(a|s) Q^mu(s, a)]."""
        probability = self.tokens_of(self.mu).sum(-1).exp()
        table, total = self.log_table(), torch.zeros((), dtype=torch.float64)
        for prefix, state in self.index.items():
            t = len(prefix)
            through = (SEQUENCES[:, :t] == torch.tensor(prefix, dtype=torch.long)).all(-1)
            one = int(through.nonzero()[0])
            weight = self.tokens_of(states_of)[one, :t].sum().exp()
            for token in range(TOKENS):
                here = through & (SEQUENCES[:, t] == token)
                value = (probability * self.rewards)[here].sum() / probability[here].sum()
                total = total + (weight * value).detach() * table[state, token].exp()
        return self.gradient(total)

    def loss(self, name: str, **params) -> torch.Tensor:
        return policy_loss(
            name,
            logp=self.tokens_of(self.log_table()),
            anchor_logp=self.tokens_of(self.mu),
            advantages=self.rewards,
            mask=torch.ones(SEQUENCES.shape),
            **params,
        )

    def true_gradient(self) -> torch.Tensor:
        return self.gradient((self.tokens_of(self.log_table()).sum(-1).exp() * self.rewards).sum())


def close(got, expected) -> bool:
    return bool((got - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_what_the_three_ratios_estimate(seed):
    tree = Tree(seed)
    token = tree.estimate(tree.loss("reinforce", max_weight=1e9))
    assert close(token, tree.stated(states_of=tree.mu))
    assert close(tree.estimate(tree.loss("ppo", clip_low=1.0, clip_high=1e9)), token)
    cumulative = tree.estimate(tree.loss("ctpo", **WIDE))
    assert close(cumulative, tree.stated(states_of=tree.log_table()))
    weight = rollout_correction(
        "tis",
        old_logp=tree.tokens_of(tree.log_table()),
        rollout_logp=tree.tokens_of(tree.mu),
        mask=torch.ones(SEQUENCES.shape),
        level="sequence",
        high=1e9,
    ).weight
    full = tree.estimate(tree.loss("reinforce") * weight)
    assert close(full, tree.true_gradient())
    # neither of the first two is the true gradient: CTPO corrects the states, not the value of what follows
    assert (token - full).abs().max() > 1e-3 and (cumulative - full).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_ctpo_variance_per_position(seed):
    """For a multiplier f that depends on y_<=t only: E rho_t f = E rho_T f and Var rho_t f <= Var rho_T f; Var rho_t grows."""
    tree = Tree(100 + seed)
    log_mu = tree.tokens_of(tree.mu)
    probability = log_mu.sum(-1).exp()
    rho = (tree.tokens_of(tree.log_table().detach()) - log_mu).cumsum(-1).exp()

    def moments(values):
        mean = (probability * values).sum()
        return mean.item(), (probability * (values - mean) ** 2).sum().item()

    spread = [moments(rho[:, t])[1] for t in range(LENGTH)]
    assert spread[0] < spread[1] < spread[2]
    for t in range(LENGTH):
        prefix = (SEQUENCES[:, : t + 1] * torch.tensor([1, 3, 9][: t + 1])).sum(-1)
        multiplier = random(seed, TOKENS ** (t + 1))[prefix]
        ours, full = moments(rho[:, t] * multiplier), moments(rho[:, -1] * multiplier)
        assert ours[0] == pytest.approx(full[0], abs=1e-12) and ours[1] <= full[1] + 1e-12


def test_ctpo_variance_is_no_theorem_for_sums_or_sequence_rewards():
    """Counterexamples: a reward 1/rho_T, and multipliers f and -f at two positions that share a parameter."""
    tree = Tree(7)
    log_mu = tree.tokens_of(tree.mu)
    probability = log_mu.sum(-1).exp()
    rho = (tree.tokens_of(tree.log_table().detach()) - log_mu).cumsum(-1).exp()

    def variance(values):
        return (probability * (values - (probability * values).sum()) ** 2).sum().item()

    reward = 1 / rho[:, -1]
    assert variance(rho[:, -1] * reward) < 1e-20 < 1e-3 < variance(rho[:, 0] * reward)
    first = SEQUENCES[:, 0].double()  # depends on y_1, so also on y_<=2
    assert variance(rho[:, -1] * (first - first)) == 0 and variance(rho[:, 0] * first - rho[:, 1] * first) > 1e-3


# --- trust regions in probabilities -------------------------------------------------------------------------------

PROBABILITIES = row([1e-12, 1e-6, 1e-3, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0])


def grid() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pi, mu, A) over all pairs of probabilities and both signs, each [242]."""
    pi, mu, advantages = torch.meshgrid(PROBABILITIES, PROBABILITIES, row([-1.5, 2.0]), indexing="ij")
    return pi.flatten(), mu.flatten(), advantages.flatten()


def weights(name: str, pi, mu, advantages, **params) -> torch.Tensor:
    arguments = {"anchor_logp": mu.log(), "advantages": advantages, "mask": torch.ones_like(pi)}
    gradient = token_gradient(lambda x: policy_loss(name, logp=x, **arguments, **params), pi.log())
    return trust_region_weights(gradient=gradient, logp=pi.log(), **arguments)


def test_the_published_delta_is_close_to_no_trust_region():
    pi, mu, advantages = grid()
    inside = (pi.log() - mu.log()).abs() <= 20
    weight = weights("drpo", pi, mu, advantages, delta=12.5)[inside]
    assert weight.min() >= 0.92 - 1e-12 and weight.max() <= 1.08 + 1e-12
    geometry = weights("drpo", pi, mu, advantages, delta=0.15)[inside]
    assert geometry.min() < -5 and geometry.max() > 6  # the other presets do reach their boundary
    assert weights("drpo", pi, mu, advantages, delta=0.08)[inside].min() < -11
    # no trust region: w = 1 everywhere
    torch.testing.assert_close(weights("reinforce", pi, mu, advantages, max_weight=1e9)[inside], torch.ones_like(weight))


@pytest.mark.parametrize("delta", [0.15, 0.08, 0.5])
def test_drpo_weight_at_and_beyond_the_boundary(delta):
    mu = 0.4
    for sign, away in ((1.0, 1.0), (-1.0, -1.0)):  # A > 0 moves pi up, A < 0 down
        at = [mu + away * delta * part for part in (0.0, 0.5, 1.0) if 0 < mu + away * delta * part < 1]
        pi = row([*at, mu + away * min(1.2 * delta, 0.39), mu - away * 0.5 * min(delta, 0.39)])
        weight = weights("drpo", pi, torch.full_like(pi, mu), torch.full_like(pi, sign), delta=delta)
        expected = [1 - sign * (p.item() - mu) / delta for p in pi]
        assert weight.tolist() == pytest.approx(expected, abs=1e-12)
        assert weight[0] == 1 and weight[-1] > 1
    at_boundary = weights("drpo", row([0.65]), row([0.4]), row([1.0]), delta=0.25)
    beyond = weights("drpo", row([0.66]), row([0.4]), row([1.0]), delta=0.25)
    assert abs(at_boundary.item()) < 1e-12 and beyond.item() < 0


def test_rare_tokens():
    """mu = 1e-6: SPO's weight reaches -1e4 where pi is still 2e-3, DRPO's stays within 1 +- 1/delta."""
    pi, mu, up = row([2.0e-3 + 1.2e-6]), row([1e-6]), row([1.0])
    assert weights("spo", pi, mu, up, epsilon=0.2).item() == pytest.approx(1 - (2001.2 - 1) / 0.2, rel=1e-9)
    assert weights("spo", pi, mu, up, epsilon=0.2).item() < -1e4 + 10
    assert weights("drpo", pi, mu, up, delta=0.15).item() == pytest.approx(1 - (2e-3 + 0.2e-6) / 0.15, rel=1e-9)
    pi, mu, advantages = grid()
    bounded = weights("drpo", pi, mu, advantages, delta=0.15)
    assert (bounded - 1).abs().max() <= 1 / 0.15 + 1e-9


@pytest.mark.parametrize(("name", "delta"), [("dppo_tv", 0.15), ("dppo_kl", 0.05), ("dppo_tv", 0.0), ("dppo_kl", 0.0)])
def test_a_move_back_towards_mu_is_never_masked(name, delta):
    pi, mu, advantages = grid()
    arguments = {"anchor_logp": mu.log(), "advantages": advantages, "mask": torch.ones_like(pi)}
    bounds = {"delta_low": delta, "delta_high": delta}
    gradient = token_gradient(lambda x: policy_loss(name, logp=x, **arguments, **bounds), pi.log())
    back = advantages * (pi - mu) <= 0
    assert (gradient[back] != 0).all()
    # moving away, the mask is the divergence's: total variation |pi - mu|, binary KL by its definition
    distance = (pi - mu).abs() if name == "dppo_tv" else binary_kl(mu, pi)
    clear = ~back & ((distance - delta).abs() > 1e-9)
    assert ((gradient[clear] == 0) == (distance[clear] > delta)).all()
    assert (gradient[clear] == 0).any()
    # negative control: a mask on the distance alone would stop tokens that come back
    assert (distance[back] > delta).any()


def binary_kl(mu: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    rest = torch.where(mu < 1, (1 - mu) * ((1 - mu) / (1 - pi)).log(), torch.zeros_like(mu))
    return torch.where((pi == 1) & (mu < 1), torch.full_like(mu, math.inf), mu * (mu / pi).log() + rest)


def test_the_weight_is_one_where_there_is_nothing_to_weigh():
    one = trust_region_weights(
        gradient=row([0.0, math.nan, -2.0]),
        logp=row([0.0, math.nan, 0.0]),
        anchor_logp=row([0.0, math.nan, 0.0]),
        advantages=row([0.0, math.nan, 1.0]),
        mask=torch.tensor([True, False, True]),
    )
    assert one.tolist() == [1.0, 1.0, 2.0]
