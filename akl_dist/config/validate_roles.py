"""Rules on the token roles. Each refusal says why. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator

from akl_dist.config.mixture import verifiers
from akl_dist.config.problems import Problems, Unread, problem
from akl_dist.config.schema import Config

DRAWN = ("random_span", "random_tokens")  # as many tokens as the majority has


def roles_problems(config: Config) -> Problems:
    """Combinations that cannot give a role to every token."""
    window = config.roles.entropy_window
    if window % 2 == 0:
        yield problem("roles.entropy_window", window, "an odd number (the window is centred)",
                      f"Write roles.entropy_window={window + 1}.")
    if config.roles.entropy_source == "rollout_topk" and config.rollout.replay is not None:
        yield problem("roles.entropy_source", "rollout_topk", "reference or policy_forward with rollout.replay: recorded rollouts "
                      "carry no entropies of the engine", "Write roles.entropy_source=reference.")


def roles_unread(config: Config) -> Iterator[Unread]:
    """Keys of the roles that the chosen rule does not read."""
    roles = config.roles
    by_entropy = roles.rule in ("majority", "entropy", *DRAWN)
    for key in ("roles.entropy_quantile", "roles.entropy_window", "roles.entropy_source"):
        yield (key, by_entropy, f"roles.rule=majority, entropy, {' or '.join(DRAWN)}")
    yield ("roles.position", roles.rule in ("majority", "position", *DRAWN), f"roles.rule=majority, position, {' or '.join(DRAWN)}")
    yield ("roles.code_answer", roles.rule != "entropy" and "code" in verifiers(config),
           "verify.kind=code, or a source of data.mixture with verifier: code, and another roles.rule than entropy")
