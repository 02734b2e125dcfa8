"""Training of what ships in wire/models: the tiny hybrid `bard`, and the head that drafts for SmolLM2."""
