"""``python -m pannier.cli`` is the ``pannier`` command."""

from pannier.cli.main import main

if __name__ == "__main__":
    main()
