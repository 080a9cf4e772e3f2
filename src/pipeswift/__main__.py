"""`python -m pipeswift`, the same as the `pipeswift` command."""

from pipeswift.cli import command

if __name__ == "__main__":
    command()
