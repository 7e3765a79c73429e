"""Operation as files: alert rules with their tests, dashboards, and deployment artefacts."""
