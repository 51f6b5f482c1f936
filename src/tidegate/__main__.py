"""`python -m tidegate` is the same program as `tidegate`."""

from tidegate.cli.main import main

if __name__ == "__main__":
    main()
