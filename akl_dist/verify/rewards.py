"""Which verifier judges a response, and the weighted sum of named terms around it. Runs in the grader processes.

One judge evaluates the main verifier of an item (``verify.kind``, or the kind of the prompt's source in a mixture) and every one of
``verify.terms``. The pool that calls it owns the limit: code of one's own that hangs, crashes or exits costs one judgement, which
has no verdict then, and never the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from akl_dist.config.mixture import verifiers
from akl_dist.config.resolve import term_kind
from akl_dist.config.schema import Config, VerifyConfig
from akl_dist.contract.errors import UserError
from akl_dist.contract.records import MAIN_TERM, Prompt, Status, Turns, Verdict
from akl_dist.verify import math
from akl_dist.verify.adapters import FAILURES, RewardFunction, RewardItem, call, failed, load_function, verdict_of, with_answer
from akl_dist.verify.extract import extract, locate
from akl_dist.verify.grader import PROBES as MATH_PROBES
from akl_dist.verify.http_reward import HttpReward
from akl_dist.verify.segments import END_THINK, THINK

JUDGE = "akl_dist.verify.rewards:judge"
SETTINGS_VARIABLE = "AKL_REWARD_SETTINGS"
SET_BY_THE_POOL = ("PATH", "LANG", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
FOR_HTTP = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that endpoints are reached by."""


@dataclass(frozen=True)
class RewardSource:
    """One verifier and what it needs; the fields are the keys of ``verify``."""

    kind: str
    custom: str | None = None
    signature: str = "akl"
    http_url: str | None = None
    http_timeout_s: float = 10.0
    http_retries: int = 2
    http_token_env: str | None = None


@dataclass(frozen=True)
class RewardTerm:
    """One of ``verify.terms``. A value outside [0, 1] is a fault unless ``unbounded``."""

    name: str
    weight: float
    source: RewardSource
    unbounded: bool = False


@dataclass(frozen=True)
class RewardSettings:
    """All that the judge needs: the run's own verifier, the kinds that prompts may name, the terms."""

    main: RewardSource
    kinds: tuple[str, ...]
    terms: tuple[RewardTerm, ...] = ()
    right_at: float = 1.0

    @classmethod
    def of(cls, config: VerifyConfig, kinds: Collection[str] = ()) -> RewardSettings:
        """``kinds``: those of config.mixture.verifiers; empty: ``verify.kind`` alone."""
        fields = ("custom", "signature", "http_url", "http_timeout_s", "http_retries", "http_token_env")
        main = RewardSource(config.kind, **{name: getattr(config, name) for name in fields})
        terms = []
        for name, term in config.terms.items():
            own = {key: term[key] for key in fields if key in term}
            source = replace(main, **{"custom": None, "signature": "akl", "http_url": None} | own, kind=term_kind(name, term))
            terms.append(RewardTerm(name, float(term["weight"]), source, bool(term.get("unbounded", False))))
        return cls(main, tuple(sorted({config.kind, *kinds})), tuple(terms), config.right_at)

    def sources(self) -> dict[str, RewardSource]:
        """Key in the configuration -> verifier, of everything that graders start."""
        found = {"verify": self.main} | {f"verify of kind {kind}": replace(self.main, kind=kind) for kind in self.kinds
                                         if kind != self.main.kind}
        return found | {f"verify.terms.{term.name}": term.source for term in self.terms}

    def all_kinds(self) -> set[str]:
        return {source.kind for source in self.sources().values()}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RewardSettings:
        values = json.loads(text)
        terms = tuple(RewardTerm(**{**term, "source": RewardSource(**term["source"])}) for term in values["terms"])
        return cls(RewardSource(**values["main"]), tuple(values["kinds"]), terms, values["right_at"])


# --- in the trainer's processes --------------------------------------------------------------------------------------


def plain_kind(config: VerifyConfig, kinds: Collection[str] = ()) -> bool:
    """Whether one of the built-in verifiers judges everything by itself, without this module."""
    return config.kind in ("math", "code") and not config.terms and set(kinds) <= {config.kind}


def check_rewards(config: Config) -> None:
    """Import every reward function that the configuration names, hold it against its signature, and look for the tokens of
    endpoints: before anything is started.

    Raises:
        UserError: one that is not there or does not fit.
    """
    for key, source in RewardSettings.of(config.verify, verifiers(config)).sources().items():
        key = key if key.startswith("verify.terms.") else "verify"
        if source.kind == "custom":
            load_function(str(source.custom), signature=source.signature, key=f"{key}.custom")
        if source.kind == "http":
            token(source, key=key)


def token(source: RewardSource, *, key: str = "verify") -> str | None:
    """The bearer token of an endpoint, from the environment; None where none is asked for. Raises UserError without its value."""
    if source.http_token_env is None:
        return None
    value = os.environ.get(source.http_token_env, "").strip()
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise UserError(f"{key}.http_token_env", got=f"{source.http_token_env}, which is {'no token' if value else 'not set'} here",
                        expected="an environment variable that holds a bearer token (on every node with graders)",
                        remedy=f"export {source.http_token_env}=... before the command (and before `ray start`).", stage="config")
    return value


