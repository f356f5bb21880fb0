"""Strikes the driver of a run when one of its processes calls a named function for the n-th time.

Copied as `sitecustomize.py` to where every Python process of a run looks first, so nothing in the code knows of it:

    FATE=module:function:count:signal
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from signal import SIGKILL, Signals


class Fate(importlib.abc.MetaPathFinder):
    """Waits for the module, and wraps its function."""

    def __init__(self, module, function, count, signal, driver):
        self.module, self.function, self.count = module, function, int(count)
        self.signal, self.driver = Signals[signal], int(driver)

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            self.wrap(module)

        spec.loader.exec_module = execute_and_wrap
        return spec

    def wrap(self, module):
        *owners, name = self.function.split(".")
        owner = module
        for part in owners:
            owner = getattr(owner, part)
        wrapped = getattr(owner, name)

        def struck(*arguments, **keywords):
            self.count -= 1
            if self.count == 0:
                os.kill(self.driver, self.signal)
                if self.signal == SIGKILL:
                    time.sleep(600)  # stay in the middle of it
            return wrapped(*arguments, **keywords)

        setattr(owner, name, struck)
        for other in list(sys.modules.values()):  # of a warm command, which have imported it by name
            if getattr(other, "__dict__", {}).get(name) is wrapped:
                setattr(other, name, struck)


if os.environ.get("FATE"):
    # The driver is the first to come by; what it starts inherits its number.
    driver = os.environ.setdefault("FATE_DRIVER", str(os.getpid()))
    fate = Fate(*os.environ["FATE"].split(":"), driver)
    if fate.module in sys.modules:  # of a warm command
        fate.wrap(sys.modules[fate.module])
    else:
        sys.meta_path.insert(0, fate)
