"""Units, currencies, percent signs and words of scale behind (or before) a value. Standard library only."""

from __future__ import annotations

import re

_SHORT = (
    r"(?:(?:[ckm]?m|ft|mi)/(?:sec|s|hr|h|min)|[cmk]?m|[mk]?g|m?[lL]|ft|in|mi|yd|lbs?|oz|hrs?|min|secs?|ms|mph|kph|[kK]?Hz|[kK]?[JWVN]|Pa|units?|USD|am|pm|rad|deg|mol|days?|cups?"
    r"|sq\.? (?:units?|[cmk]?m|ft|in|mi|yd)"
    r"|(?<=[\s\d])[ap]\.m\.?|(?<=\s)[AP]\.?M\.?)"
)
_UNIT = re.compile(  # a text wrapper, a short unit of the list, or a plain word of four letters after a space
    r"(?P<body>.*?(?:[\d)}]|\\pi(?=\s*\\text|\s+[A-Za-z]{2})))\s*(?P<unit>\\text\{[^{}]*\}|"
    + _SHORT
    + r"|(?<=\s)[A-Za-z]{4,}[A-Za-z ]*|°\s*(?:\\text\{\s*[CFK]\s*\}|[CFK])?|[€£¥₹¢\x03])(?P<power>\^\s*\{?[23]\}?)?",
    re.DOTALL,
)
_CURRENCY = {"€": "euro", "£": "pound", "¥": "yen", "\x03": "dollar", "¢": "cent", "₹": "rupee"}
_MODULUS = re.compile(r"(.*\S)\s*\\pmod\s*(?:\{([^{}]+)\}|(\w))", re.DOTALL)
_NOT_UNITS = re.compile(r"(?:sin|cos|tan|log|exp)[a-z]?\b|sqrt|choose|infty")
_NO_UNIT = re.compile(
    r";|(?<!\^)\d(?!\d*-[a-z])|\b(?:not|is|are|does|if|when|at (?:most|least)|squared|cubed|factorial|minus|plus|halves"
    r"|(?:third|fourth|fifth|sixth|seventh|eighth|ninth)s|(?:doubl|tripl|halv|divid|multipli|increas|decreas)ed|tens|negative$"
    r"|remainder|choose|binary|mod(?:ulo)?|to|unless|else|otherwise|maybe|perhaps|possibly|never|without|(?:quadr|quint)illions?"
    r"|(?:(?:four|six|seven|eight|nine)(?:teen|ty)?|(?:thir|fif)(?:teen|ty)|one|two|three|five|ten|eleven|twelve|twenty|forty)(?!-))\b"
)  # words that change the value, or say something else of it
_SCALES = {
    "tenth": "10^{-1}", "hundredth": "10^{-2}", "thousandth": "10^{-3}", "millionth": "10^{-6}", "dozen": "12", "hundred": "10^{2}",
    "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}", "trillion": "10^{12}",
}  # fmt: skip
_NAMES = {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "ft": "foot", "feet": "foot", "in": "inch",
    "inches": "inch", "mi": "mile", "yd": "yard", "g": "gram", "mg": "milligram", "kg": "kilogram", "lb": "pound", "lbs": "pound",
    "oz": "ounce", "ml": "milliliter", "l": "liter", "hr": "hour", "hrs": "hour", "min": "minute", "sec": "second",
    "secs": "second",
    "mile per hour": "mph", "miles/hour": "mph", "mile/hour": "mph", "mi/hr": "mph", "mi/h": "mph",
    "kilometer per hour": "kph", "km/h": "kph", "km/hr": "kph",
    "meter per second": "m/s", "m/sec": "m/s", "foot per second": "ft/s", "feet per second": "ft/s", "ft/sec": "ft/s",
    "deg": "°", "degree": "°", "cents": "cent", "usd": "dollar", "sq": "square",
}  # fmt: skip


def split_unit(text: str) -> tuple[str, str]:
    """(body, unit): a percent sign, currency, degree sign, modulus or trailing unit words; unit "" where there is none.

    Spellings of one unit (cm, centimetres) get one name. A word of scale is no unit: "3 million dollars" is 3 times 10^6 dollars.
    """
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    sign = re.match(r"(-?)\s*(?:\{|US\s*)?(\x03|€|£|¥|₹|USD(?=\s*\d))(?:\}|\s)*", text)
    if sign:
        body, unit = split_unit(sign[1] + text[sign.end() :])
        symbol = _CURRENCY.get(sign[2], "dollar")
        return body, symbol if unit in ("", symbol) else f"{symbol} {unit}"
    modulus = _MODULUS.fullmatch(text)
    if modulus:
        return modulus[1], f"mod {(modulus[2] or modulus[3]).strip()}"
    match = _UNIT.fullmatch(text)
    if match is None or _NOT_UNITS.match(match["unit"]):
        return text, ""
    words = " ".join(re.sub(r"\\text|[{}]", " ", match["unit"]).replace(".", "").casefold().split())
    if _NO_UNIT.search(words):
        return text, ""
    body, words = _scaled(match["body"].strip(), words.replace("° ", "°"))
    power = re.match(r"(square|sq|cubic) (.*)", words)
    if match["power"]:
        return body, f"{_named(words)}^{re.sub(r'[^23]', '', match['power'])}"
    return body, f"{_named(power[2])}^{3 if power[1] == 'cubic' else 2}" if power else _named(words)


def _scaled(body: str, words: str) -> tuple[str, str]:
    """The body times its words of scale, and the other words."""
    kept = []
    for word in words.split():
        scale = _SCALES.get(word.removesuffix("s"))
        kept += [] if scale else [word]
        body = f"({body})\\cdot {scale}" if scale else body
    return body, " ".join(kept).removeprefix("of ")


def _named(unit: str) -> str:
    """One name for the spellings of a unit."""
    unit = _CURRENCY.get(unit, unit).replace("metre", "meter").replace("litre", "liter")
    unit = _NAMES.get(unit, unit)
    unit = unit[:-1] if len(unit) > 3 and unit.endswith("s") and not unit.endswith("ss") else unit
    unit = re.sub(r"s(?= per )", "", unit)
    return _NAMES.get(unit, unit)
