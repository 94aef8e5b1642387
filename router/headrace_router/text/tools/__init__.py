"""How models write tool calls, each format as a state machine that reads one character after the other."""
