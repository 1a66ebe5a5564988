"""Models and adapters that loray can make by itself, so that trying it needs no model hub.

`python -m deployment.assets` builds them; tests, recipes and the README use what it leaves behind.
Importing this package imports nothing heavy: torch comes in with the module that needs it.
"""
