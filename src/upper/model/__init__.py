"""Words: the values and messages that every other room speaks in. No bytes, no rules."""
