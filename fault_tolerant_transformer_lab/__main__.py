"""`python -m fault_tolerant_transformer_lab` is the `fttl` command."""
import sys

from fault_tolerant_transformer_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
