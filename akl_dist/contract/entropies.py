"""Entropies of sampled tokens under the policy in training (roles.entropy_source=policy_forward)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EntropyArrays:
    """entropy float32 [n], nats, at the sampling temperature."""

    entropy: np.ndarray
