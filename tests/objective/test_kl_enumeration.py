"""Expected gradients by enumeration: three tokens, length three, 27 sequences, every prefix with logits of its own.

Targets are written out from the exact formulas, pi - ref and pi (log pi/ref - KL), and the probability of each state.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from akl_dist.objective import (
    TokenStatistics,
    akl_full_loss,
    akl_loss,
    full_kl,
    full_kl_loss,
    kl_loss,
    kl_to_go,
    policy_loss,
    token_statistics,
    topk_reference,
)

V, T = 3, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))
# states in breadth-first order: the empty prefix 0, then 1 + y0, then 1 + V + V y0 + y1
STATES = torch.stack(
    [
        torch.zeros(27, dtype=torch.long),
        1 + SEQUENCES[:, 0],
        1 + V + V * SEQUENCES[:, 0] + SEQUENCES[:, 1],
    ],
    dim=1,
)
S = 1 + V + V * V
MASK = torch.ones(27, T, dtype=torch.bool)
# a role per state, so that roles are fixed whatever is sampled there
ANSWER_STATE = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool)


def tables(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.log_softmax(torch.randn(S, V, generator=generator, dtype=torch.float64), -1) for _ in range(count)]


POLICY, BEHAVIOUR, REFERENCE = tables(0, 3)


def token_logp(table: torch.Tensor) -> torch.Tensor:
    """[27, 3] log-probability of each sequence's tokens."""
    return table[STATES, SEQUENCES]


def sequence_probs(table: torch.Tensor) -> torch.Tensor:
    return token_logp(table).sum(-1).exp()


def state_probs(table: torch.Tensor) -> torch.Tensor:
    """[S] probability that a sequence drawn from `table` passes through each state."""
    return torch.zeros(S, dtype=torch.float64).index_put((STATES,), sequence_probs(table).unsqueeze(-1), accumulate=True)


def expected_gradient(loss_of, behaviour: torch.Tensor) -> torch.Tensor:
    """[S, V] gradient in the policy's logits of the mean loss over sequences drawn from `behaviour`."""
    logits = POLICY.clone().requires_grad_(True)
    loss = loss_of(torch.log_softmax(logits, -1))
    (sequence_probs(behaviour) * loss.sum(-1)).sum().backward()
    return logits.grad


def exact_gradient(direction: str) -> torch.Tensor:
    """[S, V] gradient of the divergence at each state."""
    probs, log_ratio = POLICY.exp(), POLICY - REFERENCE
    forward = probs - REFERENCE.exp()
    reverse = probs * (log_ratio - (probs * log_ratio).sum(-1, keepdim=True))
    return {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}[direction]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def sampled(direction: str, behaviour: torch.Tensor, state_weight: str = "token"):
    return lambda table: kl_loss(
        direction,
        logp=token_logp(table),
        ref_logp=token_logp(REFERENCE),
        behaviour_logp=token_logp(behaviour),
        mask=MASK,
        state_weight=state_weight,
    )


def full(direction: str, behaviour: torch.Tensor, state_weight: str):
    def loss(table: torch.Tensor) -> torch.Tensor:
        forward = full_kl("forward", logprobs=table, ref_logprobs=REFERENCE)[STATES]
        reverse = full_kl("reverse", logprobs=table, ref_logprobs=REFERENCE)[STATES]
        return full_kl_loss(
            direction,
            kl_forward=forward,
            kl_reverse=reverse,
            logp=token_logp(table),
            behaviour_logp=token_logp(behaviour),
            mask=MASK,
            state_weight=state_weight,
        )

    return loss


def topk_statistics(table: torch.Tensor, k: int) -> TokenStatistics:
    """[27, 3] divergences over the reference's top k, the sampled token and the rest, at the state before each token."""
    targets = SEQUENCES.flatten()
    reference = topk_reference(REFERENCE[STATES].flatten(0, 1), targets, k=k, temperature=1.0)
    flat = token_statistics(table[STATES].flatten(0, 1), targets, temperature=1.0, topk=reference)
    return TokenStatistics(*(None if field is None else field.view(27, T) for field in flat))


