"""The demo's command line.

python -m demo up      start everything, show it, run until Ctrl-C
python -m demo stop    end a run, also one that was killed
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from demo.errors import StepFailed
from demo.screen import Screen
from demo.seed import ROOT
from demo.up import Demo, stop


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="The whole platform, here.")
    parser.add_argument("command", choices=["up", "stop"])
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="default: .demo")
    args = parser.parse_args()
    folder = args.folder.resolve()
    screen = Screen()
    if args.command == "stop":
        stop(folder, screen)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with Demo(folder, screen) as demo:
            demo.up()
            demo.watch()
    except StepFailed as failure:
        screen.print(f"\n✗ {failure}", style="bold red")
        return 1
    except KeyboardInterrupt:
        return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
