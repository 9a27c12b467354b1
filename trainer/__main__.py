"""``python -m trainer`` and ``torchrun -m trainer -- …``.

The two dashes are for torchrun, which (in argparse of Python 3.11 to 3.13) looks for its own options to the
right of the module's name too, and takes ``--run`` for a short form of its ``--run-path``.
"""

from __future__ import annotations

import sys

from trainer.train import main

arguments = sys.argv[1:]
sys.exit(main(arguments[1:] if arguments[:1] == ["--"] else arguments))  # some versions pass the dashes on