def reward_options(config: VerifyConfig, kinds: Collection[str], code: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of the grader pool, its size aside.

    Args:
        kinds: those that prompts may name, beside ``config.kind``.
        code: the options of a pool for programs, where any part judges programs; its settings, probes and limit are taken over.

    Code of one's own gets the import path, the working directory and the environment of this process (the tokens of endpoints
    excepted, unless there is an endpoint); without it the environment stays minimal.
    """
    settings = RewardSettings.of(config, kinds)
    sources = list(settings.sources().values())
    own_code = any(source.kind == "custom" for source in sources)
    tokens = {source.http_token_env: value for source in sources if source.kind == "http" and (value := token(source))}
    hidden = {*SET_BY_THE_POOL, *(source.http_token_env for source in sources)}
    environment: dict[str, str] = {}
    if own_code:
        environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONPATH": import_path()}
    elif any(source.kind == "http" for source in sources):
        environment = {name: os.environ[name] for name in FOR_HTTP if name in os.environ}
    environment |= {str(name): value for name, value in tokens.items()} | {SETTINGS_VARIABLE: settings.to_json()}
    probes = [(kind, probe) for kind, known in (("math", MATH_PROBES), ("code", code["probes"] if code else ()))
              if kind in settings.kinds for probe in known]
    return {
        "judge": JUDGE,
        "probes": tuple((RewardItem(**vars(item), kind=kind, with_terms=False), status) for kind, (item, status) in probes),
        "timeout_s": code["timeout_s"] if code else config.timeout_s,
        "environment": environment | (code["environment"] if code else {}),
        "working_directory": os.getcwd() if own_code else "/",
        "remedy": "The reason is its last message; docs/rewards.md says what runs in a grader. Verdicts of math and code that are "
                  "not as expected: check the installation of math-verify and sympy.",
    }


def import_path() -> str:
    """This process's import path as PYTHONPATH, its working directory and the package's own root included."""
    found = [os.path.abspath(entry) for entry in sys.path if os.path.exists(entry or ".")]
    return os.pathsep.join(dict.fromkeys([*found, os.getcwd(), str(Path(__file__).resolve().parents[2])]))


def reward_item(prompt: Prompt, response_text: str, *, truncated: bool, think_open: bool, transcript: str = "",
                rendered: str = "") -> RewardItem:
    """The judgement of one response. Arguments: see :class:`akl_dist.verify.adapters.RewardItem`."""
    return RewardItem(prompt.gold, response_text, truncated, think_open, kind=prompt.verifier, prompt=prompt.text,
                      extra=prompt.extra, source=prompt.source, prompt_id=prompt.prompt_id, rendered=rendered,
                      transcript=transcript)


def needs_rendered_prompt(config: VerifyConfig) -> bool:
    """Whether a function is called in a way that shows it the prompt through the chat template."""
    return "openrlhf" in (config.signature, *(term.get("signature") for term in config.terms.values()))


def fault_of(turns: Turns | None) -> Verdict | None:
    """For every kind: no verdict where the environment failed; None where it did not."""
    return failed(f"environment: {turns.fault}") if turns is not None and turns.fault else None


def settled_verdict(kind: str, turns: Turns | None, *, right_at: float, truncated: bool, response_text: str,
                    think_open: bool = False) -> Verdict | None:
    """The verdict on a response that needs no grader: the environment failed, or its own score is the verdict. None: a grader
    judges.

    Args:
        kind: the prompt's verifier, or else the run's.
        turns: of a conversation with an environment; None where there was none.
        response_text: of the last turn, as a grader would get it.
    """
    if kind != "environment":
        return fault_of(turns)
    if turns is None:
        return failed("verify.kind=environment: a response without an environment")
    return environment_verdict(turns, right_at=right_at, truncated=truncated, response_text=response_text, think_open=think_open)


def environment_verdict(turns: Turns, *, right_at: float, truncated: bool = False, response_text: str = "",
                        think_open: bool = False) -> Verdict:
    """The verdict that ``turns.score``, the environment's own, means: right from ``right_at`` on.

    Without a score a truncated response is ``no_answer`` (it was cut off before the environment could judge), any other is an
    ``error`` of the environment. ``response_text`` (the last turn's) gives the answer that token roles vote by.
    """
    fault = fault_of(turns)
    if fault is not None:
        return fault
    if turns.score is None:
        verdict = Verdict(Status.NO_ANSWER, reason="truncated") if truncated else failed("environment: the episode ended without "
                                                                                        "a score")
    else:
        verdict = verdict_of(turns.score, right_at=right_at)
    return with_answer(verdict, response_text, think_open=think_open)


# --- in a grader process ---------------------------------------------------------------------------------------------


class RewardJudge:
    """Judges items by :class:`RewardSettings`. Imports what it needs when it is made; see :func:`check_rewards` for its errors."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self._functions: dict[RewardSource, RewardFunction] = {}
        self._endpoints: dict[RewardSource, HttpReward] = {}
        for key, source in settings.sources().items():
            if source.kind == "custom":
                self._functions[source] = load_function(str(source.custom), signature=source.signature, key=f"{key}.custom")
            elif source.kind == "http":
                self._endpoints[source] = HttpReward(str(source.http_url), source.http_timeout_s, source.http_retries,
                                                     token(source, key=key))
        for source in self._endpoints:
            os.environ.pop(source.http_token_env or "", None)  # what runs here later has no use for it

    def judge(self, item: RewardItem) -> Verdict:
        """The main verifier's status and answer; the reward is the sum, and ``terms`` its parts before their weights.

        A term without a verdict leaves the whole judgement without one: a sum that lacks a part is another reward.
        """
        kind = item.kind or self.settings.main.kind
        if kind not in self.settings.kinds:
            return failed(f"verifier {kind!r} of {item.prompt_id}, expected one of {', '.join(self.settings.kinds)}")
        verdict = self._one(replace(self.settings.main, kind=kind), item)
        if not item.with_terms or not self.settings.terms or verdict.reward is None:
            return verdict
        total, values = verdict.reward, [(MAIN_TERM, verdict.reward)]
        for term in self.settings.terms:
            part = self._one(term.source, item)
            value = part.reward
            if value is None:
                return replace(verdict, status=part.status, score=None, reason=f"term {term.name}: {part.reason}")
            if not (term.unbounded or 0 <= value <= 1):
                return replace(verdict, status=Status.ERROR, score=None, reason=f"term {term.name}: {value:g}, expected a value "
                               f"from 0 to 1 (verify.terms.{term.name}.unbounded=true allows any)")
            values.append((term.name, value))
            total += term.weight * value
        return replace(verdict, score=total, terms=tuple(values))

    def _one(self, source: RewardSource, item: RewardItem) -> Verdict:
        if source.kind == "math":
            return math.judge(gold=item.gold, response_text=item.response_text, truncated=item.truncated,
                              think_open=item.think_open)
        if source.kind == "code":
            from akl_dist.verify import code

            return code.judge(gold=item.gold, response_text=item.response_text, truncated=item.truncated,
                              think_open=item.think_open)
        if source.kind == "format":
            return verdict_of(well_formed(item, item.kind or self.settings.main.kind), right_at=1.0)
        if source.kind == "http":
            verdict = self._endpoints[source].judge(item, right_at=self.settings.right_at)
        elif source.kind == "custom":
            verdict = self._call(source, item)
        else:
            return failed(f"a response to judge by kind {source.kind!r}, which no grader judges")
        return with_answer(verdict, item.response_text, think_open=item.think_open)

    def _call(self, source: RewardSource, item: RewardItem) -> Verdict:
        try:
            answer = call(self._functions[source], source.signature, item)
        except FAILURES as error:
            return failed(f"{source.custom} raised {type(error).__name__}: {error}")
        return verdict_of(answer, right_at=self.settings.right_at)


def well_formed(item: RewardItem, kind: str = "math") -> bool:
    """Term ``format``: one think section, opened (by the prompt or the response) and closed, then an answer that is marked as such
    (for ``math`` not by a fence of code), in a response that ended by itself."""
    text = item.response_text
    opens, closes = text.count(THINK), text.count(END_THINK)
    sections = closes == 1 and opens == (0 if item.think_open else 1) and text.find(THINK) < text.find(END_THINK)
    find = extract if kind == "math" else locate
    return sections and not item.truncated and find(text, think_open=item.think_open) is not None


_judge: RewardJudge | None = None


def judge(
    *, gold: str, response_text: str, truncated: bool, think_open: bool = False, kind: str = "", prompt: str = "", extra: str = "",
    source: str = "", prompt_id: str = "", rendered: str = "", transcript: str = "", with_terms: bool = True,
) -> Verdict:
    """The verdict on a whole response, in the form the grader pool calls: the fields of RewardItem."""
    item = RewardItem(gold, response_text, truncated, think_open, kind, prompt, extra, source, prompt_id, rendered, transcript,
                      with_terms)
    return shared_judge().judge(item)


def shared_judge() -> RewardJudge:
    """This process's judge, made on first use with the settings of the environment."""
    global _judge
    if _judge is None:
        _judge = RewardJudge(RewardSettings.from_json(os.environ[SETTINGS_VARIABLE]))
    return _judge


def isolation() -> str | None:
    """In which programs run here (``Sandbox.isolation``); None where no part judges programs."""
    if "code" not in shared_judge().settings.all_kinds():
        return None
    from akl_dist.verify import code

    return code.isolation()


def warm_up() -> None:
    """Import what the kinds in use need before the first timed judgement."""
    kinds = shared_judge().settings.all_kinds()
    if "math" in kinds:
        math.warm_up()
    if "code" in kinds:
        from akl_dist.verify import code

        code.warm_up()
