"""`python -m dartrl`: how the supervisor starts a role."""

from dartrl.cli import main

if __name__ == "__main__":
    main()
