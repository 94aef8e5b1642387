"""The HTTP surface: JSON into `GenerateRequest`, tokens into each API's shapes. No policy."""
