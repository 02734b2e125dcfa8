"""The OpenAI HTTP adapter: a ZeroMQ client of the router; text and templates exist only here."""
