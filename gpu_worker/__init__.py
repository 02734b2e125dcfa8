"""One device, one loop: runs sequences, parks and resumes them."""
