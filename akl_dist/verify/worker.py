"""Judges groups of responses and labels token roles: a plain class, no cluster needed.

Consumes rollout groups with their arrays, produces judged groups and, once the reference's entropies are there, role masks.
Waits only for its grader processes, within their limits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from akl_dist.config.schema import RolesConfig, VerifyConfig
from akl_dist.contract.errors import RunError
from akl_dist.contract.records import (
    JudgedArrays,
    JudgedGroup,
    LabelledGroup,
    Prompt,
    ReferenceArrays,
    ReferenceGroup,
    RoleArrays,
    RolloutArrays,
    RolloutGroup,
    Turns,
    Verdict,
)
from akl_dist.verify.grader import GraderPool, Item
from akl_dist.verify.math import distinct_answers
from akl_dist.verify.roles import Votes, position_votes, response_seed, role_votes, token_roles, verifier_votes, vote_table
from akl_dist.verify.segments import END_THINK, THINK
from akl_dist.verify.token_text import Span, TokenText

REASON_CHARACTERS = 200  # of a verdict's header, which passes through the driver
TEMPLATE_TAIL_TOKENS = 16  # enough to see whether the template has opened <think> for the next turn


@dataclass(frozen=True)
class _Response:
    """One decoded response: ``text`` in full; of its last turn (the whole response where there is one turn) ``final``, the text up
    to its end token, and ``spans``, the character range of each token in it; ``before``, the tokens of earlier turns.
    ``think_open``: the last turn begins inside reasoning."""

    text: str
    final: str
    spans: list[Span]
    before: int
    think_open: bool
    truncated: bool

    def votes(self, last_turn: list[bool]) -> list[bool]:
        """One per token of the response from those of the last turn: what was written before it is no answer."""
        return [False] * self.before + last_turn


@dataclass(frozen=True)
class LabelParts:
    """What the roles of one group are decided from: headers and their resolved arrays."""

    group: RolloutGroup
    arrays: RolloutArrays
    judged: JudgedGroup
    judged_arrays: JudgedArrays
    reference: ReferenceGroup
    reference_arrays: ReferenceArrays

    def check(self) -> None:
        """Raise RunError unless every array has the group's tokens."""
        for stage, size in (
            ("rollout", len(self.arrays.token_ids)),
            ("verify", len(self.judged_arrays.position_mask)),
            ("verify", len(self.judged_arrays.verifier_mask)),
            ("reference", len(self.reference_arrays.entropy)),
        ):
            _check_length(self.group, stage, size)


