"""Composition root: configuration, plan, Ray cluster, supervision, command line."""
