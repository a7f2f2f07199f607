"""The artifacts that tests in a Windows Python ask for, made here, as no converter runs there; prints their folders."""

from __future__ import annotations

import conftest
from windows.listed import ARTIFACTS


def main() -> None:
    made = conftest.opened()
    for name in ARTIFACTS:
        made[name]
    print("|".join("Z:" + str(folder).replace("/", "\\") for folder in (made.folder, made.sources)))


if __name__ == "__main__":
    main()
