"""From a run's records to what bounds it and what would mend it. No torch, no clock."""

from ridgeline.diagnose.facts import engine_facts, facts_of
from ridgeline.diagnose.roofline import (
    Ceilings,
    Point,
    Shares,
    StepCost,
    WorkOf,
    attribute,
    place,
)
from ridgeline.diagnose.rules import Advice, Rule, advise
from ridgeline.diagnose.verdict import Bound, Finding, verdict, verdict_of_point

__all__ = [
    "Advice",
    "Bound",
    "Ceilings",
    "Finding",
    "Point",
    "Rule",
    "Shares",
    "StepCost",
    "WorkOf",
    "advise",
    "attribute",
    "engine_facts",
    "facts_of",
    "place",
    "verdict",
    "verdict_of_point",
]
