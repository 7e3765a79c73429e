"""The drafters, one file per method."""