def topk(direction: str, behaviour: torch.Tensor, state_weight: str, k: int = V):
    def loss(table: torch.Tensor) -> torch.Tensor:
        statistics = topk_statistics(table, k)
        return full_kl_loss(
            direction,
            kl_forward=statistics.kl_forward,
            kl_reverse=statistics.kl_reverse,
            logp=token_logp(table),
            behaviour_logp=token_logp(behaviour),
            mask=MASK,
            state_weight=state_weight,
        )

    return loss


def target(direction: str, behaviour: torch.Tensor, state_weight: str) -> torch.Tensor:
    states = state_probs(behaviour if state_weight == "token" else POLICY)
    return states.unsqueeze(-1) * exact_gradient(direction)


EVERY = [
    (direction, state_weight, behaviour)
    for direction in ("forward", "reverse", "symmetric")
    for state_weight in ("token", "cumulative")
    for behaviour in ("on", "off")
]


@pytest.mark.parametrize(("direction", "state_weight", "behaviour"), EVERY)
@pytest.mark.parametrize("estimator", [sampled, topk, full])
def test_expected_gradient_is_the_named_divergence(direction, state_weight, behaviour, estimator):
    table = POLICY if behaviour == "on" else BEHAVIOUR
    got = expected_gradient(estimator(direction, table, state_weight), table)
    assert relative_error(got, target(direction, table, state_weight)) < 1e-9


@pytest.mark.parametrize("state_weight", ["token", "cumulative"])
@pytest.mark.parametrize(("reasoning", "answer"), [("forward", "reverse"), ("reverse", "forward"), ("symmetric",) * 2])
@pytest.mark.parametrize("estimator", ["sampled", "topk", "full"])
def test_akl_expected_gradient_per_role(state_weight, reasoning, answer, estimator):
    settings = {
        "answer_mask": ANSWER_STATE[STATES],
        "mask": MASK,
        "beta_reasoning": 0.3,
        "beta_answer": 0.7,
        "direction_reasoning": reasoning,
        "direction_answer": answer,
        "state_weight": state_weight,
    }

    def loss(table):
        logps = {"logp": token_logp(table), "behaviour_logp": token_logp(BEHAVIOUR)}
        if estimator == "sampled":
            return akl_loss(ref_logp=token_logp(REFERENCE), **logps, **settings)
        if estimator == "topk":
            statistics = topk_statistics(table, V)
            divergences = {"kl_forward": statistics.kl_forward, "kl_reverse": statistics.kl_reverse}
            return akl_full_loss(**divergences, **logps, **settings)
        divergences = {
            f"kl_{name}": full_kl(name, logprobs=table, ref_logprobs=REFERENCE)[STATES] for name in ("forward", "reverse")
        }
        return akl_full_loss(**divergences, **logps, **settings)

    states = state_probs(BEHAVIOUR if state_weight == "token" else POLICY).unsqueeze(-1)
    per_role = torch.where(ANSWER_STATE.unsqueeze(-1), 0.7 * exact_gradient(answer), 0.3 * exact_gradient(reasoning))
    assert relative_error(expected_gradient(loss, BEHAVIOUR), states * per_role) < 1e-9


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_fewer_than_all_tokens_are_a_lower_bound_of_the_divergence(direction):
    """k = 1: the reference's first token, the sampled one, and the third as the rest wherever those two differ."""
    exact = full_kl(direction, logprobs=POLICY, ref_logprobs=REFERENCE)[STATES]
    statistics = topk_statistics(POLICY, 1)
    bound = {
        "forward": statistics.kl_forward,
        "reverse": statistics.kl_reverse,
        "symmetric": (statistics.kl_forward + statistics.kl_reverse) / 2,
    }[direction]
    assert (bound <= exact + 1e-12).all()
    merged = REFERENCE.argmax(-1)[STATES] == SEQUENCES  # the sampled token is the first one: two tokens share the rest
    assert torch.allclose(bound[~merged], exact[~merged], rtol=1e-12) and (bound[merged] < exact[merged]).any()
    got = expected_gradient(topk(direction, POLICY, "token", k=1), POLICY)
    assert 1e-2 < relative_error(got, target(direction, POLICY, "token")) < 0.9


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_without_a_state_weight_the_surrogates_are_right_on_policy_only(direction):
    on = expected_gradient(sampled(direction, POLICY, "none"), POLICY)
    assert relative_error(on, target(direction, POLICY, "token")) < 1e-9
    off = expected_gradient(sampled(direction, BEHAVIOUR, "none"), BEHAVIOUR)
    for named, state_weight in itertools.product(("forward", "reverse", "symmetric"), ("token", "cumulative")):
        assert relative_error(off, target(named, BEHAVIOUR, state_weight)) > 1e-2


