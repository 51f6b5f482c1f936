"""One module for each model family."""
