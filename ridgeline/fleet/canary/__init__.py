"""A new version next to the old one: compared, given traffic, promoted or rolled back."""
