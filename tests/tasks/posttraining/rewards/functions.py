"""Reward functions, and what goes wrong in them."""

import ast
import os
import subprocess
import sys
import time


def parses(answers):
    """1 for an answer that is Python."""
    return [is_python(one.text) for one in answers]


def is_python(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return 0
    return 1


def right(answers):
    """1 where it is what the record says."""
    return [float(one.text == one.record["answer"]) for one in answers]


def asked(answers):
    return [len(one.prompt[-1]["content"]) for one in answers]


def some_fail(answers):
    """Raises, sleeps, takes all memory or dies, where the answer says so."""
    for one in answers:
        if one.text == "raise":
            raise RuntimeError("no")
        if one.text == "sleep":
            time.sleep(60)
        if one.text == "take":
            bytearray(10**10)
        if one.text == "die":
            os._exit(3)
    return [len(one.text) for one in answers]


def begins(answers):
    """Begins a process that outlives it, whose number goes to a file; then takes too long."""
    began = subprocess.Popen(["sleep", "300"])
    with open(answers[0].record["file"], "w") as file:
        file.write(str(began.pid))
    time.sleep(300)


def reads(answers):
    """What is there to be read: nothing."""
    return [len(sys.stdin.read()) for _ in answers]


def prints(answers):
    print("as people do", flush=True)
    return [1 for _ in answers]


def one_for_all(answers):
    return [1.0]


def no_number(answers):
    return [float("nan") for _ in answers]


def texts(answers):
    return ["good" for _ in answers]


def nothing(answers):
    return None
