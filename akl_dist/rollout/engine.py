"""One vLLM engine as a plain class: draws responses, scores probe sequences, takes new weights.

No Ray here; a unit test builds it in its own process. vLLM is imported when the engine is made, not with this module.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from akl_dist.contract.errors import RunError, UserError, WeightSyncError
from akl_dist.contract.records import ParameterInfo, Prompt, Sampling
from akl_dist.rollout.launch import EngineSettings, asked, build, check_effective, effective
from akl_dist.rollout.manifest import parameter_manifest
from akl_dist.rollout.sampler import Finished, SampledGroup, Sampler, flat_scores, response_limit
from akl_dist.rollout.tools import OpenTools, open_tools

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

MIN_TEMPERATURE = 0.01  # vLLM raises smaller temperatures to this one, or samples greedily


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
        self._tools: OpenTools | None = None if settings.tools is None else open_tools(settings.tools, settings.model_path)
        if self._tools is not None:
            self.effective["isolation"] = self._tools.pool.isolation
        self._sampler = Sampler(
            self._llm, name=name, vocab_size=self.vocab_size, entropy_topk=settings.entropy_topk,
            tools=self._tools and self._tools.tools)

    # --- sampling ------------------------------------------------------------------------------------------------

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[SampledGroup]:
        """``group_size`` responses to each prompt, in the prompts' order; the end token stays in the ids.

        Raises:
            UserError: a prompt too long for the engine, or a temperature vLLM would not sample at.
            RunError: the engine is not ready, or its reply does not fit the request.
        """
        drawn = dict(one for finished in self.stream(prompts, sampling) for one in finished)
        return [drawn[index] for index in range(len(prompts))]

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling, every_s: float = 0.0) -> Iterator[Finished]:
        """The groups of :meth:`sample` as they end, each with the index of its prompt; a list at most every ``every_s`` seconds.

        Raises:
            As :meth:`sample`, once the first list is asked for.
        """
        self._require(EngineState.READY, doing="sampling")
        self._check_request(prompts, sampling)
        yield from self._sampler.stream(prompts, sampling, every_s)

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
            scored_ids, logp = flat_scores(output.prompt_logprobs)
            if scored_ids != list(ids)[1:]:
                raise self._sampler.error(
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
            longest = len(prompt.token_ids) + response_limit(prompt, sampling)
            if longest > self.max_model_len:
                raise UserError(
                    f"prompt {prompt.prompt_id}",
                    got=f"{len(prompt.token_ids)} tokens + {response_limit(prompt, sampling)} for the response",
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
            raise self._sampler.error("replies", got=str(len(outputs)), expected=str(len(token_id_lists)))
        for output, ids in zip(outputs, token_id_lists, strict=True):
            if not output.finished or len(output.outputs) != 1:
                raise self._sampler.error(
                    "reply",
                    got=f"{len(output.outputs)} responses, finished={output.finished}",
                    expected="one finished response",
                )
            if list(output.prompt_token_ids or ()) != list(ids):
                raise self._sampler.error("echo of a prompt", got="other token ids", expected="those that were sent")
        return outputs

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
        if self._tools is not None:
            self._tools.pool.close()
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
