"""What holds for every test, and for the commands that tests start: no display, no network, one thread.

Set before torch is imported, which reads the number of threads once.
"""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["SDL_VIDEODRIVER"] = "dummy"
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background lets them, and so every command they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from models import family, folder, policy, tiny_folders  # noqa: F401 (fixtures)
