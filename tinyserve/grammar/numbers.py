"""What a schema says in numbers, made into what the grammar library holds exactly, or refused by its name.

The library reads every number as a double and writes a range as a pattern of digits: a bound beyond 2**53 was rounded,
one beyond 2**63 became 2**63 - 1, and an open bound like the 0 of (0, 0.5) was let in. A range is made a little
narrower here where that cannot be noticed (in the 15th digit, or at its far end behind 2**63); where it could, it is
refused.

Names of an object are counted as they are written, so one that is written twice is counted twice: `minProperties` is
held only where no name can be.

Before: errors.py.  After: schema.py, which hands over one part of a schema after the other.
"""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from typing import Any

from attrs import evolve, frozen

from ..errors import shown

EXACT = 2**53  # doubles hold every whole number up to here
LARGEST = 2**63 - 1  # the library counts with 64 bits
SMALLEST = -(2**63) + 1024  # the double behind it; the smallest one holds a thread for ever
FAR = Decimal("9.2e18")  # the same for numbers with a fraction
DIGITS, PLACES = 14, 22  # of a bound with a fraction; the library is exact up to there
MOST, MOST_NEEDED = 2**31 - 1, 10**7  # what the library counts to; no answer is longer
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_WIDE = decimal.Context(prec=400)
_INWARD = {
    sign: decimal.Context(prec=DIGITS, rounding=rounding)
    for sign, rounding in ((1, decimal.ROUND_CEILING), (-1, decimal.ROUND_FLOOR))
}
Schema = dict[str, Any]


class Wrong(ValueError):
    """What is wrong, without the name of the field."""


@frozen
class _Bound:
    """One end of a range. sign: 1 for the lower one.   name: the keyword.   said: its value as it was sent."""

    value: Decimal
    open: bool
    sign: int
    name: str
    said: Any

    def refused(self, why: str) -> Wrong:
        return Wrong(f"{self.name} {shown(self.said)}: {why}")


def settle(part: Schema) -> None:
    """Change one schema, without those inside it, to what is held exactly. Raises: Wrong."""
    for name in ("const", "enum"):
        if name in part:
            part[name] = _exact(part[name], name)
    for name in _COUNTS:
        if name in part:
            _count(part, name)
    _check_names(part)
    if "multipleOf" in part:
        _check_multiple(part["multipleOf"])
    _range(part)


def _number(value: Any) -> Decimal | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    return Decimal(repr(value)) if isinstance(value, float) and math.isfinite(value) else None


def _exact(value: Any, name: str) -> Any:
    """A constant whose numbers an answer repeats. Floats from 2**63 on may have lost digits before they came here."""
    if isinstance(value, dict):
        return {key: _exact(inner, name) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner, name) for inner in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if not _is_exact(value):
        raise Wrong(
            f"{name} holds {shown(value)}, which cannot be written exactly: whole numbers beyond 2**53 are held if "
            "they are doubles, none from 2**63 on is; others have 15 digits, and 22 places, for sure. Make it a text"
        )
    return int(value) if value == int(value) else value


def _is_exact(value: int | float) -> bool:
    """Whether the library keeps this number."""
    if isinstance(value, int):
        return abs(value) <= EXACT or value == LARGEST or (SMALLEST <= value < LARGEST and int(float(value)) == value)
    if not (math.isfinite(value) and abs(value) < LARGEST):
        return False
    return value == int(value) or _as_read(value) == value


def _as_read(value: float) -> float:
    """What the library reads, which divides the digits by a power of ten: two roundings."""
    sign, digits, places = Decimal(repr(value)).as_tuple()
    read = int("".join(map(str, digits))) / float(f"1e{-places}")
    return -read if sign else read


def _count(part: Schema, name: str) -> None:
    value = part[name]
    number = _number(value)
    if number is None or number < 0 or number != int(number):
        raise Wrong(f"{name} must be a whole number from 0 on, is {shown(value)}")
    part[name] = int(number)
    if name.startswith("max") and number > MOST:
        del part[name]  # no answer is as long
    elif name.startswith("min") and number > MOST_NEEDED:
        raise Wrong(f"{name} is {shown(value)}; no answer is so long, at most {MOST_NEEDED} can be asked for")


def _check_names(part: Schema) -> None:
    """Refuse to count names of which one may come twice: all but the required ones, and the first behind them."""
    least = part.get("minProperties", 0)
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        return
    required = part.get("required")
    sure = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if least > sure + 1:
        raise Wrong(
            f"minProperties {least}: names that are not listed may come twice, so they are not counted here. List all "
            "in 'properties' and set additionalProperties to false, or ask for an array of pairs"
        )