# --- KL in the reward --------------------------------------------------------------------------------------------


def full_sequence_gradient(beta_reasoning: float, beta_answer: float) -> torch.Tensor:
    """[S, V] gradient of sum over states of p(state) beta(role) KL(pi||ref at the state), state probabilities included; with
    one beta that is beta times KL(pi||ref) of whole sequences."""
    logits = POLICY.clone().requires_grad_(True)
    table = torch.log_softmax(logits, -1)
    probs = torch.zeros(S, dtype=torch.float64).index_put((STATES,), sequence_probs(table).unsqueeze(-1), accumulate=True)
    betas = torch.tensor([beta_answer if answer else beta_reasoning for answer in ANSWER_STATE], dtype=torch.float64)
    (probs * betas * full_kl("reverse", logprobs=table, ref_logprobs=REFERENCE)).sum().backward()
    return logits.grad


def in_reward(advantages: torch.Tensor):
    return lambda table: policy_loss(
        "ppo", logp=token_logp(table), anchor_logp=token_logp(POLICY), advantages=advantages, mask=MASK
    )


def to_go(beta_reasoning: float, beta_answer: float) -> torch.Tensor:
    return kl_to_go(
        logp=token_logp(POLICY), ref_logp=token_logp(REFERENCE), answer_mask=ANSWER_STATE[STATES], mask=MASK,
        beta_reasoning=beta_reasoning, beta_answer=beta_answer,
    )  # fmt: skip


def test_the_target_is_the_divergence_between_whole_sequences():
    logits = POLICY.clone().requires_grad_(True)
    table = torch.log_softmax(logits, -1)
    probs = sequence_probs(table)
    (0.3 * probs * (probs.log() - sequence_probs(REFERENCE).log())).sum().backward()
    assert relative_error(full_sequence_gradient(0.3, 0.3), logits.grad) < 1e-12


@pytest.mark.parametrize(("reasoning", "answer"), [(0.3, 0.3), (0.3, 0.7), (0.0, 0.7)])
def test_kl_in_the_reward_is_the_exact_full_sequence_reverse_kl(reasoning, answer):
    got = expected_gradient(in_reward(-to_go(reasoning, answer)), POLICY)
    assert relative_error(got, full_sequence_gradient(reasoning, answer)) < 1e-9


def test_kl_in_the_reward_adds_to_the_reward():
    """One pass over advantage minus return is the sum of both gradients."""
    reward = torch.sin(torch.arange(27, dtype=torch.float64)).unsqueeze(-1).expand(27, T)
    together = expected_gradient(in_reward(reward - to_go(0.3, 0.7)), POLICY)
    alone = expected_gradient(in_reward(reward), POLICY)
    assert relative_error(together - alone, full_sequence_gradient(0.3, 0.7)) < 1e-9


def test_what_is_not_the_full_sequence_reverse_kl():
    """Negative controls: k3 in the reward, k1 of the own token only, and every KL loss (blind to how pi moves the states)."""
    expected = full_sequence_gradient(1.0, 1.0)
    x = token_logp(POLICY) - token_logp(REFERENCE)
    k3 = (-x).exp() - 1 + x
    for wrong in (k3.flip(-1).cumsum(-1).flip(-1), x):
        assert relative_error(expected_gradient(in_reward(-wrong), POLICY), expected) > 1e-2
    for direction in ("forward", "reverse"):
        assert relative_error(expected_gradient(sampled(direction, POLICY), POLICY), expected) > 1e-2


