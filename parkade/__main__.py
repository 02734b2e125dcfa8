"""`python -m parkade` is the same as the command `parkade`."""

from parkade.cli import main

if __name__ == "__main__":
    main()
