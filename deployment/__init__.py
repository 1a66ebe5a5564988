"""Composition root of loray: configuration, plan, actors and the command line."""
