"""`python -m ssmd`: the same as the command `ssmd`."""

from ssmd.cli import main

if __name__ == "__main__":
    main()
