"""`python -m deployment`."""

from deployment.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
