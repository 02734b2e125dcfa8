"""`python -m tests.cuda.fake MODULE [ARGUMENTS]`: a module where processes see a fake card whose kernels are not run."""

import os
import sys

from tests.cuda.fake import environ

if __name__ == "__main__":
    if len(sys.argv) < 2 or (reason := environ.missing()):
        sys.exit(__doc__ if len(sys.argv) < 2 else f"no fake card: {reason}")
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], os.environ | environ.variables(run=False))
