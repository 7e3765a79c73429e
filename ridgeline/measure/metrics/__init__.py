"""Metrics: pure functions over a RunTrace. Definitions: docs/concepts/measurements.md."""
