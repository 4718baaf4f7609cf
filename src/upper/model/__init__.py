"""Values and messages that all other packages use. No bytes, no rules."""
