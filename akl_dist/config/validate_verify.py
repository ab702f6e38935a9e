"""Rules on the verifier and its terms: each kind has what it needs, and nothing is set that nobody reads. Stdlib only.

Reward functions are looked for, not imported: verify.rewards.check_rewards imports them, before anything is started.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from akl_dist.config.choices import CHOICES
from akl_dist.config.mixture import verifiers
from akl_dist.config.own_loss import module_is_there
from akl_dist.config.problems import Problems, Unread, problem
from akl_dist.config.resolve import http_pauses, kinds_of, term_kind
from akl_dist.config.schema import Config
from akl_dist.contract.errors import UserError, nearest

SCORED = ("custom", "http", "environment")  # kinds that give a number
TERM_KINDS = ("math", "code", "custom", "http", "format")
HTTP_KEYS = ("http_url", "http_timeout_s", "http_retries", "http_token_env")
TERM_KEYS = ("weight", "unbounded", "kind", "custom", "signature", *HTTP_KEYS)
MAX_RETRIES = 10
MAX_WEIGHT = 1e30  # rewards stay finite in single precision
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_TERM = re.compile(r"[A-Za-z_]\w*")
_LOCAL = ("localhost", "127.0.0.1", "::1")


def verify_problems(config: Config) -> Problems:
    """Every rule of this module."""
    verify, kinds = config.verify, verifiers(config)
    if "custom" in kinds:
        yield from _function("verify.custom", verify.custom)
    if "http" in kinds:
        yield from _endpoint("verify", vars(verify))
    if "environment" in kinds:
        yield from _environment(config)
    if verify.terms:
        yield from _terms(config)
    yield from _http_time(config)


def verify_unread(config: Config) -> Iterator[Unread]:
    """Keys of ``verify`` that only some kinds read. A term has such keys of its own."""
    kinds = verifiers(config)
    asked = "a source of data.mixture with verifier:" if config.data.mixture else "verify.kind="
    yield ("verify.custom", "custom" in kinds, f"{asked}custom")
    yield ("verify.signature", "custom" in kinds, f"{asked}custom")
    yield ("verify.http_url", "http" in kinds, f"{asked}http")
    of_terms = {key for term in config.verify.terms.values() if isinstance(term, Mapping) and term.get("http_url")
                for key in HTTP_KEYS if key not in term}
    for key in HTTP_KEYS[1:]:
        yield (f"verify.{key}", "http" in kinds or key in of_terms, f"{asked}http, or a term of kind http without its own")
    yield ("verify.right_at", bool(kinds & set(SCORED)), f"{asked}{', '.join(SCORED)}")


def verify_warnings(config: Config) -> Iterator[str]:
    """Settings of the verifier that are allowed and probably not meant, one sentence each."""
    for key, values in _endpoints(config).items():
        address = urlsplit(str(values["http_url"]))
        if address.scheme == "http" and address.hostname not in _LOCAL:
            what = "the token and all prompts" if values["http_token_env"] else "all prompts"
            yield f"{key}.http_url={values['http_url']}: without TLS, {what} cross the network readable by anyone on the way."
    for name, term in config.verify.terms.items():
        if isinstance(term, Mapping) and term.get("unbounded") is True:
            yield (f"verify.terms.{name}.unbounded=true: nothing keeps a wrong response with much of {name} from a higher reward "
                   "than a right one.")
    yield from _order_warnings(config)


def _order_warnings(config: Config) -> Iterator[str]:
    """Where the bound on the weights does not keep wrong responses below right ones: it counts on a verdict of 1 and 0."""
    bounded = sum(abs(term["weight"]) for term in config.verify.terms.values() if isinstance(term, Mapping)
                  and type(term.get("weight")) in (int, float) and term.get("unbounded") is not True)
    scored = sorted(verifiers(config) & {"custom", "http"})
    if bounded and scored:
        yield (f"verify.terms beside kind {' and '.join(scored)}: a right response stays above every wrong one only where "
               f"the scores of right and wrong lie more than {bounded:g} apart, the sum of the weights.")
    penalty = config.objective.overlong_penalty if config.objective.overlong_buffer_tokens else 0.0
    if bounded and penalty and bounded + penalty > 1:
        yield (f"verify.terms (sizes {bounded:g} in sum) beside objective.overlong_penalty={penalty:g}: a "
               "right response near the length limit can get less than a short wrong one; together they should be at most 1.")


def _function(key: str, path: Any) -> Problems:
    if path is None:
        yield problem(key, None, "module:function with kind custom", f"Write {key}=my_rewards:score; docs/rewards.md has examples.")
    elif not isinstance(path, str) or not _FUNCTION.fullmatch(path) or path.partition(":")[0].endswith(".py"):
        file, _, name = str(path).partition(":")
        module = file.removesuffix(".py").strip("./").replace("/", ".")
        close = f"{module}:{name or 'score'}"
        yield problem(key, path, "module:function, the module by its name, without .py",
                      f"Write {key}={close if _FUNCTION.fullmatch(close) else 'my_rewards:score'}.")
    elif not module_is_there(path.partition(":")[0]):
        yield problem(key, path, "a module that Python finds", "Start where that file is, or put its folder on PYTHONPATH.")


def _endpoint(key: str, values: Mapping[str, Any]) -> Problems:
    url, token = values["http_url"], values["http_token_env"]
    if url is None:
        yield problem(f"{key}.http_url", None, "an address with kind http", f"Write {key}.http_url=http://localhost:8000/score.")
        return
    try:
        address = urlsplit(str(url))
        right = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        right = right and str(url).isascii() and str(url).isprintable() and " " not in str(url)
    except ValueError:
        address, right = None, False
    if not right:
        yield problem(f"{key}.http_url", url, "an address that begins with http:// or https://",
                      f"Write {key}.http_url=http://localhost:8000/score.")
    elif address is not None and (address.username or address.password):
        yield UserError(f"{key}.http_url", got="an address with a user or a password", expected="one without: configurations are "
                        "written to the run directory", stage="config",
                        remedy=f"Put a token into an environment variable and name that in {key}.http_token_env.")
    if token is not None and (not isinstance(token, str) or not _VARIABLE.fullmatch(token)):
        yield UserError(f"{key}.http_token_env", got="something else", expected="the name of an environment variable (never the "
                        "token itself: configurations are written to the run directory)", stage="config",
                        remedy=f"Write {key}.http_token_env=REWARD_TOKEN and export REWARD_TOKEN.")


def _environment(config: Config) -> Problems:
    tools = config.rollout.tools.environment
    if tools is None or tools == "python":
        yield problem("verify.kind", "environment", "another kind, unless rollout.tools.environment names a class that scores "
                      f"(it is {tools or 'null'}, which gives no score)", "Write rollout.tools.environment=my_module:MyClass.")
    if config.verify.terms:
        yield problem("verify.terms", sorted(config.verify.terms), "none beside kind environment, whose score is the whole reward",
                      "Add the terms up inside the environment.")


def _terms(config: Config) -> Problems:
    wrong, bounded = False, 0.0
    for name, term in config.verify.terms.items():
        key = f"verify.terms.{name}"
        found = list(_term(key, str(name), term))
        yield from found
        wrong = wrong or bool(found)
        if not found and not term.get("unbounded", False):
            bounded += abs(term["weight"])
    if not wrong and bounded >= 1:
        weights = {name: term["weight"] for name, term in config.verify.terms.items()}
        yield problem("verify.terms", weights, f"weights of bounded terms whose sizes add up to less than 1 (they add up to "
                      f"{bounded:g}): else a wrong response with good terms beats a right one",
                      "Make them smaller, or say unbounded: true of one that is meant to outweigh the verdict.")


def _term(key: str, name: str, term: Any) -> Problems:
    if not _TERM.fullmatch(name) or name == "verdict":
        yield problem(key, name, "letters, digits and _ (it names a metric), not verdict, which is verify.kind's own", "Rename it.")
    if not isinstance(term, Mapping):
        yield problem(key, term, "a group of keys such as {custom: my_rewards:brief, weight: 0.1}", "Write its keys.")
        return
    for unknown in [one for one in term if one not in TERM_KEYS]:
        close = nearest(str(unknown), TERM_KEYS)
        yield UserError(f"{key}.{unknown}", got="an unknown key", expected=f"one of {', '.join(TERM_KEYS)}", stage="config",
                        remedy=f"Write {close}." if close else "Leave it out.")
    weight = term.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < abs(weight) <= MAX_WEIGHT:
        yield problem(f"{key}.weight", weight, "a number other than 0, of a size that rewards can have",
                      "Write weight: 0.1 (negative for a penalty).")
    if not isinstance(term.get("unbounded", False), bool):
        yield problem(f"{key}.unbounded", term["unbounded"], "true or false", "Leave it out for a term from 0 to 1.")
    kind = term_kind(name, term)
    if kind not in TERM_KINDS:
        close = nearest(kind, TERM_KINDS)
        yield problem(f"{key}.kind", term.get("kind"), f"one of {', '.join(TERM_KINDS)}", f"Write kind: {close}." if close
                      else "Write kind: custom and custom: module:function.")
        return
    yield from _term_of_kind(key, kind, term)


def _term_of_kind(key: str, kind: str, term: Mapping[str, Any]) -> Problems:
    reads = {"custom": ("custom", "signature"), "http": HTTP_KEYS}.get(kind, ())
    for unread in [one for one in ("custom", "signature", *HTTP_KEYS) if one in term and one not in reads]:
        yield problem(f"{key}.{unread}", term[unread], f"nothing in a term of kind {kind}: nothing reads it", "Leave it out.")
    if kind == "custom":
        yield from _function(f"{key}.custom", term.get("custom"))
        signatures = CHOICES["verify.signature"]
        if term.get("signature", "akl") not in signatures:
            close = nearest(str(term["signature"]), signatures)
            yield problem(f"{key}.signature", term["signature"], f"one of {', '.join(signatures)}",
                          f"Write signature: {close}." if close else "Choose one of them.")
    if kind == "http":
        yield from _endpoint(key, {"http_url": term.get("http_url"), "http_token_env": term.get("http_token_env")})
        limit, retries = term.get("http_timeout_s", 1.0), term.get("http_retries", 0)
        if type(limit) not in (int, float) or not 0 < limit < math.inf:
            yield problem(f"{key}.http_timeout_s", limit, "a number above 0", "Leave it out for verify.http_timeout_s.")
        if type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
            yield problem(f"{key}.http_retries", retries, f"a whole number from 0 to {MAX_RETRIES}",
                          "Leave it out for verify.http_retries.")


def _endpoints(config: Config) -> dict[str, dict[str, Any]]:
    """Key -> settings of every endpoint; a term takes from ``verify`` what it does not say itself."""
    common = {key: getattr(config.verify, key) for key in HTTP_KEYS}
    found = {"verify": common} if "http" in verifiers(config) else {}
    for name, term in config.verify.terms.items():
        if isinstance(term, Mapping) and term_kind(str(name), term) == "http":
            found[f"verify.terms.{name}"] = common | {key: term[key] for key in HTTP_KEYS if key in term}
    return found


def _http_time(config: Config) -> Problems:
    """One judgement's limit holds every try of every endpoint it asks, with the pauses between them."""
    worst = 0.0
    for values in _endpoints(config).values():
        limit, retries = values["http_timeout_s"], values["http_retries"]
        if type(limit) not in (int, float) or type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
            return  # said of the term, or by the ranges
        worst += (retries + 1) * limit + sum(http_pauses(retries))
    if config.verify.timeout_s < worst:
        yield problem("verify.timeout_s", config.verify.timeout_s, f"at least {worst:g}: all tries of the HTTP rewards of one "
                      "judgement and the pauses between them (verify.http_timeout_s, verify.http_retries)",
                      f"Write verify.timeout_s={math.ceil(worst) + 1}, or lower the other two.")


def judges_code(config: Config) -> bool:
    """Whether any prompt or term is judged by running programs."""
    return "code" in kinds_of(config)
