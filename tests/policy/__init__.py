"""Stories about the policy: events in, actions out, virtual time."""
