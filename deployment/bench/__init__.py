"""Measurements of the parts that a request waits for. JSON figures, beside a plain version in the same run."""
