"""Experiments that teach: a technique after another on one model, each measured."""
