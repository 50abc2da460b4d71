"""`python -m lapcli` is `lapcli`."""

from lapcli.cli.app import main

if __name__ == "__main__":
    main()
