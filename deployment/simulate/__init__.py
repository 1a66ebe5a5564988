"""A trace through a fleet in virtual time: the router core, or another policy, and model engines."""
