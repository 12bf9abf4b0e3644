"""`python -m pdserve.worker --fd N`."""

import sys

from pdserve.worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
