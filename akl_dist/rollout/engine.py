"""One vLLM engine as a plain class: draws responses, scores probe sequences, takes new weights.

No Ray here; a unit test builds it in its own process. vLLM is imported when the engine is made, not with this module.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from akl_dist.contract.errors import RunError, UserError, WeightSyncError
from akl_dist.contract.records import ParameterInfo, Prompt, RolloutArrays, Sampling
from akl_dist.rollout.launch import EngineSettings, asked, build, check_effective, effective
from akl_dist.rollout.manifest import parameter_manifest
from akl_dist.rollout.sampling import request_seed

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

MIN_TEMPERATURE = 0.01  # vLLM raises smaller temperatures to this one, or samples greedily


class SampledGroup(NamedTuple):
    """Responses to one prompt. arrays: flat over the responses; response_lengths, finish_reasons: [group_size]."""

    arrays: RolloutArrays
    response_lengths: tuple[int, ...]
    finish_reasons: tuple[str, ...]


class EngineState(enum.Enum):
    """READY samples; UPDATING is inside a weight session; LOADED has new weights that nobody has verified yet;
    BROKEN failed inside a session and must be restarted (partial weights; NaN survives in the KV cache)."""

    READY = "ready"
    UPDATING = "updating"
    LOADED = "loaded"
    BROKEN = "broken"


class RolloutEngine:
    """A vLLM engine that samples token ids with the log-probs of the distribution actually sampled.

    Args:
        settings: see :class:`EngineSettings`; what vLLM made of them is compared with what was asked.
        name: how records and errors call this engine.

    Attributes:
        policy_version: version of the weights, set by :meth:`confirm_update`; 0 = those of the checkpoint.
        effective: settings read back from vLLM.
    """

    def __init__(self, settings: EngineSettings, *, name: str = "engine") -> None:
        os.environ.update(settings.environment)
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_gib, in whole GiB only
        self.name = name
        self.policy_version = 0
        self.state = EngineState.READY
        self._parameters = parameter_manifest(settings.model_path)
        self._llm = build(settings, name)
        config = self._llm.llm_engine.vllm_config
        self.max_model_len = config.model_config.max_model_len
        self.vocab_size = config.model_config.get_vocab_size()
        self.effective = effective(config, settings.device)
        check_effective(self.effective, asked(settings), name)

    # --- sampling ------------------------------------------------------------------------------------------------

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[SampledGroup]:
        """``group_size`` responses to each prompt, in the prompts' order; the end token stays in the ids.

        Raises:
            UserError: a prompt too long for the engine, or a temperature vLLM would not sample at.
            RunError: the engine is not ready, or its reply does not fit the request.
        """
        self._require(EngineState.READY, doing="sampling")
        self._check_request(prompts, sampling)
        requests = [(prompt, index) for prompt in prompts for index in range(sampling.group_size)]
        if not requests:
            return []
        outputs = self._generate(
            [prompt.token_ids for prompt, _ in requests],
            [_sampling_params(sampling, request_seed(sampling.seed_key, prompt.prompt_id, index)) for prompt, index in requests],
        )
        samples = [self._response(output, prompt, sampling) for output, (prompt, _) in zip(outputs, requests, strict=True)]
        size = sampling.group_size
        return [_group(samples[start : start + size]) for start in range(0, len(samples), size)]

    def prompt_logprobs(self, token_id_lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of tokens 1 .. n-1 of each sequence given those before; float32 [n - 1] each.

        A sequence has 2 to ``max_model_len - 1`` tokens.

        Values are returned as they are, NaN included: this is a probe, and its caller decides.
        """
        self._require(EngineState.READY, EngineState.LOADED, doing="scoring a probe")
        from vllm import SamplingParams

        for index, ids in enumerate(token_id_lists):
            if not 2 <= len(ids) < self.max_model_len:  # vLLM always generates one token more
                raise RunError(
                    f"probe sequence {index}",
                    got=f"{len(ids)} tokens",
                    expected=f"2 to {self.max_model_len - 1}",
                    remedy="Choose other probe sequences.",
                    stage="weight_sync",
                    actor=self.name,
                )
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, seed=0)
        outputs = self._generate(token_id_lists, [params] * len(token_id_lists))
        scores = []
        for output, ids in zip(outputs, token_id_lists, strict=True):
            scored_ids, logp = _flat(output.prompt_logprobs)
            if scored_ids != list(ids)[1:]:
                raise self._reply_error(
                    "prompt log-probs",
                    got=f"{len(scored_ids)} entries",
                    expected=f"one for each of the {len(ids) - 1} tokens after the first",
                )
            scores.append(logp)
        return scores

    def _check_request(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        if not sampling.temperature >= MIN_TEMPERATURE:
            raise UserError(
                "rollout.temperature",
                got=str(sampling.temperature),
                expected=f"at least {MIN_TEMPERATURE}",
                remedy="Greedy decoding has no behaviour distribution to train on.",
                stage="rollout",
            )
        if not sampling.end_ids:
            raise RunError(
                "sampling.end_ids",
                got="none",
                expected="the ids that end a response",
                remedy="Take them from rollout.sampling.end_ids.",
                stage="rollout",
            )
        for prompt in prompts:
            longest = len(prompt.token_ids) + sampling.max_response_tokens
            if longest > self.max_model_len:
                raise UserError(
                    f"prompt {prompt.prompt_id}",
                    got=f"{len(prompt.token_ids)} tokens + {sampling.max_response_tokens} for the response",
                    expected=f"at most {self.max_model_len}",
                    remedy="Lower data.max_prompt_tokens or rollout.max_response_tokens.",
                    stage="rollout",
                )

    def _generate(self, token_id_lists: Sequence[Sequence[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        """Replies in the order of the requests, each compared with what was sent."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in token_id_lists], sampling_params=params, use_tqdm=False
        )
        if len(outputs) != len(token_id_lists):
            raise self._reply_error("replies", got=str(len(outputs)), expected=str(len(token_id_lists)))
        for output, ids in zip(outputs, token_id_lists, strict=True):
            if not output.finished or len(output.outputs) != 1:
                raise self._reply_error(
                    "reply",
                    got=f"{len(output.outputs)} responses, finished={output.finished}",
                    expected="one finished response",
                )
            if list(output.prompt_token_ids or ()) != list(ids):
                raise self._reply_error("echo of a prompt", got="other token ids", expected="those that were sent")
        return outputs

    def _response(self, output: RequestOutput, prompt: Prompt, sampling: Sampling) -> tuple[np.ndarray, np.ndarray, str]:
        response = output.outputs[0]
        ids = np.asarray(response.token_ids, dtype=np.int32)
        scored_ids, logp = _flat(response.logprobs)
        where = f"response to prompt {prompt.prompt_id}"
        if not 1 <= len(ids) <= sampling.max_response_tokens or len(logp) != len(ids):
            raise self._reply_error(
                where,
                got=f"{len(ids)} ids, {len(logp)} log-probs",
                expected=f"the same number, 1 to {sampling.max_response_tokens}",
            )
        if scored_ids != list(response.token_ids) or ids.min() < 0 or ids.max() >= self.vocab_size:
            raise self._reply_error(
                where,
                got="log-probs of other tokens, or ids outside the vocabulary",
                expected="log-probs of the sampled ids",
            )
        if not np.isfinite(logp).all():
            raise self._reply_error(where, got="log-probs that are not finite", expected="finite values")
        reason = response.finish_reason
        ended = np.isin(ids, sampling.end_ids)
        stops = reason == "stop" and ended[-1] and not ended[:-1].any()
        cut = reason == "length" and len(ids) == sampling.max_response_tokens and not ended.any()
        if not (stops or cut):
            raise self._reply_error(
                where,
                got=f"finish reason {reason!r} after {len(ids)} tokens",
                expected='"stop" at its first end token, or "length" at the token limit',
            )
        return ids, logp, str(reason)

    # --- weight updates ------------------------------------------------------------------------------------------

    def parameter_manifest(self) -> list[ParameterInfo]:
        """What a weight update must bring; :func:`akl_dist.rollout.manifest.parameter_manifest`."""
        return list(self._parameters)

    def begin_update(self, manifest: Sequence[ParameterInfo]) -> None:
        """Open a weight update that will bring exactly ``manifest``. Sampling is refused until it is confirmed."""
        self._require(EngineState.READY, EngineState.LOADED, doing="beginning a weight update")
        self.state = EngineState.UPDATING
        self._session(self._open, {parameter.name: parameter.shape for parameter in manifest})

    def load_bucket(self, bucket: Mapping[str, tuple[str, np.ndarray]]) -> None:
        """Load full parameters: name -> (dtype name, array)."""
        self._require(EngineState.UPDATING, doing="loading a bucket of weights")
        self._session(self._rpc, "update_weights", {"update_info": {"bucket": dict(bucket)}})

    def finish_update(self) -> None:
        """Check that all parameters arrived, finalise, drop the prefix cache. Then only probes run, until confirmed."""
        self._require(EngineState.UPDATING, doing="finishing a weight update")
        self._session(self._rpc, "finish_weight_update", {})
        if not self._llm.reset_prefix_cache():
            self.state = EngineState.BROKEN
            raise self._broken("the prefix cache could not be dropped after a weight update")
        self.state = EngineState.LOADED

    def confirm_update(self, policy_version: int) -> None:
        """The new weights passed the probe: sampling may go on, under this version."""
        self._require(EngineState.LOADED, doing="confirming a weight update")
        self.policy_version = policy_version
        self.state = EngineState.READY

    def _open(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._rpc("init_weight_transfer_engine", {"init_info": {"shapes": shapes}})
        self._rpc("start_weight_update", {})

    def _rpc(self, method: str, arguments: dict[str, Any]) -> None:
        self._llm.collective_rpc(method, kwargs=arguments)

    def _session(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run one step of a weight update; whatever goes wrong inside leaves the engine unusable."""
        previous, self.state = self.state, EngineState.BROKEN
        try:
            call(*arguments)
        except RuntimeError as error:  # how vLLM passes on an error of a worker process
            raise self._broken(f"a failed weight update ({error})") from error
        self.state = previous

    # --- state ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back workers and memory."""
        self.state = EngineState.BROKEN
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def _require(self, *states: EngineState, doing: str) -> None:
        if self.state is EngineState.BROKEN:
            raise self._broken(f"unusable engine asked for {doing}")
        if self.state not in states:
            raise WeightSyncError(
                f"{self.name}, {doing}",
                got=f"an engine in state {self.state.value!r}",
                expected=" or ".join(state.value for state in states),
                remedy="Finish and confirm the weight update first.",
                stage="weight_sync",
                actor=self.name,
            )

    def _broken(self, got: str) -> WeightSyncError:
        return WeightSyncError(
            self.name,
            got=got,
            expected="an engine whose last weight update succeeded",
            stage="weight_sync",
            remedy="Restart the engine: partial weights and cached NaN values survive a new update.",
            actor=self.name,
        )

    def _reply_error(self, subject: str, *, got: str, expected: str) -> RunError:
        return RunError(
            f"{self.name}, {subject}",
            got=got,
            expected=expected,
            stage="rollout",
            actor=self.name,
            remedy="The engine's reply does not fit its request; resume from the last checkpoint.",
        )


def _sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """Every field that shapes the distribution, explicitly; only ``end_ids`` end a response (hence ignore_eos)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=seed,
        stop_token_ids=list(sampling.end_ids),
        ignore_eos=True,
        min_tokens=0,
        max_tokens=sampling.max_response_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert (params.temperature, params.seed, params.top_k) == (sampling.temperature, seed, 0), "vLLM changed a sampling field"
    return params


def _flat(entries: object) -> tuple[list[int], np.ndarray]:
    """Token ids and log-probs, float32 [n], of a reply to a request with ``flat_logprobs``."""
    from vllm.logprobs import FlatLogprobs

    assert isinstance(entries, FlatLogprobs), f"log-probs came as {type(entries).__name__}"
    return entries.token_ids, np.asarray(entries.logprobs, dtype=np.float32)


def _group(samples: Sequence[tuple[np.ndarray, np.ndarray, str]]) -> SampledGroup:
    ids, logps, reasons = zip(*samples, strict=True)
    arrays = RolloutArrays(token_ids=np.concatenate(ids), logp=np.concatenate(logps))
    return SampledGroup(arrays, tuple(len(row) for row in ids), tuple(reasons))
