"""The nemesis: kills, stops, restarts, denies and corrupts under load, writes down what clients saw, and checks it."""
