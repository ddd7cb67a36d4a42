"""`python -m lorikeet_cli`."""

from lorikeet_cli.app import main

if __name__ == "__main__":
    main()
