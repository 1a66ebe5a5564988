"""One module a command of `python -m deployment`; each has `run(arguments) -> exit status`."""
