"""Alerting rules for a server, from the rule book."""

from __future__ import annotations

from ridgeline.config.tools import AlertsOptions
from ridgeline.diagnose import AlertRules, alert_rules
from ridgeline.records import Slo


def write_alerts(options: AlertsOptions) -> AlertRules:
    """The rules that the server's metrics and the SLO allow. Raises BadInput for a wrong SLO."""
    slo = None if options.slo is None else Slo.parse(options.slo)
    return alert_rules(options.server, slo)
