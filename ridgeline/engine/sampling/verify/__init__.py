"""Verification of draft tokens: which of them the target model accepts."""
