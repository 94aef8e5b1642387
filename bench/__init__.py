"""Measurements of the service on the machine they run on: `python -m bench`. Records are in bench/results."""
