"""How likely a request is to be what crashes servers.

Two explanations compete for every crash: the servers fail by themselves, at the rate at which those
fail that the request is not on, and at a higher one after each crash during it; or the request
crashes each server that it is sent to. A crash during a request, `t` seconds after it was sent, has
by chance the probability

    p = 1 - exp(-rate * t), at least MIN_CHANCE

and `k` of them, with x = sum of log(1 / p), together e^-x * (sum of x^j / j! for j < k): Fisher's
method. The evidence against the request is -log of that, in nats. A request is condemned when its
evidence reaches CONDEMNED, and no request that was on the same servers explains its crashes as
well. In a quiet fleet that takes three crashes of a request that crashes servers at once, up to
nine of one that takes seconds; where servers fail all the time, it takes many: a request that only
happened to be there is spared. The rate is that of now, also for crashes before: the first ones of
a bad hour look like the request's doing until others follow.

Evidence halves in HALF_LIFE_S, so that a condemned request is tried again. It falls with every
answer that the request, or an equal one, gets to its end.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

HALF_LIFE_S = 1800.0
CONDEMNED = 16.0  # nats: ten million to one
SUSPECT = 3.0
STRONG = 9.0
MIN_CHANCE = 0.0005
_LONG_S, _SHORT_S = 600.0, 30.0  # half lives of the two rates
_PRIOR_S = 60.0  # server seconds in which one crash is assumed
_SHORT_PRIOR_S = 10.0
_ANSWERED = 4.6  # nats in favour: a request that crashes servers is answered once in 100 times
_OUTLIVED = 3.0
_MAX_RIVALS = 0.1
_MAX_REQUESTS = 4096
_MAX_DEATHS = 64


class Death(msgspec.Struct, eq=False):
    """A crash of a server: when, and for how long each request had been on it."""

    at_s: float
    lived_s: Mapping[bytes, float]


class _Record(msgspec.Struct):
    """The crashes during a request, and the evidence in its favour, in nats at `at_s`."""

    at_s: float
    credit: float = 0.0
    deaths: list[Death] = msgspec.field(default_factory=list)


class _Rate:
    """Crashes per second of a server, over about `half_life_s`."""

    def __init__(self, half_life_s: float, prior_deaths: float, prior_s: float) -> None:
        self._half_life_s, self._prior_deaths, self._prior_s = half_life_s, prior_deaths, prior_s
        self._at_s, self._deaths, self._server_s = -math.inf, 0.0, 0.0

    def advance(self, num_servers: int, now_s: float) -> None:
        if self._at_s == -math.inf:
            self._at_s = now_s
        kept = _kept(now_s - self._at_s, self._half_life_s)
        mean_s = self._half_life_s / math.log(2)
        self._deaths *= kept
        self._server_s = self._server_s * kept + num_servers * mean_s * (1 - kept)
        self._at_s = max(now_s, self._at_s)

    def add(self, count: int) -> None:
        self._deaths = max(0.0, self._deaths + count)

    def without(self, request: bytes, deaths: Sequence[Death]) -> tuple[float, float]:
        """The rate without the crashes during a request and the time before them, and by how much
        one more crash would raise it."""
        own = own_s = 0.0
        for death in deaths:
            kept = _kept(self._at_s - death.at_s, self._half_life_s)
            own += kept
            own_s += kept * death.lived_s[request]
        others = max(0.0, self._deaths - own)
        most = others + self._prior_deaths + 2 * math.sqrt(others)  # few are a poor estimate
        return most / self._exposed_s(own_s), 1 / self._exposed_s(own_s)

    def _exposed_s(self, own_s: float) -> float:
        return max(0.0, self._server_s - own_s) + self._prior_s


class Blame:
    """Evidence against requests, by their digests. Instants in seconds."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        self._rates = (
            _Rate(_LONG_S, 1.0, _PRIOR_S),
            _Rate(_SHORT_S, 0.0, _SHORT_PRIOR_S),
        )
        self._num_servers = 1

    def note_servers(self, num_servers: int, now_s: float) -> None:
        """The fleet has that many servers."""
        self._advance(now_s)
        self._num_servers = max(1, num_servers)

    def note_death(self, lived_s: Mapping[bytes, float], now_s: float) -> Death:
        """A server crashed; `lived_s`: for how long each request had been on it."""
        self._advance(now_s)
        death = Death(now_s, lived_s)
        for request in lived_s:
            record = self._record(request, now_s)
            record.deaths = [*record.deaths[-_MAX_DEATHS + 1 :], death]
        for rate in self._rates:
            rate.add(1)
        return death

    def retract(self, death: Death, now_s: float) -> None:
        """The server had not crashed."""
        self._advance(now_s)
        for rate in self._rates:
            rate.add(-1)
        for request in death.lived_s:
            record = self._records.get(request)
            if record is not None and death in record.deaths:
                record.deaths.remove(death)
                self._drop_if_clear(request, now_s)

    def clear(self, request: bytes, now_s: float) -> None:
        """The request, or an equal one, was answered to its end."""
        self._credit(request, _ANSWERED, now_s)

    def note_outlived(self, request: bytes, now_s: float) -> None:
        """The request runs, and has run for much longer than before any crash."""
        self._credit(request, _OUTLIVED, now_s)

    def evidence(self, request: bytes, now_s: float) -> float:
        """Against the request, in nats."""
        record = self._records.get(request)
        if record is None:
            return 0.0
        self._advance(now_s)
        kept = [_kept(now_s - death.at_s) for death in record.deaths]
        x = sum(map(operator.mul, self._nats(request, record), kept))
        against = _fisher(x, math.ceil(sum(kept)))
        return max(0.0, against - record.credit * _kept(now_s - record.at_s))

    def longest_s(self, request: bytes) -> float:
        """The longest that the request was on a server before that crashed."""
        record = self._records.get(request)
        if record is None:
            return 0.0
        return max((death.lived_s[request] for death in record.deaths), default=0.0)

    def is_condemned(self, request: bytes, now_s: float) -> bool:
        """Whether the request is the cause of crashes, beyond doubt."""
        if self.evidence(request, now_s) < CONDEMNED:
            return False
        return self._rivals(request) <= _MAX_RIVALS

    def would_condemn(self, request: bytes, num_deaths: int, now_s: float) -> bool:
        """Whether that many more quick crashes would be enough evidence."""
        record = self._records.get(request)
        known = [] if record is None else self._nats(request, record)
        x = sum(known) + num_deaths * math.log(1 / MIN_CHANCE)
        return _fisher(x, len(known) + num_deaths) >= CONDEMNED

    def _nats(self, request: bytes, record: _Record) -> list[float]:
        """The evidence of each crash during the request."""
        (long, added), (short, _) = [r.without(request, record.deaths) for r in self._rates]
        per_s = [max(long + added * number, short) for number in range(len(record.deaths))]
        lived_s = [death.lived_s[request] for death in record.deaths]
        chances = [-math.expm1(-rate * t) for rate, t in zip(per_s, lived_s, strict=True)]
        return [-math.log(max(MIN_CHANCE, chance)) for chance in chances]

    def _rivals(self, request: bytes) -> float:
        """How much likelier it is that one of the requests on the same servers was the cause."""
        record = self._records[request]
        nats, odds = self._nats(request, record), 0.0
        for rival in {other for death in record.deaths for other in death.lived_s} - {request}:
            own = self._records.get(rival)
            if own is not None:
                deaths = zip(nats, record.deaths, strict=True)
                unexplained = sum(n for n, death in deaths if rival not in death.lived_s)
                odds += math.exp(-unexplained - own.credit)
        return odds

    def _credit(self, request: bytes, credit: float, now_s: float) -> None:
        if request in self._records:
            self._record(request, now_s).credit += credit
            self._drop_if_clear(request, now_s)

    def _record(self, request: bytes, now_s: float) -> _Record:
        record = self._records.setdefault(request, _Record(now_s))
        self._records.move_to_end(request)
        record.credit *= _kept(now_s - record.at_s)
        record.at_s = now_s
        while len(self._records) > _MAX_REQUESTS:
            self._records.popitem(last=False)
        return record

    def _drop_if_clear(self, request: bytes, now_s: float) -> None:
        if self.evidence(request, now_s) <= 0.01:
            del self._records[request]

    def _advance(self, now_s: float) -> None:
        for rate in self._rates:
            rate.advance(self._num_servers, now_s)


def _fisher(x: float, count: int) -> float:
    """Minus the logarithm of the probability that `count` numbers, each -log of a uniform one, add
    up to `x` or more."""
    term = total = 1.0
    for j in range(1, count):
        term *= x / j
        total += term
    return x - math.log(total)


def _kept(seconds: float, half_life_s: float = HALF_LIFE_S) -> float:
    """The share that is left after that time."""
    return float(0.5 ** (max(0.0, seconds) / half_life_s))
