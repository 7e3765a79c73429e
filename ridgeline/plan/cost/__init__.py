"""Prices of API providers and of rented or owned devices."""
