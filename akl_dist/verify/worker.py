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

from akl_dist.config.resolve import term_kind
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
from akl_dist.verify.answer_places import CodeAnswer, TokenSpans, position_place, token_votes, verifier_place
from akl_dist.verify.code_answer import entry_names
from akl_dist.verify.grader import GraderPool, Item
from akl_dist.verify.math import distinct_answers
from akl_dist.verify.rewards import needs_rendered_prompt, plain_kind, reward_item, reward_options, settled_verdict
from akl_dist.verify.roles import RANDOM_RULES, response_seed, role_votes, roles_of, vote_tables
from akl_dist.verify.segments import END_THINK, THINK
from akl_dist.verify.token_text import Span, TokenText
from akl_dist.verify.votes import majority

REASON_CHARACTERS = 200  # of a verdict's header, which passes through the driver
TEMPLATE_TAIL_TOKENS = 16  # enough to see whether the template has opened <think> for the next turn


@dataclass(frozen=True)
class _Response:
    """One decoded response: ``text`` in full; ``final``, that of its last turn (the whole response where there is one turn) up to
    its end token; ``spans``, the character range of each token in the last turn, empty for the tokens of others: what was
    written before or after it is no answer. ``think_open``: the last turn begins inside reasoning."""

    text: str
    final: str
    spans: list[Span]
    think_open: bool
    truncated: bool


@dataclass(frozen=True)
class LabelParts:
    """What the roles of one group are decided from: headers and their resolved arrays. ``policy_entropy``: float32 [n] in nats, of
    the policy's forward pass, with roles.entropy_source=policy_forward."""

    group: RolloutGroup
    arrays: RolloutArrays
    judged: JudgedGroup
    judged_arrays: JudgedArrays
    reference: ReferenceGroup
    reference_arrays: ReferenceArrays
    policy_entropy: np.ndarray | None = None

    def check(self) -> None:
        """Raise RunError unless every array has the group's tokens."""
        for stage, size in (
            ("rollout", len(self.arrays.token_ids)),
            ("verify", len(self.judged_arrays.position_mask)),
            ("verify", len(self.judged_arrays.verifier_mask)),
            ("reference", len(self.reference_arrays.entropy)),
        ):
            _check_length(self.group, stage, size)

    def entropies(self, source: str) -> np.ndarray:
        """float32 [n] from ``source`` (roles.entropy_source). Raises RunError where its stage did not give them."""
        if source == "reference":
            return self.reference_arrays.entropy
        stage, values = ("learner", self.policy_entropy) if source == "policy_forward" else ("rollout", self.arrays.entropy)
        if values is None:
            raise RunError(
                f"entropies of prompt {self.group.prompt.prompt_id}",
                got="none",
                expected=f"one for each of its {self.group.num_tokens} tokens, for roles.entropy_source={source}",
                remedy="Write roles.entropy_source=reference, or train on rollouts that carry entropies.",
                stage=stage,
            )
        _check_length(self.group, stage, len(values))
        return values


