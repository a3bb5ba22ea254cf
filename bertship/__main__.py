"""`python -m bertship` is the command line."""

from bertship.cli import main

main()
