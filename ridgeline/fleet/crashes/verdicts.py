"""Whether a server whose connection broke has crashed, and which requests it ran then.

    a connection breaks ─▶ incident ─┬▶ the same process answers ─▶ no crash
                                     ├▶ another process answers  ─▶ crash
                                     ├▶ its port is closed       ─▶ crash, for all that is known
                                     └▶ silent for VERDICT_S     ─▶ crash, for all that is known

What is a crash for all that is known is taken back when the same process answers later. A process
is known by the id in the `x-ridgeline-instance` header of its probes. Other servers have none: if
they answer the first probe after the break, they did not crash.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from ridgeline.fleet.crashes.blame import Blame, Death

VERDICT_S = 10.0


class ServerTurn(msgspec.Struct, eq=False):
    """A request on a server. `incident`: the break of a connection during it, if there was one."""

    request: bytes
    server: int
    began_s: float
    incident: Incident | None = None


class Incident(msgspec.Struct, eq=False):
    """A broken connection to a server, and the turns that were in flight on it."""

    server: int
    at_s: float
    turns: list[ServerTurn]
    death: Death | None = None
    is_over: bool = False


class Verdicts:
    """Watches the turns of every server, and tells `blame` of the crashes. Instants in seconds."""

    def __init__(self, blame: Blame) -> None:
        self.blame = blame
        self._turns: dict[int, dict[ServerTurn, None]] = {}
        self._incidents: dict[int, Incident] = {}
        self._instances: dict[int, bytes | None] = {}
        self._num_crashes = self._num_cuts = 0

    def metrics(self) -> Iterable[Metric]:
        """The series of a scrape."""
        broken = CounterMetricFamily(
            "ridgeline_fleet_broken",
            "Backends whose connections broke, by whether their process had ended.",
            labels=["kind"],
        )
        broken.add_metric(["crash"], self._num_crashes)
        broken.add_metric(["cut"], self._num_cuts)
        yield broken

    def begin(self, request: bytes, server: int, now_s: float) -> ServerTurn:
        """A request is sent to a server."""
        turn = ServerTurn(request, server, now_s)
        self._turns.setdefault(server, {})[turn] = None
        return turn

    def end(self, turn: ServerTurn, now_s: float, *, is_answered: bool) -> None:
        """The turn is over; `is_answered`: the server has answered to the end, and survived."""
        turns = self._turns[turn.server]
        del turns[turn]
        if not turns:
            del self._turns[turn.server]
        if is_answered:
            self.blame.clear(turn.request, now_s)
            if turn.incident is not None:  # the process lives: only connections were cut
                self._dismiss(turn.incident, now_s)

    def note_broken(self, turn: ServerTurn, now_s: float, *, is_stopping: bool) -> None:
        """The turn's connection broke. `is_stopping`: the server had said that it would end."""
        if turn.incident is not None or is_stopping:
            return
        incident = self._incidents.get(turn.server)
        if incident is not None and not incident.is_over and incident.death is None:
            turn.incident = incident
            incident.turns.append(turn)
            return
        at_risk = list(self._turns[turn.server])
        self._incidents[turn.server] = incident = Incident(turn.server, now_s, at_risk)
        for other in at_risk:
            other.incident = incident

    def note_instance(self, server: int, instance: bytes | None, now_s: float) -> None:
        """A process answers at the server's address."""
        known, incident = self._instances.get(server), self._incidents.pop(server, None)
        self._instances[server] = instance
        self.blame.note_servers(len(self._instances), now_s)
        if incident is None:
            return
        if (instance is not None and instance == known) or (
            instance is None and incident.death is None
        ):
            self._dismiss(incident, now_s)
        elif incident.death is None:
            self._judge(incident, now_s)

    def note_refused(self, server: int, now_s: float) -> None:
        """Nothing listens at the server's address."""
        incident = self._incidents.get(server)
        if incident is not None and incident.death is None:
            self._judge(incident, now_s)

    def forget(self, server: int) -> None:
        """The server has left the fleet."""
        self._instances.pop(server, None)
        self._incidents.pop(server, None)

    def is_awaited(self, request: bytes, now_s: float) -> bool:
        """Whether open incidents, if they were crashes, would make the request their cause."""
        num_open = 0
        for incident in list(self._incidents.values()):
            if incident.death is not None or incident.is_over:
                continue
            if now_s >= incident.at_s + VERDICT_S:
                self._judge(incident, now_s)
            elif any(turn.request == request for turn in incident.turns):
                num_open += 1
        return num_open > 0 and self.blame.would_condemn(request, num_open, now_s)

    def _judge(self, incident: Incident, now_s: float) -> None:
        lived_s: dict[bytes, float] = {}
        for turn in incident.turns:
            seconds = max(0.0, incident.at_s - turn.began_s)
            lived_s[turn.request] = max(seconds, lived_s.get(turn.request, 0.0))
        self._num_crashes += 1
        incident.death = self.blame.note_death(lived_s, now_s)

    def _dismiss(self, incident: Incident, now_s: float) -> None:
        self._num_cuts += 1
        if incident.death is not None:
            self.blame.retract(incident.death, now_s)
        incident.is_over, incident.death = True, None
        for turn in incident.turns:
            turn.incident = None
        if self._incidents.get(incident.server) is incident:
            del self._incidents[incident.server]
