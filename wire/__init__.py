"""What two processes must agree on: messages, codec, sockets, arena, settings, model metadata. It decides nothing."""