def _check_multiple(value: Any) -> None:
    number = _number(value)
    if number is None or number <= 0:
        raise Wrong(f"multipleOf must be a number above 0, is {shown(value)}")
    _, digits, places = number.normalize(_WIDE).as_tuple()
    if number > EXACT or len(digits) > DIGITS or places < -PLACES:
        raise Wrong(f"multipleOf {shown(value)} has too many digits to be followed; use a smaller one, or leave it out")


# ---- ranges


def _range(part: Schema) -> None:
    types = part.get("type")
    of = {types} if isinstance(types, str) else {each for each in types or () if isinstance(each, str)}
    if types and not of & {"number", "integer"}:
        return
    whole = "integer" in of and "number" not in of
    ends = [bound for side in _SIDES if (bound := _end(part, *side)) is not None]
    if not ends:
        return
    held = [(_whole if whole else _fraction)(bound, _other(ends, bound)) for bound in ends]
    if not whole:
        held = [_shut(bound) for bound in held]
    if len(held) == 2 and (held[0].value, any(bound.open for bound in held)) > (held[1].value, False):
        low, high = ends
        raise Wrong(
            f"no {'whole number' if whole else 'number of 14 digits'} lies between {low.name} {shown(low.said)} and "
            f"{high.name} {shown(high.said)}"
        )
    for closed, opened, _ in _SIDES:
        part.pop(closed, None), part.pop(opened, None)
    for bound in held:
        closed, opened, _ = next(side for side in _SIDES if side[2] == bound.sign)
        part[opened if bound.open else closed] = _written(bound.value)


def _other(ends: list[_Bound], bound: _Bound) -> _Bound | None:
    return next((each for each in ends if each.sign != bound.sign), None)


def _written(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)


def _end(part: Schema, closed: str, opened: str, sign: int) -> _Bound | None:
    """The tighter one of a closed and an open bound; draft 4 says with true that the closed one is open."""
    if isinstance(part.get(opened), bool) and part.pop(opened) and closed in part:
        part[opened] = part.pop(closed)
    found = []
    for name in (opened, closed):
        if name in part:
            number = _number(part[name])
            if number is None:
                raise Wrong(f"{name} must be a number, is {shown(part[name])}")
            found.append(_Bound(number, name == opened, sign, name, part[name]))
    return max(found, key=lambda bound: bound.value * sign, default=None)


def _is_far(bound: _Bound, other: _Bound | None) -> bool:
    """Whether moving this bound to the last number that is held leaves nearly all numbers of its range."""
    return bound.sign * bound.value < 0 and (other is None or bound.sign * other.value >= -EXACT)


def _whole(bound: _Bound, other: _Bound | None) -> _Bound:
    """A bound of whole numbers: closed, and exact."""
    rounding = decimal.ROUND_CEILING if bound.sign > 0 else decimal.ROUND_FLOOR
    value = int(bound.value.to_integral_value(rounding, _WIDE))
    if bound.open and value == bound.value:
        value += bound.sign
    if not _is_exact(value) and _is_far(bound, other):
        value = _inward(value, bound.sign)
    if not _is_exact(value):
        raise bound.refused(
            "it is not held exactly: whole numbers beyond 2**53 are if they are doubles, none from 2**63 on is. Ask "
            "for a text with a pattern"
        )
    return evolve(bound, value=Decimal(value), open=False)


def _inward(value: int, sign: int) -> int:
    """The next whole number that is held: upwards for a lower bound, whose sign is 1."""
    last = SMALLEST if sign > 0 else LARGEST
    if value * sign <= last * sign:
        return last
    near = float(value)
    return int(near if near * sign >= value * sign and near < LARGEST else math.nextafter(near, math.inf * sign))


def _fraction(bound: _Bound, other: _Bound | None) -> _Bound:
    """A bound of any numbers, moved inwards where it has more digits than are held."""
    if bound.value * bound.sign <= -FAR and _is_far(bound, other):
        return evolve(bound, value=-FAR * bound.sign, open=False)
    if abs(bound.value) > FAR:
        raise bound.refused("numbers from 9.2e18 on are not held exactly. Ask for a text with a pattern")
    inward = _INWARD[bound.sign]
    value = inward.plus(bound.value)
    if value.as_tuple().exponent < -PLACES:
        value = value.quantize(Decimal(1).scaleb(-PLACES), inward.rounding, _WIDE)
    return bound if value == bound.value else evolve(bound, value=value, open=False)


def _shut(bound: _Bound) -> _Bound:
    """An open bound that is a whole number, moved inwards by its last digit.

    The library lets it in if the other bound is less than 1 away; and that one may stand in another part of `allOf`.
    """
    if not bound.open or bound.value != int(bound.value) or bound.value.adjusted() >= DIGITS - 1:
        return bound
    last = -PLACES if bound.value == 0 else bound.value.adjusted() - DIGITS + 1
    return evolve(bound, value=_WIDE.add(bound.value, bound.sign * Decimal(1).scaleb(last)), open=False)
