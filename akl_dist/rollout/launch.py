"""What a vLLM engine is made with: settings, process environment, and the check that vLLM took them as asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from akl_dist.config.schema import Config
from akl_dist.contract.errors import ModelError
from akl_dist.rollout.tools import ToolSettings, tool_settings

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

RECEIVER_MODULE = "akl_dist.weight_sync.receiver"  # by name: stages do not import each other, vLLM's workers load it
RECEIVER_BACKEND = "akl_bucket"
CPU_BATCH_TOKENS = 4096
ENTROPY_TOPK = 20
"""Most probable tokens that roles.entropy_source=rollout_topk estimates entropies from."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made with. Plain values, so that it crosses processes.

    Attributes:
        model_path: folder of a Hugging Face checkpoint in safetensors format.
        dtype: "float32" | "bfloat16", of weights and activations.
        max_model_len: longest prompt plus response, in tokens.
        device: "cpu" | "cuda", must be what the installed vLLM was built for.
        tensor_parallel_size: workers that share the model; more than one start processes of their own.
        kv_cache_gib: size of the KV cache; CPU only.
        gpu_memory_utilization: share of the device's memory the engine may fill; CUDA only.
        max_num_seqs: responses decoded together.
        enforce_eager: no compilation, no CUDA graphs.
        num_threads: CPU threads of each worker.
        seed: engine seed; requests carry their own.
        entropy_topk: most probable tokens from which each token's entropy is estimated; 0 = no entropies.
        tools: environments that the policy takes turns with; None = responses are sampled in one piece.
    """

    model_path: str
    dtype: str
    max_model_len: int
    device: str = "cpu"
    tensor_parallel_size: int = 1
    kv_cache_gib: float = 1.0
    gpu_memory_utilization: float = 0.4
    max_num_seqs: int = 256
    enforce_eager: bool = True
    num_threads: int = 1
    seed: int = 0
    entropy_topk: int = 0
    tools: ToolSettings | None = None

    @property
    def environment(self) -> dict[str, str]:
        """See :func:`engine_environment`."""
        return engine_environment(device=self.device, num_threads=self.num_threads, enforce_eager=self.enforce_eager)


def engine_settings(config: Config, model_path: str) -> EngineSettings:
    """The settings of a configuration's engines."""
    rollout = config.rollout
    return EngineSettings(
        model_path=model_path, dtype=rollout.dtype, device=config.cluster.device,
        max_model_len=config.data.max_prompt_tokens + rollout.max_response_tokens,
        tensor_parallel_size=rollout.tensor_parallel_size, kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory_utilization=rollout.gpu_memory_utilization, max_num_seqs=rollout.max_num_seqs,
        enforce_eager=rollout.enforce_eager, num_threads=rollout.num_threads, seed=config.seed,
        entropy_topk=ENTROPY_TOPK if config.roles.entropy_source == "rollout_topk" else 0, tools=tool_settings(config))


