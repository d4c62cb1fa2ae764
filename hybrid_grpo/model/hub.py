"""Whether the Hugging Face hub can be asked for what is not on this machine."""

import sys
from functools import cache

from huggingface_hub import constants, get_session

_PATIENCE_S = 5.0


@cache
def silence() -> str:
    """Return why the hub cannot be asked, and the way out; empty if it answers.

    If it does not answer, this process goes offline and uses the hub's cache: for each file, libraries would try again
    and again for half a minute, and print every attempt.
    """
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set: unset it"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # of httpx or httpx2, by the version of huggingface_hub
        if type(error).__name__ == "ReadTimeout":
            return ""  # it is there, and slow
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        return f"the hub does not answer ({constants.ENDPOINT}): check the network or HF_ENDPOINT"
    return ""