class VerifyWorker:
    """Verdicts and roles for groups. Owns its graders: call :meth:`close`.

    Args:
        tokenizer_path: folder with ``tokenizer.json``.
        end_ids: the end tokens of the template, the same set the engines stop at.
        config, roles: their groups of the configuration.
        seed: the run's, for roles drawn at random.
        num_workers: grader processes of this worker; default ``config.num_workers``.
        kinds: verifiers that prompts of a mixture may name, beside ``config.kind``.
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
        kinds: Sequence[str] = (),
    ) -> None:
        self._config, self._roles, self._seed = config, roles, seed
        self._end_ids = frozenset(end_ids)
        self._token_text = TokenText(tokenizer_path)
        self._plain_kind = plain_kind(config, kinds)
        self._graders = GraderPool(num_workers=num_workers or config.num_workers, tasks_per_worker=config.tasks_per_worker,
                                   **grader_options(config, kinds))

    def close(self) -> None:
        """End the graders."""
        self._graders.close()

    def counters(self) -> dict[str, int]:
        """Totals of the grader pool: judged, timeouts, crashes, kills, recycled, started."""
        return self._graders.counters()

    def grader_pids(self) -> list[int]:
        return self._graders.pids()

    @property
    def isolation(self) -> str | None:
        """In which the graders run programs (``Sandbox.isolation``); None: they run none."""
        return self._graders.isolation

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def judge(self, groups: Sequence[RolloutGroup], arrays: Sequence[RolloutArrays]) -> list[JudgedGroup]:
        """One judged group per group, in order; ``arrays`` of each is the :class:`JudgedArrays` record itself."""
        deadline = time.monotonic() + self._config.batch_timeout_s
        decoded = [self._decode(group, record) for group, record in zip(groups, arrays, strict=True)]
        all_verdicts = self._verdicts(groups, decoded, deadline)
        masks, verdicts = self._answer_masks(groups, decoded, all_verdicts), iter(all_verdicts)
        judged = []
        for group, responses, (position, verifier) in zip(groups, decoded, masks, strict=True):
            mine = tuple(next(verdicts) for _ in responses)
            lengths = np.asarray(group.response_lengths, np.int64)
            answer_tokens = np.add.reduceat(verifier.astype(np.int64), np.cumsum(lengths) - lengths)
            record = JudgedArrays(tuple(r.text for r in responses), tuple(v.extracted for v in mine), position, verifier)
            headers = tuple(Verdict(v.status, reason=v.reason[:REASON_CHARACTERS], score=v.score, terms=v.terms) for v in mine)
            judged.append(JudgedGroup(group.prompt.prompt_id, headers, tuple(answer_tokens.tolist()), record,
                                      distinct_answers([v.extracted or "" for v in mine if v.correct]),
                                      majority([(v.status, v.extracted) for v in mine]) if self._votes(group.prompt) else None))
        return judged

    def _answer_masks(
        self, groups: Sequence[RolloutGroup], decoded: Sequence[Sequence[_Response]], verdicts: Sequence[Verdict]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Position and verifier votes of each group, bool [n] each."""
        if not groups:
            return []
        responses = [one for group in decoded for one in group]
        codes = [code for group in groups for code in [self._code_answer(group.prompt)] * len(group.response_lengths)]
        rule = self._roles.position
        position = [position_place(r.final, truncated=r.truncated, think_open=r.think_open, position=rule, code=code)
                    for r, code in zip(responses, codes, strict=True)]
        verifier = [verifier_place(r.final, v.span, think_open=r.think_open, code=code)
                    for r, v, code in zip(responses, verdicts, codes, strict=True)]
        cuts = np.cumsum([group.num_tokens for group in groups], dtype=np.int64)[:-1]
        tokens = TokenSpans([r.spans for r in responses])
        return list(zip(*(np.split(token_votes(places, tokens), cuts) for places in (position, verifier)), strict=True))

    def _code_answer(self, prompt: Prompt) -> CodeAnswer | None:
        """How the answer to a prompt of the code verifier is bounded; None for others."""
        if (prompt.verifier or self._config.kind) != "code":
            return None
        return CodeAnswer(self._roles.code_answer, entry_names(prompt.gold))

    def _votes(self, prompt: Prompt) -> bool:
        """Whether answers to a prompt can be the same answer: those of the math verifier."""
        return (prompt.verifier or self._config.kind) == "math"

    def _verdicts(self, groups: Sequence[RolloutGroup], decoded: Sequence[Sequence[_Response]], deadline: float) -> list[Verdict]:
        """One per response, in order. What an environment settled, or failed at, needs no grader."""
        settled, items = [], []
        for group, responses in zip(groups, decoded, strict=True):
            for index, response in enumerate(responses):
                settled.append(settled_verdict(
                    group.prompt.verifier or self._config.kind, group.turns[index] if group.turns else None,
                    right_at=self._config.right_at, truncated=response.truncated, response_text=response.final,
                    think_open=response.think_open))
                if settled[-1] is None:
                    items.append(self._item(group, response))
        judged = iter(self._graders.judge_many(items, batch_deadline=deadline))
        return [next(judged) if verdict is None else verdict for verdict in settled]

    def _item(self, group: RolloutGroup, response: _Response) -> Item:
        if self._plain_kind:
            return Item(group.prompt.gold, response.final, response.truncated, response.think_open)
        rendered = self._token_text.decode(group.prompt.token_ids)[0] if needs_rendered_prompt(self._config) else ""
        return reward_item(group.prompt, response.final, truncated=response.truncated, think_open=response.think_open,
                           transcript=response.text if group.turns else "", rendered=rendered)

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
            if group.turns:
                spans = [(0, 0)] * before + spans + [(len(text), len(text))] * (length - before - len(spans))
            responses.append(_Response(
                text=self._token_text.decode(ids)[0] if group.turns else text, final=text[: ends[0]] if ends else text, spans=spans,
                think_open=self._think_open(group.prompt, ids, turns), truncated=group.truncated[index]))
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
            "entropies": padded([one.entropies(self._roles.entropy_source) for one in parts], np.float32),
            "mask": padded([one.group.trained_mask() for one in parts], np.bool_),
            "position_mask": padded([one.judged_arrays.position_mask for one in parts], np.bool_),
            "verifier_span_mask": padded([one.judged_arrays.verifier_mask for one in parts], np.bool_),
            "eos_mask": torch.isin(ids, torch.tensor(sorted(self._end_ids), dtype=ids.dtype)) & is_last,
            "entropy_quantile": self._roles.entropy_quantile,
            "entropy_window": self._roles.entropy_window,
        }
        votes = role_votes(**arguments)
        seeds = None if self._roles.rule not in RANDOM_RULES else [
            response_seed(self._seed, one.group.prompt.prompt_id, index) for one in parts
            for index in range(len(one.group.response_lengths))]
        answer = roles_of(votes, arguments["mask"], rule=self._roles.rule, seeds=seeds)
        sizes = [len(one.group.response_lengths) for one in parts]
        tables, counts, flat = vote_tables(votes, arguments["mask"], sizes), answer.sum(1).tolist(), answer.numpy()[cells]
        masks, rows = np.split(flat, np.cumsum([one.group.num_tokens for one in parts])[:-1]), iter(counts)
        return [
            LabelledGroup(rollout=one.group, judged=one.judged, reference=one.reference, roles=RoleArrays(mask), vote_counts=table,
                          answer_tokens=tuple(next(rows) for _ in range(size)))
            for one, mask, table, size in zip(parts, masks, tables, sizes, strict=True)]


def grader_options(config: VerifyConfig, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """What a grader pool of ``verify.kind`` is made with, beside its size: judge, probes and limits.

    ``kinds``: those that prompts of a mixture may name, beside it.
    """
    named = {config.kind, *kinds, *(term_kind(name, term) for name, term in config.terms.items())}
    code = None
    if "code" in named:
        from akl_dist.sandbox.limits import Limits
        from akl_dist.verify.code import CodeSettings, pool_options

        wall_s = min(Limits().wall_s, config.timeout_s)
        code = pool_options(CodeSettings(limits=replace(Limits(), wall_s=wall_s), total_s=config.timeout_s,
                                         allow_unsandboxed=config.allow_unsandboxed))
    if not plain_kind(config, kinds):
        return reward_options(config, kinds, code)
    return code or {"timeout_s": config.timeout_s}


def _check_length(group: RolloutGroup, stage: str, size: int) -> None:
    if size != group.num_tokens:
        raise RunError(
            f"{stage} arrays of prompt {group.prompt.prompt_id}",
            got=f"{size} tokens",
            expected=f"{group.num_tokens}",
            remedy="A stage returned arrays of another group; this is a bug in that stage.",
            stage=stage,
        )
