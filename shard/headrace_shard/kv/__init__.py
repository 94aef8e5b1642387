"""Paged KV memory: blocks of tokens, and how many of them there are."""
