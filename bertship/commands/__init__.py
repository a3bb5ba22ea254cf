"""What each command of `bertship` does, a module for each part of the line."""