class VerifyWorker:
    """Verdicts and roles for groups. Owns its graders: call :meth:`close`.

    Args:
        tokenizer_path: folder with ``tokenizer.json``.
        end_ids: the end tokens of the template, the same set the engines stop at.
        config, roles: their groups of the configuration.
        seed: the run's, for roles drawn at random.
        num_workers: grader processes of this worker; default ``config.num_workers``.
    """

    def __init__(
        self,
        tokenizer_path: str,
        *,
        end_ids: Sequence[int],
        config: VerifyConfig,
        roles: RolesConfig,
        seed: int = 0,
        num_workers: int | None = None,
    ) -> None:
        if roles.entropy_source != "reference":
            raise ValueError(f"roles.entropy_source is {roles.entropy_source!r}, expected 'reference'")
        self._config, self._roles, self._seed = config, roles, seed
        self._end_ids = frozenset(end_ids)
        self._token_text = TokenText(tokenizer_path)
        self._graders = GraderPool(
            num_workers=num_workers or config.num_workers, tasks_per_worker=config.tasks_per_worker, **grader_options(config))

    def close(self) -> None:
        """End the graders."""
        self._graders.close()

    def counters(self) -> dict[str, int]:
        """Totals of the grader pool: judged, timeouts, crashes, kills, recycled, started."""
        return self._graders.counters()

    def grader_pids(self) -> list[int]:
        return self._graders.pids()

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def judge(self, groups: Sequence[RolloutGroup], arrays: Sequence[RolloutArrays]) -> list[JudgedGroup]:
        """One judged group per group, in order; ``arrays`` of each is the :class:`JudgedArrays` record itself."""
        deadline = time.monotonic() + self._config.batch_timeout_s
        decoded = [self._decode(group, record) for group, record in zip(groups, arrays, strict=True)]
        items = [
            Item(group.prompt.gold, response.final, response.truncated, response.think_open)
            for group, responses in zip(groups, decoded, strict=True) for response in responses
        ]
        verdicts = iter(self._graders.judge_many(items, batch_deadline=deadline))
        judged = []
        for group, responses in zip(groups, decoded, strict=True):
            mine = tuple(next(verdicts) for _ in responses)
            verifier = [r.votes(verifier_votes(v.span, r.spans)) for v, r in zip(mine, responses, strict=True)]
            position = [r.votes(position_votes(r.final, r.spans, r.truncated, think_open=r.think_open)) for r in responses]
            record = JudgedArrays(tuple(r.text for r in responses), tuple(v.extracted for v in mine), _flat(position),
                                  _flat(verifier))
            headers = tuple(Verdict(v.status, reason=v.reason[:REASON_CHARACTERS]) for v in mine)
            judged.append(JudgedGroup(group.prompt.prompt_id, headers, tuple(sum(votes) for votes in verifier), record,
                                      distinct_answers([v.extracted or "" for v in mine if v.correct])))
        return judged

    def _decode(self, group: RolloutGroup, arrays: RolloutArrays) -> list[_Response]:
        _check_length(group, "rollout", len(arrays.token_ids))
        responses, start = [], 0
        for index, length in enumerate(group.response_lengths):
            ids = arrays.token_ids[start : start + length].tolist()
            start += length
            turns = group.turns[index] if group.turns else Turns((length,))
            before = turns.last_turn
            text, spans = self._token_text.decode(ids[before : before + turns.segments[2 * (turns.num_turns - 1)]])
            ends = [span[0] for token, span in zip(ids[before:], spans, strict=False) if token in self._end_ids]
            spans += [(len(text), len(text))] * (length - before - len(spans))  # an environment's last words, after the last turn
            responses.append(_Response(
                text=self._token_text.decode(ids)[0] if group.turns else text, final=text[: ends[0]] if ends else text, spans=spans,
                before=before, think_open=self._think_open(group.prompt, ids, turns), truncated=group.truncated[index]))
        return responses

    def _think_open(self, prompt: Prompt, ids: list[int], turns: Turns) -> bool:
        """Whether the last turn begins inside reasoning: opened by the prompt, or by an earlier turn, and not closed since. Of what
        the environment wrote only the end counts, which is the template's; the rest may hold any text."""
        opened, start = prompt.think_open, 0
        for index, length in enumerate(turns.segments[: 2 * (turns.num_turns - 1)]):
            piece = ids[start : start + length]
            start += length
            text, _ = self._token_text.decode(piece if index % 2 == 0 else piece[-TEMPLATE_TAIL_TOKENS:])
            if index % 2:
                opened = opened or text.rstrip().endswith(THINK)
            elif THINK in text or END_THINK in text:
                opened = text.rfind(THINK) > text.rfind(END_THINK)
        return opened

    # --- roles -------------------------------------------------------------------------------------------------------

    def label(self, parts: Sequence[LabelParts]) -> list[LabelledGroup]:
        """The groups with their answer masks; ``roles`` is the :class:`RoleArrays` record itself.

        All responses go through one padded grid: roles are decided within a response. The handles inside the results are
        those of the arguments' headers, untouched.
        """
        for one in parts:
            one.check()
        lengths = np.asarray([n for one in parts for n in one.group.response_lengths])
        cells = np.arange(lengths.max())[None, :] < lengths[:, None]

        def padded(pieces: list[np.ndarray], dtype: type) -> torch.Tensor:
            out = np.zeros(cells.shape, dtype)
            out[cells] = np.concatenate(pieces)
            return torch.from_numpy(out)

        ids = padded([one.arrays.token_ids for one in parts], np.int32)
        is_last = torch.from_numpy(np.arange(cells.shape[1])[None, :] == lengths[:, None] - 1)
        arguments = {
            "entropies": padded([one.reference_arrays.entropy for one in parts], np.float32),
            "mask": padded([one.group.trained_mask() for one in parts], np.bool_),
            "position_mask": padded([one.judged_arrays.position_mask for one in parts], np.bool_),
            "verifier_span_mask": padded([one.judged_arrays.verifier_mask for one in parts], np.bool_),
            "eos_mask": torch.isin(ids, torch.tensor(sorted(self._end_ids), dtype=ids.dtype)) & is_last,
            "entropy_quantile": self._roles.entropy_quantile,
            "entropy_window": self._roles.entropy_window,
        }
        seeds = [response_seed(self._seed, one.group.prompt.prompt_id, index) for one in parts
                 for index in range(len(one.group.response_lengths))]
        answer, votes = token_roles(rule=self._roles.rule, seeds=seeds, **arguments), role_votes(**arguments)
        labelled, start = [], 0
        for one in parts:
            rows = slice(start, start + len(one.group.response_lengths))
            start = rows.stop
            mine = Votes(votes.position[rows], votes.entropy[rows], votes.verifier[rows])
            labelled.append(LabelledGroup(
                rollout=one.group, judged=one.judged, reference=one.reference,
                answer_tokens=tuple(answer[rows].sum(1).tolist()), vote_counts=vote_table(mine, arguments["mask"][rows]),
                roles=RoleArrays(answer[rows].numpy()[cells[rows]]),
            ))
        return labelled


def grader_options(config: VerifyConfig) -> dict[str, Any]:
    """What a grader pool of ``verify.kind`` is made with, beside its size: judge, probes and limits."""
    if config.kind == "math":
        return {"timeout_s": config.timeout_s}
    from akl_dist.sandbox.limits import Limits
    from akl_dist.verify.code import CodeSettings, pool_options

    wall_s = min(Limits().wall_s, config.timeout_s)
    return pool_options(CodeSettings(limits=replace(Limits(), wall_s=wall_s), total_s=config.timeout_s,
                                     allow_unsandboxed=config.allow_unsandboxed))


def _flat(votes: list[list[bool]]) -> np.ndarray:
    return np.asarray([vote for row in votes for vote in row], dtype=np.bool_)


def _check_length(group: RolloutGroup, stage: str, size: int) -> None:
    if size != group.num_tokens:
        raise RunError(
            f"{stage} arrays of prompt {group.prompt.prompt_id}",
            got=f"{size} tokens",
            expected=f"{group.num_tokens}",
            remedy="A stage returned arrays of another group; this is a bug in that stage.",
            stage=stage,
        )
