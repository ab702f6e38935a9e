"""Cost of token roles over that of the model's passes on the same batch.

*Roles*: what the verify stage does around its graders, in this process: decode the sampled ids, find the places that vote, turn
them into votes per token, decide the majority (``VerifyWorker.judge`` with verdicts that are there already, then ``label``). All of
``judge`` counts, its headers and counts of equal answers included. *Passes*: the reference's forward pass and the policy's forward
and backward pass over the same responses, with the stages' own packing, one thread, no ZeRO. A step draws, steps the optimizer and
syncs besides, so that the share of a whole step is smaller than this ratio. Both take turns in one process; medians of CPU time.

    python -m benchmarks.roles [--prompts 32 --group-size 8 --repeats 15 --max-ratio 0.02]

Prints a table and one JSON line. Exits 1 if the ratio is above --max-ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from akl_dist.contract.records import RolloutGroup, Verdict
    from akl_dist.reference.worker import ReferenceWorker
    from akl_dist.verify.worker import LabelParts, VerifyWorker

ROW_TOKENS = 1024  # as +exp=tiny has it
WRONG = 0.3  # share of responses whose answer is off by one
TRUNCATED = 0.1


class Graded:
    """Stands where a worker's graders stand and hands out verdicts that were given before."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self._verdicts = list(verdicts)

    def judge_many(self, items: Sequence[Any], *, batch_deadline: float) -> list[Verdict]:
        assert len(items) == len(self._verdicts)
        return self._verdicts

    def close(self) -> None:
        """Nothing was started."""


def groups_of(tokenizer: Any, *, prompts: int, group_size: int, seed: int = 0) -> list[RolloutGroup]:
    """Groups of the tiny task: worked solutions, some wrong, some cut off."""
    import numpy as np

    from akl_dist.contract.records import Prompt, RolloutArrays, RolloutGroup
    from akl_dist.tiny.task import Noise, problems, worked_solution

    rng, groups = random.Random(seed), []
    for problem in problems("train", prompts, seed=seed):
        texts = [worked_solution(problem.operands, rng, Noise(step=WRONG)) + "<eos>" for _ in range(group_size)]
        rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        cut = [rng.random() < TRUNCATED for _ in rows]
        rows = [row[: len(row) // 2] if short else row for row, short in zip(rows, cut, strict=True)]
        flat = np.asarray([token for row in rows for token in row], np.int32)
        prompt_ids = tuple(tokenizer.encode(f"<user>{problem.text}<assistant>", add_special_tokens=False).ids)
        groups.append(RolloutGroup(
            prompt=Prompt(problem.id, "tiny", problem.text, prompt_ids, problem.answer), response_lengths=tuple(map(len, rows)),
            finish_reasons=tuple("length" if short else "stop" for short in cut), policy_version=0, engine="none",
            arrays=RolloutArrays(flat, np.zeros(len(flat), np.float32))))
    return groups


def passes(reference: ReferenceWorker, groups: Sequence[RolloutGroup]) -> tuple[Callable[[], Any], Callable[[], None]]:
    """The reference's pass over the groups, and forward and backward of a trained copy of the model."""
    import copy

    import numpy as np

    from akl_dist.contract.packing import first_fit_decreasing, row_tokens
    from akl_dist.objective import token_statistics
    from akl_dist.reference.worker import Responses
    from akl_dist.zero3.rows import row_tensors

    responses = [Responses(g.prompt.token_ids, np.split(g.arrays.token_ids, np.cumsum(g.response_lengths)[:-1]), g.arrays.logp)
                 for g in groups]
    sequences = [(np.asarray(one.prompt_ids), ids) for one in responses for ids in one.responses]
    policy = copy.deepcopy(reference.model).requires_grad_(True)
    rows = [row_tensors([sequences[index] for index in row], "cpu") for row in
            first_fit_decreasing([row_tokens(len(prompt), len(ids)) for prompt, ids in sequences], ROW_TOKENS)]

    def train() -> None:
        for row in rows:
            hidden = policy.base_model(input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False).last_hidden_state[0]
            logits = policy.get_output_embeddings()(hidden[row.predict_index])
            token_statistics(logits, row.targets, temperature=1.0).logp.sum().backward()
        policy.zero_grad(set_to_none=True)

    return lambda: reference.score(responses), train


def label_parts(worker: VerifyWorker, groups: Sequence[RolloutGroup], scored: Sequence[Any]) -> list[LabelParts]:
    from akl_dist.contract.records import ReferenceGroup
    from akl_dist.verify.worker import LabelParts

    judged = worker.judge(groups, [group.arrays for group in groups])
    return [LabelParts(g, g.arrays, j, j.arrays, ReferenceGroup(g.prompt.prompt_id, s.kl_k1, s.kl_k3, s.arrays), s.arrays)
            for g, j, s in zip(groups, judged, scored, strict=True)]


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this process, which has one thread: another program on the machine does not count."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--max-ratio", type=float, default=0.02)
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from tokenizers import Tokenizer

    from akl_dist.config.schema import RolesConfig, VerifyConfig
    from akl_dist.reference.worker import ReferenceWorker
    from akl_dist.tiny import MODEL_DIR
    from akl_dist.verify.math import judge
    from akl_dist.verify.worker import VerifyWorker

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    groups = groups_of(tokenizer, prompts=options.prompts, group_size=options.group_size)
    reference = ReferenceWorker(
        model_path=str(MODEL_DIR), dtype="float32", attention="sdpa", temperature=1.0, num_threads=1,
        max_tokens_per_batch=ROW_TOKENS, logprob_chunk_tokens=1024, kl_estimator="full", topk=20, device="cpu")
    score, train = passes(reference, groups)
    with closing(VerifyWorker(str(MODEL_DIR), end_ids=(tokenizer.get_vocab()["<eos>"],), config=VerifyConfig(),
                              roles=RolesConfig())) as worker:
        arrays, texts = [group.arrays for group in groups], worker.judge(groups, [group.arrays for group in groups])
        verdicts = [judge(gold=g.prompt.gold, response_text=text.removesuffix("<eos>"), truncated=cut)
                    for g, one in zip(groups, texts, strict=True) for text, cut in zip(one.arrays.texts, g.truncated, strict=True)]
        parts = label_parts(worker, groups, score())
        worker.close()
        worker._graders = cast(Any, Graded(verdicts))  # the graders' own time is not the roles'
        works = {"judge": lambda: worker.judge(groups, arrays), "label": lambda: worker.label(parts), "reference": score,
                 "forward and backward": train}
        times: dict[str, list[float]] = {name: [] for name in works}
        for repeat in range(options.repeats + 2):
            for name, work in works.items():
                seconds = timed(work)
                if repeat >= 2:  # the first ones warm up
                    times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    roles = medians["judge"] + medians["label"]
    return {"benchmark": "roles", "responses": options.prompts * options.group_size, "tokens": sum(g.num_tokens for g in groups),
            "seconds": {name: round(value, 5) for name, value in medians.items()},
            "ratio": roles / (medians["reference"] + medians["forward and backward"]), "max_ratio": options.max_ratio}


def main() -> int:
    options = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = measure(options)
    print(f"{result['responses']} responses, {result['tokens']:,} tokens; CPU time, medians of {options.repeats}")
    for name, seconds in result["seconds"].items():
        print(f"  {name:<22}{1000 * seconds:>9.2f} ms")
    print(f"  roles over passes: {100 * result['ratio']:.2f} % (at most {100 * options.max_ratio:.0f} %)")
    print(json.dumps(result))
    return int(result["ratio"] > options.max_ratio)


if __name__ == "__main__":
    sys.exit(main())
