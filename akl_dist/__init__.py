"""akl_dist: distributed RL post-training of language models with token-role-aware asymmetric KL.

    prompts ──> rollout ──> verify ──────────> reference ──> objective ──> learner ──> weight_sync ──┐
    (data)      vLLM        reward, answer     log-probs     advantages,   ZeRO-3      new weights   │
                engines     span, token roles  of ref        loss          groups      + version     │
                  ^                                                                                  │
                  └──────────────────────────────────────────────────────────────────────────────────┘

The six stage words are folders, configuration groups, actor-name prefixes, metric prefixes and timing names.
This module imports nothing heavy, so that ``--help``, validation and dry runs start at once.
"""

__version__ = "0.1.0"
