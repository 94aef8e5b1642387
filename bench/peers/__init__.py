"""Headrace beside the other servers that run the same model on a CPU: `python -m bench peers`."""
