"""Captions of the tables: how to read each."""

from __future__ import annotations

COST = (
    "Lost: training time, with steps running beside the save. Stall: until the call returned; for formats that do not "
    "save in the background, with the sync. Durable: until all was on the disk. Times raw disk: against direct writes "
    "of as many bytes, in the same round. Serialise: the same save into memory (/dev/shm). Write: what it takes longer "
    "to the disk, a format's own syncs included. Fsync: our own sync after the call. Peak memory: what the first save "
    "in a fresh process takes beyond the model. Median (lowest to highest)."
)
FORMATS = "Of raw: the bytes on the disk over those of weights and momentum. Saved and on the disk; loaded cold."
SCALE = (
    "All ranks hold the same state. Beyond one copy: bytes on the disk that are there twice. Ranks of TensorFlow, JAX "
    "and Chainer are independent processes here: their own multi-host saving is not tested."
)
DETERMINISM = (
    "Is the run after a restart in a fresh process the undisturbed one, bit for bit? Control: two undisturbed runs. "
    "Saving itself: a run that saves everything at every point, compared with one that does not save. Usual: what the "
    "framework's documentation saves. Where the control differs, nothing can be judged. All these runs have one "
    "thread, and TensorFlow runs with op determinism on."
)
STATES = "The parts that were left out one by one, and whether the usual way has them."
CRASH_SAFETY = (
    "Kill: SIGKILL at moments spread over a save that overwrites, some of them right after its first change; then all "
    "of the old or all of the new one must load. A save that was over before its kill is a try, but no kill. Bit flip, "
    "truncation: only the largest file is damaged; that must be noticed on loading."
)
LIMITS = (
    "Plain reads, writes and copies of as many bytes, in the same rounds, to compare with; several threads may beat a "
    "plain write or copy. Raw disk: direct writes and fsync."
)
FRAMEWORKS = "Each framework runs in an environment of its own; one that could not be installed says why."
MACHINE = "The numbers are of this machine and of no other."
VERDICTS = {  # by whether it is a kill; "safe" would be a promise, so other words are shown
    True: {"safe": "no kill harmed it", "unsafe": "harmed"},
    False: {"safe": "none loaded silently", "unsafe": "loaded silently"},
}
SETTINGS = {"mtbf_s": "time between failures", "models": "models with costs", "memory_gb": "memory (GB)"}


def killed(models: list[str]) -> str:
    """Return a sentence with the models that were killed, for the end of a caption.

    >>> killed(["small-gpt"]), killed([])
    (' Killed while saved: small-gpt.', '')
    """
    return f" Killed while saved: {', '.join(models)}." if models else ""
