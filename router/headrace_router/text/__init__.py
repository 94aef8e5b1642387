"""Text: templates, tokenizing, detokenizing, stop strings."""
