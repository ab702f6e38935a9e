"""Whether a gold can be judged, by the verifier that will judge against it. Golds are asked for this when data is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable

from akl_dist.verify import math

InvalidGold = Callable[[str], str]
"""Why a gold cannot be used, or "" if it can."""


def invalid_gold(kind: str) -> InvalidGold:
    """The check of one kind of verifier. What custom, http and environment make of a gold nobody else knows: they have none."""
    return {"math": math.invalid_gold, "code": invalid_tests}.get(kind, lambda gold: "")


def invalid_tests(gold: str) -> str:
    """Why a code task's tests cannot judge any program: no task, no tests, not Python, or without a call of the program."""
    from akl_dist.verify.code import CodeTask, make_plan
    from akl_dist.verify.code_tests import BadTests

    try:
        values = json.loads(gold)
        make_plan(CodeTask(values["prompt_style"], "", values["tests"]), "")
    except BadTests as error:
        return str(error)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"no task ({type(error).__name__})"
    return ""