def test_why_the_full_estimator_excludes_the_current_token():
    """Its ratio has mean 1 and the exact divergence does not depend on it: same expectation, only more variance."""
    divergence = full_kl("forward", logprobs=POLICY, ref_logprobs=REFERENCE)[STATES]
    log_ratio = token_logp(POLICY) - token_logp(BEHAVIOUR)
    probs = sequence_probs(BEHAVIOUR)

    def mean_and_variance(weight: torch.Tensor) -> tuple[float, float]:
        total = (weight * divergence).sum(-1)
        mean = (probs * total).sum()
        return mean.item(), (probs * (total - mean) ** 2).sum().item()

    excluded = mean_and_variance((log_ratio.cumsum(-1) - log_ratio).exp())
    included = mean_and_variance(log_ratio.cumsum(-1).exp())
    assert excluded[0] == pytest.approx(included[0], rel=1e-12)
    assert excluded[1] < included[1] / 1.2


def test_k1_as_a_loss_has_no_expected_gradient():
    got = expected_gradient(lambda table: token_logp(table) - token_logp(REFERENCE), POLICY)
    assert got.norm() < 1e-12
    assert target("reverse", POLICY, "token").norm() > 1e-1


def test_k3_without_weight_is_forward_on_policy_and_neither_off_policy():
    def k3(table):
        x = token_logp(table) - token_logp(REFERENCE)
        return (-x).exp() - 1 + x

    assert relative_error(expected_gradient(k3, POLICY), target("forward", POLICY, "token")) < 1e-9
    assert relative_error(expected_gradient(k3, POLICY), target("reverse", POLICY, "token")) > 1e-2
    for direction, state_weight in itertools.product(("forward", "reverse"), ("token", "cumulative")):
        wrong = expected_gradient(k3, BEHAVIOUR)
        assert relative_error(wrong, target(direction, BEHAVIOUR, state_weight)) > 1e-2


def test_k2_without_weight_is_wrong_off_policy():
    wrong = expected_gradient(sampled("reverse", POLICY), BEHAVIOUR)
    assert relative_error(wrong, target("reverse", BEHAVIOUR, "token")) > 1e-2


def test_differentiating_the_weight_is_wrong():
    def k3_with_live_weight(table):
        x = token_logp(table) - token_logp(REFERENCE)
        return (token_logp(table) - token_logp(BEHAVIOUR)).exp() * ((-x).exp() - 1 + x)

    wrong = expected_gradient(k3_with_live_weight, BEHAVIOUR)
    assert relative_error(wrong, target("forward", BEHAVIOUR, "token")) > 1e-2


def test_first_policy_step_is_the_gradient_of_the_expected_reward():
    """On-policy PPO at ratio 1 against finite differences of -E[reward]."""
    reward = torch.sin(torch.arange(27, dtype=torch.float64))
    got = expected_gradient(
        lambda table: policy_loss("ppo", logp=token_logp(table), anchor_logp=token_logp(POLICY), advantages=reward, mask=MASK),
        POLICY,
    )

    def objective(logits):
        return -(sequence_probs(torch.log_softmax(logits, -1)) * reward).sum().item()

    step, expected = 1e-5, torch.zeros_like(got)
    for state, token in itertools.product(range(S), range(V)):
        shift = torch.zeros_like(POLICY)
        shift[state, token] = step
        expected[state, token] = (objective(POLICY + shift) - objective(POLICY - shift)) / (2 * step)
    assert relative_error(got, expected) < 1e-8


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_raising_beta_alone_lowers_the_divergence(direction):
    """Gradient ascent on reward with a KL penalty of the named direction: more beta, nearer to the reference."""
    reward = torch.sin(torch.arange(27, dtype=torch.float64)) * 2

    def distance(beta: float) -> float:
        logits = REFERENCE.clone()
        for _ in range(60):
            leaf = logits.clone().requires_grad_(True)
            table = torch.log_softmax(leaf, -1)
            probs = sequence_probs(table)
            behaviour = table.detach()
            penalty = (probs.detach() * sampled(direction, behaviour)(table).sum(-1)).sum()
            (beta * penalty - (probs * reward).sum()).backward()
            logits = logits - leaf.grad
        table = torch.log_softmax(logits, -1)
        states = state_probs(table)
        return (states * full_kl(direction, logprobs=table, ref_logprobs=REFERENCE)).sum().item()

    distances = [distance(beta) for beta in (0.0, 0.1, 0.5, 2.0)]
    assert all(low < high / 1.05 for high, low in itertools.pairwise(distances)), distances
