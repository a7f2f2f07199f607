"""`ssmd warm` at a terminal: beginnings from files, stdin and sessions, lists, files to export and import, hostile input.

The daemon is in this process; the commands run in their own. Tests of kills have a daemon in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, soon
from daemon_process import DaemonProcess
