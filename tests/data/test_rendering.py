"""Templates that run wild end in words, and nothing is left of the process that rendered them."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from hetero_mpi.data import template_process
from hetero_mpi.data.chat_template import choose_template, render_prompt, tokenize_records
from hetero_mpi.data.record_shapes import BadRecords
from hetero_mpi.data.template_process import LIMIT_S
from tests.data import test_masks, test_tools
from tests.data.test_masks import FORMATS, record, tokenizer_of
from tests.support.errors import refuses

CHATML = FORMATS["chatml"]


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.chat_template = template
    return tokenizer


LOOPS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'x' * 10**9 }}", "exceeds its memory limit"),
        ("{{ messages[0].content * 10**9 }}", "exceeds its memory limit"),
        ("{{ messages[0].content|center(10**9) }}", "exceeds its memory limit"),
        ("{{ '%1000000000d' % messages|length }}", "exceeds its memory limit"),
        ("{{ '{:1000000000}'.format(messages|length) }}", "exceeds its memory limit"),
        ("{{ '{:>{}}'.format('a', 10**9) }}", "exceeds its memory limit"),
        ("{{ messages[0].content * 10**8 }}", r"prints 200,000,000 characters|exceeds its memory limit|needed more"),
        ("{{ [messages] * 10**9 }}", "exceeds its memory limit"),
        (LOOPS, "within 5 s of CPU time and 512 MiB; it took longer"),
        (
            "{{ (10 ** (10 ** messages|length * 10 ** 8))|length }}",
            "it took longer|exceeds its memory limit|needed more",
        ),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "RecursionError|signal \\d+ killed it"),
    ],
)
def test_a_template_that_runs_wild(template: str, expected: str) -> None:
    with refuses("template.failed"):
        render_prompt(with_template(template), "Hi", "chat")


@pytest.mark.slow
def test_only_the_record_that_a_template_runs_wild_on_is_lost() -> None:
    wild = "{% if 'wild' in messages[0].content %}" + LOOPS + "{% endif %}" + CHATML.template
    tokenizer, bad = with_template(wild), BadRecords(1)
    records = [record(f"u: {said}", "a: So") for said in ("one", "wild", "two", "three")]
    begun = time.process_time()
    found = list(tokenize_records(tokenizer, choose_template(tokenizer, "chat"), records, bad))
    assert [entry.record.messages[0].content for entry in found] == ["one", "two", "three"]
    assert len(bad.problems) == 1 and "it took longer" in bad.problems[0].text
    assert time.process_time() - begun < LIMIT_S, "another process has worked"


def test_the_text_is_that_of_apply_chat_template() -> None:
    """With all templates of these tests: a conversation, a question, and with tools."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Grün 🙂 \u2028"},
        {"role": "assistant", "content": "So", "name": None},
    ]
    for name, wanted in {**test_masks.FORMATS, **test_tools.FORMATS}.items():
        tokenizer = with_template(wanted.template)
        tokenizer.add_special_tokens({"eos_token": wanted.end, **({"bos_token": wanted.begin} if wanted.begin else {})})
        template = choose_template(tokenizer, "chat")
        asked = template_process.rendered_prompt(template, messages[:1])
        assert asked == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False), name
        for tools in (None, test_tools.TOOLS):
            assert template.text(messages, tools)[0] == tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False
            )


def child() -> psutil.Process:
    (found,) = [
        one for one in psutil.Process().children() if "hetero_mpi.data.template_process" in " ".join(one.cmdline())
    ]
    return found


def test_the_process_that_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(CHATML.template)
    expected = render_prompt(tokenizer, "Hi", "chat")
    first = child()
    assert not any("torch" in one.path for one in first.memory_maps()) if sys.platform == "linux" else True
    render_prompt(tokenizer, "Hi", "chat")
    assert child().pid == first.pid, "one process for all"
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    assert render_prompt(tokenizer, "Hi", "chat") == expected and child().pid != first.pid


IDLE = """
import sys, time
from hetero_mpi.data import template_process
from hetero_mpi.data.answers import ChatTemplate
template = ChatTemplate("chat", "{{ messages[0].content }}", None, {})
said = template_process.rendered_prompt(template, [{"role": "user", "content": "a"}])
print(said, template_process._PROCESS._process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_caller_is_killed() -> None:
    caller = subprocess.Popen([sys.executable, "-c", IDLE], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    said, pid = caller.stdout.readline().split()
    assert said == "a" and psutil.pid_exists(int(pid))
    caller.kill()
    caller.wait()
    caller.stdout.close()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_process_that_is_not_asked_ends() -> None:
    program = "from hetero_mpi.data import template_process; template_process.IDLE_S = 0.1; template_process._main()"
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=os.open(os.devnull, os.O_RDONLY), timeout=60, capture_output=True
    )
    assert done.returncode == 0
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as idle:
        assert idle.wait(60) == 0
