"""Adapters of a deployment: where they come from, whether they fit, and which worker holds which."""
