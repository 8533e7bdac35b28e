import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_agents.runtime.interrupts import Interrupt, LoopRunner, interrupted


def test_first_signal_requests_a_stop_and_second_interrupts():
    message = []
    with Interrupt(message.append) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested and "SIGINT" in message[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _sleep(begun):
    begun.set()
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_forked_child_as_without_training(number):
    context, messages = multiprocessing.get_context("fork"), []

    async def fork():
        with Interrupt(messages.append) as interrupt:
            begun = context.Event()
            child = context.Process(target=_sleep, args=(begun,), daemon=True)
            child.start()
            assert begun.wait(60)
            os.kill(child.pid, number)
            child.join(10)
            code = child.exitcode
            child.kill()
            return code, interrupt.requested

    code = {signal.SIGINT: 1, signal.SIGTERM: -signal.SIGTERM}[number]  # Ctrl-C raises KeyboardInterrupt in the child
    assert LoopRunner().run(fork()) == (code, False) and not messages


def test_a_runner_keeps_its_loop_between_calls_and_closes_once():
    closed = []

    async def on_close():
        closed.append(asyncio.get_running_loop())

    async def loop():
        return asyncio.get_running_loop()

    runner = LoopRunner(on_close)
    first, second = runner.run(loop()), runner.run(loop())
    runner.close()
    runner.close()
    assert first is second and closed == [first]


@pytest.mark.parametrize("notebook", [True, False])
def test_open_runner_is_closed_at_exit(notebook):
    code = f"""
import asyncio
from forge_agents.runtime.interrupts import LoopRunner
async def on_close(): print("closed")
async def work(): return 3
async def cell(): return LoopRunner(on_close).run(work())
print(asyncio.run(cell()) if {notebook} else LoopRunner(on_close).run(work()))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert (ran.stdout, ran.stderr) == ("3\nclosed\n", "")


@pytest.mark.slow
def test_open_runner_closes_at_exit_before_monarch_ends(probe_actors):
    code = (
        f"FOLDER = {str(Path(probe_actors.__file__).parent)!r}"
        """
import sys
sys.path.insert(0, FOLDER)
from probe_actors import Probe
from forge_agents.runtime import mesh
from forge_agents.runtime.interrupts import LoopRunner
probes = []
async def ask():
    print(len(await mesh.call_all(probes[0], 1, "pid", timeout_s=110, who="probe")))
async def on_close():
    await ask()
    await mesh.shutdown_all()
async def work():
    probes.append(mesh.spawn_procs("probe", threads=1).spawn("probe", Probe))
    await ask()
if __name__ == "__main__":
    LoopRunner(on_close).run(work())
"""
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert (ran.stdout, ran.stderr) == ("1\n1\n", "")


def test_inside_a_running_loop_the_work_moves_to_a_thread():
    async def on_close():
        pass

    async def work():
        await asyncio.sleep(0)
        return 3

    async def notebook():
        runner = LoopRunner(on_close)
        try:
            return runner.run(work())
        finally:
            runner.close()

    assert asyncio.run(notebook()) == 3
    runner = LoopRunner(on_close)
    assert runner.run(work()) == 3

    async def meanwhile():
        return runner.run(work())

    async def end():
        runner.close()

    assert asyncio.run(meanwhile()) == 3, "one that began where no loop ran"
    assert runner.run(work()) == 3
    asyncio.run(end())


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_stopped_run_reports_the_saved_step(number, error):
    message = []
    with Interrupt(message.append) as interrupt:
        interrupt.stop_if_requested(3, Path("runs/x"))
        os.kill(os.getpid(), number)
        with pytest.raises(error) as ended:
            interrupt.stop_if_requested(3, Path("runs/x"))
    output = message[-1] if error is SystemExit else str(ended.value)
    assert "after step 3, saved in runs/x. Run it again" in output
    assert error is KeyboardInterrupt or ended.value.code == 143


@pytest.mark.parametrize("listens", [True, False])
def test_ctrl_c_in_a_notebook_reaches_the_worker_thread(listens):
    message, observed = [], []

    async def on_close():
        pass

    async def work():
        with Interrupt(message.append) if listens else contextlib.nullcontext() as interrupt:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                for _ in range(500):
                    await asyncio.sleep(0.01)
                    if listens and interrupt.requested:
                        interrupt.stop_if_requested(3, Path("runs/x"))
            except asyncio.CancelledError:
                observed.append("cancelled")
                raise

    async def notebook():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio.run has put one of its own
        runner = LoopRunner(on_close)
        try:
            with pytest.raises(KeyboardInterrupt, match="after step 3" if listens else None):
                runner.run(work())
        finally:
            runner.close()

    try:
        asyncio.run(notebook())
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (["finishing" in line for line in message], observed) == (([True], []) if listens else ([], ["cancelled"]))


SCRIPT = """
import asyncio, signal, time
from forge_agents.runtime.interrupts import LoopRunner
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
async def closing():
    print("closing", flush=True)
    await asyncio.sleep({close_s})
    print("closed", flush=True)
async def work():
    print("ready", flush=True)
    {work}
def call(): LoopRunner(closing, lambda: "stopped; here it goes on").run(work())
async def notebook(): call()
{call}
"""
PLAIN, NOTEBOOK = "call()", "asyncio.run(notebook())"


@pytest.mark.parametrize(
    ("call", "work", "close_s", "presses", "lines"),
    [
        (PLAIN, "await asyncio.sleep(60)", 0, "ready", ["SIGINT: ", "closing", "closed", "stopped; here"]),
        (PLAIN, "time.sleep(60)", 0, "ready SIGINT:", ["SIGINT: ", "closing", "closed", "stopped; here"]),
        (PLAIN, "await asyncio.sleep(60)", 60, "ready closing", ["SIGINT: ", "closing", "stopped; here it goes on"]),
        (NOTEBOOK, "await asyncio.sleep(60)", 0, "ready", ["SIGINT: ", "closing", "closed", "stopped; here"]),
        (NOTEBOOK, "await asyncio.sleep(60)", 60, "ready closing", ["SIGINT: ", "closing", "SIGINT: ", "stopped"]),
        (PLAIN, "raise KeyError('x')", 0, "", None),
    ],
)
def test_ctrl_c_in_a_script_prints_one_line(call, work, close_s, presses, lines):
    code = SCRIPT.format(call=call, work=work, close_s=close_s)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    output = []
    for mark in presses.split():
        while not any(line.startswith(mark) for line in output):
            output.append(process.stdout.readline().strip())
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=300)[0].splitlines()
    if lines is None:
        assert "KeyError: 'x'" in output and "Traceback (most recent call last):" in output
        return
    assert process.returncode == -signal.SIGINT
    starts = [line.startswith(start) for line, start in zip(output[1:], lines, strict=True)]
    assert starts == [True] * len(lines), output


def test_an_interrupt_shows_in_ipython_as_one_line():
    assert interrupted("stopped; here")._render_traceback_() == ["stopped; here"]


def test_interrupt_is_one_line_next_to_any_other_hook(monkeypatch, capsys):
    errors = []
    monkeypatch.setattr(sys, "excepthook", functools.partial(errors.append))  # a hook of the program
    for _ in range(2):
        error = interrupted("stopped; here")
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "stopped; here\n" and errors == []


def test_interrupt_at_the_end_of_the_last_work_is_raised():
    """The loop's stop is due then and stops the cancellation of other tasks, too."""

    async def interrupt():
        raise KeyboardInterrupt

    async def close():
        tasks.extend(map(asyncio.ensure_future, (asyncio.sleep(60), interrupt())))

    tasks, runner = [], LoopRunner(close)
    runner.run(asyncio.sleep(0))
    with pytest.raises(KeyboardInterrupt, match="Processes that did not end in time were killed"):
        runner.close()
    assert isinstance(tasks[1].exception(), KeyboardInterrupt)
