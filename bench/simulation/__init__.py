"""Scheduling policies under a virtual clock: what a step costs, who decides, and what requests see of it."""
