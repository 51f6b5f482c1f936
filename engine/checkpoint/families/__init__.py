"""What each model family's configuration holds, and how it is read from config.json."""