def engine_environment(*, device: str, num_threads: int, enforce_eager: bool) -> dict[str, str]:
    """Environment variables that vLLM and OpenMP read when they are imported.

    The thread settings work only when they are there before the process loads OpenMP: give them to the actor's
    runtime environment. Waiting OpenMP threads sleep instead of spinning; two spinning pools on the same cores cost
    several times the wall time. Threads are not bound to cores: vLLM would bind every engine of a node to the same.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(num_threads),
    }
    if device == "cpu":
        environment |= {
            "TORCHDYNAMO_DISABLE": "1" if enforce_eager else "0",  # eager mode alone still compiles the sampler (half a minute)
            "MKL_NUM_THREADS": str(num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            "KMP_BLOCKTIME": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return environment


def build(settings: EngineSettings, name: str) -> LLM:
    """The engine with ``settings``; everything that shapes distributions is set here and not left to defaults."""
    import torch  # both after the environment is set
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    _quieten()
    if current_platform.device_type != settings.device:
        raise ModelError(
            "cluster.device",
            got=settings.device,
            expected=f"{current_platform.device_type}, what the installed vLLM runs on",
            remedy="Install the extra that matches the device (cpu or gpu, never both).",
            stage="rollout",
            actor=name,
        )
    on_cpu = settings.device == "cpu"
    if on_cpu:
        torch.set_num_threads(settings.num_threads)  # vLLM makes later calls a no-op
    return LLM(
        model=settings.model_path,
        skip_tokenizer_init=True,  # token ids in, token ids out
        dtype=cast(Any, settings.dtype),  # vLLM refuses what it does not know
        seed=settings.seed,
        tensor_parallel_size=settings.tensor_parallel_size,
        enforce_eager=settings.enforce_eager,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        load_format="safetensors",
        use_tqdm_on_load=False,
        generation_config="vllm",  # no sampling defaults from the model's folder
        logprobs_mode="processed_logprobs",  # after the temperature: of the distribution that is sampled
        max_logprobs=max(ENTROPY_TOPK, settings.entropy_topk),
        language_model_only=True,
        trust_remote_code=False,
        worker_extension_cls=f"{RECEIVER_MODULE}.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend=RECEIVER_BACKEND),
        kv_cache_memory_bytes=_kv_cache_bytes(settings) if on_cpu else None,
        # A prompt cut over two batches rewinds its request's generator, which a CPU generator cannot do.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(settings.max_model_len, CPU_BATCH_TOKENS) if on_cpu else None,
        gpu_memory_utilization=settings.gpu_memory_utilization,  # of no effect where the KV cache has its size
    )


def _kv_cache_bytes(settings: EngineSettings) -> int:
    return int(settings.kv_cache_gib * 2**30)


def _quieten() -> None:
    """Warnings of vLLM stay, except those that are by design here and come with every start or weight update."""
    by_design = {
        "vllm.renderers.base": ("Chat template warmup failed", "for EOS token id because tokenizer"),  # ids in, ids out
        "vllm.v1.worker.cpu_worker": ("is not found in LD_PRELOAD", "after the thread binding"),
        "vllm.model_executor.model_loader.reload.layerwise": ("Failed to load weights",),  # the receiver checks each layer
    }
    for logger_name, texts in by_design.items():
        logging.getLogger(logger_name).addFilter(lambda record, texts=texts: not any(text in record.getMessage() for text in texts))


def effective(config: VllmConfig, device: str) -> dict[str, object]:
    """Settings as vLLM holds them."""
    import torch

    on_cpu = device == "cpu"
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "seed": config.model_config.seed,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "enforce_eager": config.model_config.enforce_eager,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "logprobs_mode": config.model_config.logprobs_mode,
        "generation_config": config.model_config.generation_config,
        "quantization": config.model_config.quantization,
        "num_threads": torch.get_num_threads() if on_cpu else None,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes if on_cpu else None,
        "gpu_memory_utilization": None if on_cpu else config.cache_config.gpu_memory_utilization,
    }


def asked(settings: EngineSettings) -> dict[str, object]:
    """Settings as they should read in :func:`effective`."""
    on_cpu = settings.device == "cpu"
    return {
        "dtype": settings.dtype,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "quantization": None,
        "num_threads": settings.num_threads if on_cpu else None,
        "kv_cache_memory_bytes": _kv_cache_bytes(settings) if on_cpu else None,
        "gpu_memory_utilization": None if on_cpu else settings.gpu_memory_utilization,
    }


def check_effective(found: Mapping[str, object], asked: Mapping[str, object], name: str) -> None:
    """Raise ModelError unless every setting reads back as asked."""
    wrong = [f"{key}={found[key]!r} instead of {value!r}" for key, value in asked.items() if found[key] != value]
    if wrong:
        raise ModelError(
            f"effective settings of {name}",
            got="; ".join(wrong),
            expected="the settings asked for",
            remedy="vLLM changed them for this model or machine: ask for what it can do, and for threads set "
            "OMP_NUM_THREADS before the process starts.",
            stage="rollout",
            actor=name,
        )
